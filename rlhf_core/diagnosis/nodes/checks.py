"""Checks on the nodes of an attempt, and findings from the facts that the nodes report. Pure.

Nodes that disagree on settings, versions or data hang in the first collective, or silently train different models
(ms-swift #3695, #2057, #4897). So every node reports its facts before there is a process group, and a finding names the
deviating node and the difference.
"""

import fnmatch
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rlhf_core.diagnosis.nodes.differences import ABSENT, by_value, differences
from rlhf_core.diagnosis.nodes.launch_variables import LAUNCHING, MEETING, contradictions
from rlhf_core.schemas.checks import CheckResult, CheckStatus
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.probe import NodeFacts
from rlhf_core.text.formatting import listed


class NodeCheck(StrEnum):
    """Checks made on nodes, in the order in which they are shown. The sentence of each member is part of
    docs/preflight.md."""

    MISSING = "node.missing"
    """A missing node makes all others wait in the rendezvous until it times out."""
    IDENTITY = "node.identity"
    """Two nodes with the same identity, or a node configured as the only one, never form one world."""
    LAUNCH = "node.launch"
    """Differing NNODES, NODE_RANK or NPROC_PER_NODE make two worlds, or one that is never complete (ms-swift #3695)."""
    VARIABLES = "node.variables"
    """An NCCL, CUDA or torch variable set on only one node lets ranks choose different algorithms."""
    VERSIONS = "node.versions"
    """Different package versions use different protocols or compute different results."""
    CONTENT = "node.content"
    """A node that reads different code, data, config or tokenizer files takes different branches and hangs."""
    TRAINER = "node.trainer"
    """A node without the environment or program of an external trainer ends every attempt at once."""
    HARDWARE = "node.hardware"
    """A node with 7 GPUs among nodes with 8, or with slower GPUs, holds up all the others."""
    GPU_HEALTH = "node.gpu_health"
    """A GPU with uncorrected errors or an XID fails again, some steps later."""
    DISK = "node.disk"
    """A full temporary folder or shared memory ends a rank when it first writes there."""
    LIMITS = "node.limits"
    """Limits on open files or locked memory cause NCCL errors that do not mention them."""
    CLOCK = "node.clock"
    """A wrong clock breaks certificates, build caches and the order of events."""
    SHARED_FILES = "node.shared_files"
    """A node that does not see the run directory can neither load nor save."""
    NETWORK = "node.network"
    """An address on no interface makes the rendezvous time out."""
    PTRACE = "node.ptrace"
    """If processes must not be traced, the stack of a hung rank cannot be read."""
    PLUGIN = "node.plugin"
    """Checks that a site makes on its nodes (entry points `rlhf_flows.node_checks`)."""
    ANSWER = "probe.answer"
    """A rank that does not finish a small measurement would hang the training."""
    LATE = "probe.late"
    """If all ranks get no further than the same step, without an error, training would not start either."""
    MATMUL = "probe.matmul"
    """One slow device holds up every step of all the others."""
    BANDWIDTH = "probe.bandwidth"
    """One slow link sets the pace of every all-reduce (NeMo-RL #3670)."""
    LATENCY = "probe.latency"
    """Delays of small messages add up over the thousands of collectives in a step."""
    ALL_REDUCE = "probe.all_reduce"
    """An all-reduce with a wrong sum trains on noise, silently."""
    ALL_GATHER = "probe.all_gather"
    """An all-gather with wrong or swapped parts mixes up the ranks' data."""


