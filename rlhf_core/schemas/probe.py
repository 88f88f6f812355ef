"""Reports of nodes about themselves and each other before training."""

from rlhf_core.schemas.base import Finite, Int32, Label, Message, Moment, Schema
from rlhf_core.schemas.checks import CheckResult


class NodeFacts(Schema):
    """Facts that a node reports before any process group exists (``attempts/<n>/probe/<node>.json``)."""

    node: Label
    """Its name."""
    index: Int32
    """Its place in the allocation, from 0; -1 if its environment is contradictory."""
    versions: dict[str, str] = {}
    """Package to version; also ``python``, ``glibc``, and ``nvidia-driver`` or ``amdgpu-driver``."""
    trainer_versions: dict[str, str] = {}
    """The same for the environment of an external trainer; empty for the native trainer."""
    variables: dict[str, str] = {}
    """Its environment: listed names with their values, credentials masked; all others only as a keyed hash."""
    content: dict[str, str] = {}
    """Hash of the content that this node reads for ``config``, ``code``, ``data.train`` and so on."""
    hardware: dict[str, str] = {}
    """Number and type of its GPUs, and its cores."""
    complaints: tuple[CheckResult, ...] = ()
    """Problems found by the node itself."""


class PairSpeed(Schema):
    """Measured link between two nodes."""

    peer: Int32
    """Place of the other node in the allocation."""
    gb_s: Finite = 0.0
    """Best bandwidth in each direction, in GB/s, summed over the ranks that sent at the same time."""
    latency_ms: Finite = 0.0
    """Shortest time of an all-reduce of one number, in milliseconds."""
    problem: Message = ""
    """Reason why they could not connect; empty if they could."""


class NodeSpeed(Schema):
    """Measurements of the ranks of one node."""

    node: Label
    """Its name."""
    device: Label = ""
    """Measured device, for instance ``cpu x 2 threads`` or the name of a GPU."""
    matmul_tflops: Finite = 0.0
    """Speed of matrix products on its slowest device, in TFLOP/s; 0 if not measured."""
    slowest_rank: Int32 = 0
    """Local rank of that device."""
    core_share: Finite = 1.0
    """Share of its cores that this rank got meanwhile, 0 to 1; on GPUs always 1."""
    pairs: tuple[PairSpeed, ...] = ()
    """Links to the nodes that it exchanged data with."""
    reached: tuple[Label, ...] = ()
    """Last finished step of each local rank."""
    problems: tuple[Message, ...] = ()
    """Problem of each local rank; empty without one."""


class ProbeReport(Schema):
    """Report of agent 0 on the whole probe (``attempts/<n>/probe-report.json``)."""

    attempt: Int32
    """Number of the attempt, from 1."""
    results: tuple[CheckResult, ...]
    """All findings."""
    speeds: tuple[NodeSpeed, ...] = ()
    """Measurements of the nodes, in the order of the allocation."""
    seconds: Finite = 0.0
    """Duration of the probe, in seconds."""
    made_at: Moment
    """Time of the report (UTC)."""