NEVER_OFF = frozenset({NodeCheck.MISSING, NodeCheck.IDENTITY})
"""Checks that cannot be disabled: the attempt cannot run without that node."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PER_NODE = _words(
    """
    SLURM* RLHF_* PMI* PMIX* OMPI_* HYDRA* HOST HOSTNAME PWD OLDPWD SHLVL _ TMP TEMP TMPDIR SSH_* XDG_* DBUS_*
    KRB5CCNAME TERM LS_COLORS MAIL GPU_DEVICE_ORDINAL ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES
    CUDA_VISIBLE_DEVICES ZE_AFFINITY_MASK INVOCATION_ID JOURNAL_STREAM SYSTEMD_* LESS* XAUTHORITY DISPLAY
    VLLM_HOST_IP NCCL_HOSTID TRITON_CACHE_DIR TORCH_EXTENSIONS_DIR
    """
)
"""Variables that always differ between nodes, or are irrelevant to training; ``*`` stands for any text."""

MUST_AGREE = _words(
    """
    NCCL_* GLOO_* TORCH_* TORCHELASTIC_* PYTORCH_* CUDA_* CUBLAS* CUDNN* VLLM_* DS_* DEEPSPEED_* ACCELERATE_*
    TRITON_* HF_* TRANSFORMERS_* TOKENIZERS_* OMP_* MKL_* KMP_* UCX_* FI_* RDMAV_* SHARP_* PYTHONHASHSEED
    HIP_* HSA_* RCCL_*
    """
)
"""Variables that change results or communication: a node where one differs is not used for training."""

MAY_DIFFER = (
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "NCCL_IB_HCA",
    "NCCL_TOPO_FILE",
    "UCX_NET_DEVICES",
    "HF_TOKEN",
)
"""Variables among them that name a device of the node: a difference is a warning."""

CORE_PACKAGES = _words(
    """
    accelerate amdgpu-driver bitsandbytes datasets deepspeed flash-attn flashinfer-python liger-kernel numpy nvidia-*
    peft python ray rlhf-flows safetensors sglang tokenizers torch torchvision transformer-engine transformers triton
    trl verl vllm vllm-* xformers ms-swift openrlhf
    """
)
"""Packages whose versions must agree; a difference in others is a warning."""
SHOWN_KEYS = 6
SHOWN_CHARACTERS = 120


@dataclass(frozen=True)
class Plan:
    """Expected configuration of the nodes, from the run's spec and placement."""

    names: tuple[str, ...]
    """Names of the nodes in the order of the allocation."""
    ranks_per_node: int
    gpus_per_node: int = 0
    per_node_variables: tuple[str, ...] = ()
    """Further variables that may differ between nodes."""
    max_clock_offset_s: float = 5.0
    num_trainer_nodes: int = 0
    """Nodes with trainer ranks; 0 for all."""


def compare(facts: Mapping[int, NodeFacts], ahead_s: Mapping[int, float], plan: Plan) -> list[CheckResult]:
    """List the faults of single nodes and the disagreements between nodes.

    Args:
        facts: Facts that the nodes reported, by place in the allocation.
        ahead_s: Lead of node 0's clock over each other node's, in seconds.
        plan: Expected configuration of the nodes.

    Returns:
        All findings. A blocking finding names its node, unless no single node is responsible.
    """
    found = missing({one.node for one in facts.values()}, plan)
    found += [complaint for index in sorted(facts) for complaint in facts[index].complaints]
    there = {index: one for index, one in sorted(facts.items()) if one.index >= 0}
    found += _launch(there, plan)
    found += _variables(there, plan)
    found += _versions(there)
    found += _differing(
        NodeCheck.CONTENT, {one.node: one.content for one in there.values()}, CheckStatus.BLOCKED, _CONTENT_ADVICE
    )
    found += _hardware(there, plan)
    found += _clocks(there, ahead_s, plan)
    troubled = {result.id for result in found}
    compared = f"the same on all {len(there)} nodes" if len(there) > 1 else "one node, nothing to compare with"
    agreed = (
        NodeCheck.LAUNCH,
        NodeCheck.VARIABLES,
        NodeCheck.VERSIONS,
        NodeCheck.CONTENT,
        NodeCheck.HARDWARE,
        NodeCheck.CLOCK,
    )
    found += [passed(check, compared) for check in agreed if check not in troubled]
    own = (
        NodeCheck.GPU_HEALTH,
        NodeCheck.DISK,
        NodeCheck.LIMITS,
        NodeCheck.SHARED_FILES,
        NodeCheck.NETWORK,
        NodeCheck.PTRACE,
    )
    found += [passed(check, f"passed on all {len(there)} nodes") for check in own if check not in troubled]
    return found


def blocked(check: NodeCheck, found: str, expected: str, advice: str, node: str = "") -> CheckResult:
    """Report a problem that prevents the use of the node, or of all nodes if it names none."""
    return CheckResult(id=check, status=CheckStatus.BLOCKED, found=found, expected=expected, advice=advice, node=node)


def warning(check: NodeCheck, found: str, expected: str, advice: str, node: str = "") -> CheckResult:
    """Report a problem that does not stop the run."""
    return blocked(check, found, expected, advice, node).model_copy(update={"status": CheckStatus.WARNING})


def passed(check: NodeCheck, found: str) -> CheckResult:
    """Report that the check passed."""
    return CheckResult(id=check, status=CheckStatus.PASSED, found=found)


def failure_kind(blocking: Sequence[CheckResult]) -> FailureKind:
    """Kind of the failure of an attempt because of these findings.

    Nodes that were all late without an error may only have been slow: their next start finds the files in memory that
    this one had to read.
    """
    others = [one for one in blocking if one.id != NodeCheck.LATE]
    if not others:
        return FailureKind.RENDEZVOUS
    return FailureKind.NODE_UNFIT if all(one.node for one in others) else FailureKind.CONFIG


def _differing(
    check: NodeCheck, values: Mapping[str, Mapping[str, str]], status: CheckStatus, advice: str
) -> list[CheckResult]:
    """Report one finding for each deviating node with all its differences, and one for each key without a majority."""
    found = differences(values)
    results = []
    for node in values:
        own = [difference for difference in found if difference.usual is not None and node in difference.odd]
        if own:
            shown = own[:SHOWN_KEYS]
            more = f" and {len(own) - len(shown)} more" if len(own) > len(shown) else ""
            results.append(
                CheckResult(
                    id=check,
                    status=status,
                    found=f"on {node}: " + _listed((one.key, one.odd[node]) for one in shown) + more,
                    expected=_listed((one.key, one.usual or "") for one in shown)
                    + f", as on {_count(own[0].num_usual)}",
                    advice=advice,
                    node=node,
                )
            )
    results += [
        CheckResult(
            id=check,
            status=status,
            found=f"{one.key} differs, and no value has a majority: "
            + ", ".join(f"{_short(value)} on {listed(holders, 4)}" for value, holders in by_value(one.odd).items()),
            expected=f"the same {one.key} on all nodes",
            advice=advice,
        )
        for one in found
        if one.usual is None
    ]
    return results


def _by_severity(
    check: NodeCheck, values: Mapping[str, Mapping[str, str]], is_grave: Callable[[str], bool], advice: str
) -> list[CheckResult]:
    """Block nodes that differ in grave keys, and warn about differences in all others."""
    grave = {node: {key: held for key, held in own.items() if is_grave(key)} for node, own in values.items()}
    other = {node: {key: held for key, held in own.items() if not is_grave(key)} for node, own in values.items()}
    return [
        *_differing(check, grave, CheckStatus.BLOCKED, advice),
        *_differing(check, other, CheckStatus.WARNING, advice),
    ]


def _listed(pairs: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{key} {value}" if value == ABSENT else f"{key} = {_short(value)}" for key, value in pairs)


def _short(value: str) -> str:
    return value if len(value) <= SHOWN_CHARACTERS else f"{value[:SHOWN_CHARACTERS]} ..."


def _count(number: int) -> str:
    return "the other node" if number == 1 else f"{number} nodes"


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


# ---------------------------------------------------------------------------------------------------------------------
# One check each

_CONTENT_ADVICE = (
    "put the same files on all nodes, preferably on a shared file system; a file system with a cache may need a moment "
    "after a change"
)


def missing(reported: Collection[str], plan: Plan) -> list[CheckResult]:
    """Findings about planned nodes that have not reported."""
    return [
        blocked(
            NodeCheck.MISSING,
            f"{name} did not report; {len(reported)} of {len(plan.names)} nodes did",
            "the agents of all nodes",
            f"read the job's log of {name}: its interpreter, container or shared folder may be missing",
            name,
        )
        for name in plan.names
        if name not in reported
    ]


def _launch(facts: Mapping[int, NodeFacts], plan: Plan) -> list[CheckResult]:
    found = []
    num_ranks = (plan.num_trainer_nodes or len(plan.names)) * plan.ranks_per_node
    for one in contradictions(list(facts.values()), plan.names, plan.ranks_per_node, num_ranks):
        report = blocked if one.is_grave else warning
        found.append(report(NodeCheck.LAUNCH, one.found, one.expected, one.advice, one.node))
    for name in MEETING:
        own = {one.node: {name: one.variables.get(name, ABSENT)} for one in facts.values()}
        found += _differing(
            NodeCheck.LAUNCH, own, CheckStatus.BLOCKED, "set it to the same value on all nodes, or on none"
        )
    return found


def _variables(facts: Mapping[int, NodeFacts], plan: Plan) -> list[CheckResult]:
    skipped = (*PER_NODE, *LAUNCHING, *plan.per_node_variables)
    values = {
        one.node: {name: value for name, value in one.variables.items() if not _matches(name, skipped)}
        for one in facts.values()
    }
    advice = "set it to the same value on all nodes (slurm.environment), or add it to preflight.per_node_variables"
    return _by_severity(
        NodeCheck.VARIABLES, values, lambda name: _matches(name, MUST_AGREE) and not _matches(name, MAY_DIFFER), advice
    )


def _versions(facts: Mapping[int, NodeFacts]) -> list[CheckResult]:
    of_trainer = "trainer's "
    values = {
        one.node: {**one.versions, **{f"{of_trainer}{name}": held for name, held in one.trainer_versions.items()}}
        for one in facts.values()
    }
    advice = "install the same environment on all nodes, preferably on a shared file system or in one image"
    return _by_severity(
        NodeCheck.VERSIONS, values, lambda key: _matches(key.removeprefix(of_trainer), CORE_PACKAGES), advice
    )


def _hardware(facts: Mapping[int, NodeFacts], plan: Plan) -> list[CheckResult]:
    found = []
    for one in facts.values():
        num_gpus = int(one.hardware.get("gpus", "0"))
        if num_gpus < plan.gpus_per_node:
            found.append(
                blocked(
                    NodeCheck.HARDWARE,
                    f"{one.node} has {num_gpus} working GPUs",
                    f"{plan.gpus_per_node}, as planned",
                    "ask the administrators; see `nvidia-smi -L` or `rocm-smi`, and the kernel log (Xid) on the node",
                    one.node,
                )
            )
    short = {result.node for result in found}
    complete = {one.node: one.hardware for one in facts.values() if one.node not in short}
    advice = "request one kind of node (slurm.constraint, slurm.gpu_type): the slowest sets the pace"
    return found + _by_severity(NodeCheck.HARDWARE, complete, lambda key: key == "gpu_types", advice)


def _clocks(facts: Mapping[int, NodeFacts], ahead_s: Mapping[int, float], plan: Plan) -> list[CheckResult]:
    """Compare each clock with the median of all, because node 0 itself may be wrong."""
    if len(facts) < 2:
        return []
    behind = {index: ahead_s.get(index, 0.0) for index in facts}
    middle = sorted(behind.values())[(len(behind) - 1) // 2]
    found = []
    for index, one in facts.items():
        offset = middle - behind[index]
        if abs(offset) > plan.max_clock_offset_s:
            found.append(
                blocked(
                    NodeCheck.CLOCK,
                    f"the clock of {one.node} is {abs(offset):.1f} s {'ahead' if offset > 0 else 'behind'}",
                    f"at most {plan.max_clock_offset_s:g} s from that of the other nodes",
                    f"start chrony or ntpd on {one.node}; preflight.max_clock_offset_s is the limit",
                    one.node if len(facts) > 2 else "",
                )
            )
    return found
