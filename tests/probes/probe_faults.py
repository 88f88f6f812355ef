"""Faults of one node of a job, injected on the throw-away Slurm, with the finding that the probe must report."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_cluster import throwaway

from rlhf_core.config.loading import load
from rlhf_core.config.site import Site
from rlhf_core.control.node_probe import probe_nodes
from rlhf_core.scheduler import get_scheduler
from rlhf_core.scheduler.base import JobRequest
from rlhf_core.schemas.checks import CheckResult, CheckStatus
from rlhf_core.schemas.resources import Submission
from rlhf_core.schemas.run import RunSpec

NUM_NODES = 3
"""The fewest of which one can be unlike the others."""
ROWS = '{"prompt": "3 1 2", "answer": "1 2 3"}\n{"prompt": "5 4", "answer": "4 5"}\n'


class Scene:
    """A cluster with a run and faults of its nodes."""

    def __init__(self, cluster: throwaway.Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.settings: list[str] = ["supervise.join_s=20"]
        self.before_submission: list[Callable[[Path], None]] = []
        """Called with the run directory, before there is a job."""
        self._variables: dict[str, dict[str, Any]] = {}

    def on_node(self, node: str, *words: str) -> None:
        """Run a command in the namespaces of a node."""
        subprocess.run([*self.inside(node), *words], check=True, capture_output=True)

    def inside(self, node: str) -> list[str]:
        """Command prefix that enters the namespaces of a node."""
        return ["nsenter", "--target", str(self.cluster.pid(f"slurmd-{node}")), "--mount", "--net"]

    @contextmanager
    def mounted(self, node: str, target: Path, *what: str) -> Iterator[None]:
        """Mount something on a node, invisible to the other nodes."""
        self.on_node(node, "mount", *what, str(target))
        try:
            yield
        finally:
            self.on_node(node, "umount", "--lazy", str(target))

    @contextmanager
    def variables(self, **of_nodes: dict[str, Any]) -> Iterator[None]:
        """Set or unset variables on nodes, in addition to those that other faults set there."""
        for node, values in of_nodes.items():
            own = self._variables.setdefault(node, {})
            assert not own.keys() & values.keys(), "one fault would undo another"
            own.update(values)
            self.cluster.variables(node, **own)
        try:
            yield
        finally:
            for node in of_nodes:
                self.cluster.variables(node)


Disturb = Callable[[Scene, ExitStack], None]


@dataclass(frozen=True)
class Case:
    """One fault."""

    name: str
    disturb: Disturb
    check: str
    """Id of the finding that must block."""
    node: str = ""
    """Node that must be named; empty if no node is to blame."""
    says: tuple[str, ...] = ()
    """Text that the finding must contain."""
    also: tuple[str, ...] = ()
    """Ids of other findings that may come with it."""


def all_nodes(**values: Any) -> dict[str, dict[str, Any]]:
    """The same variables on every node."""
    return {f"node{number}": dict(values) for number in range(1, NUM_NODES + 1)}


def _nproc(scene: Scene, stack: ExitStack) -> None:
    scene.settings += ["resources.ranks_per_node=8", "loops.main.algorithm.prompts_per_step=24"]
    of_nodes = all_nodes(NPROC_PER_NODE="8")
    of_nodes["node3"]["NPROC_PER_NODE"] = "7"
    stack.enter_context(scene.variables(**of_nodes))


def _nproc_alone(scene: Scene, stack: ExitStack) -> None:
    stack.enter_context(scene.variables(node2={"NPROC_PER_NODE": "7"}))


def _version(scene: Scene, stack: ExitStack) -> None:
    paths = {}
    for version in ("0.32.0", "0.31.1"):
        info = scene.folder / version / f"vllm-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        paths[version] = str(info.parent)
    of_nodes = all_nodes(PYTHONPATH=paths["0.32.0"])
    of_nodes["node2"]["PYTHONPATH"] = paths["0.31.1"]
    stack.enter_context(scene.variables(**of_nodes))


def _variable(scene: Scene, stack: ExitStack) -> None:
    stack.enter_context(scene.variables(node2={"NCCL_ALGO": "Ring"}))


def _config(scene: Scene, stack: ExitStack) -> None:
    def other_spec(run_dir: Path) -> None:
        spec = run_dir / "spec.json"
        other = scene.folder / "other-spec.json"
        other.write_text(spec.read_text().replace('"learning_rate": 0.0003', '"learning_rate": 0.003'))
        assert other.read_text() != spec.read_text()
        stack.enter_context(scene.mounted("node3", spec, "--bind", str(other)))

    scene.before_submission.append(other_spec)


def _data(scene: Scene, stack: ExitStack) -> None:
    rows, other = scene.folder / "train.jsonl", scene.folder / "other.jsonl"
    rows.write_text(ROWS)
    other.write_text(ROWS.replace("5 4", "5 4 3"))
    scene.settings += [f"data.train={rows}", f"data.eval={rows}", "data.generator=", "data.generator_args={}"]
    stack.enter_context(scene.mounted("node2", rows, "--bind", str(other)))


def _same_rank(scene: Scene, stack: ExitStack) -> None:
    of_nodes = {f"node{number}": {"NODE_RANK": str(number - 1)} for number in range(1, NUM_NODES + 1)}
    of_nodes["node3"]["NODE_RANK"] = "1"
    stack.enter_context(scene.variables(**of_nodes))


def _no_nnodes(scene: Scene, stack: ExitStack) -> None:
    stack.enter_context(scene.variables(**{node: {"NNODES": str(NUM_NODES)} for node in ("node1", "node3")}))


def _missing(scene: Scene, stack: ExitStack) -> None:
    (scene.folder / "sitecustomize.py").write_text("import time\ntime.sleep(60)\n")
    stack.enter_context(scene.variables(node3={"PYTHONPATH": str(scene.folder)}))


def _clock(scene: Scene, stack: ExitStack) -> None:
    scene.cluster.clock("node3", 3600)
    stack.callback(scene.cluster.clock, "node3", 0)


def _disk(scene: Scene, stack: ExitStack) -> None:
    stack.enter_context(scene.mounted("node2", Path("/dev/shm"), "-t", "tmpfs", "-o", "size=1m", "tmpfs"))


def _link(scene: Scene, stack: ExitStack) -> None:
    scene.cluster.slow_link("node3", 50)
    stack.callback(scene.cluster.mend_link, "node3")


def _dead_link(scene: Scene, stack: ExitStack) -> None:
    address = scene.cluster.command("scontrol", "show", "node", "node3").partition("NodeAddr=")[2].split()[0]
    route = ("ip", "route", "{}", "blackhole", f"{address}/32")
    scene.on_node("node2", *(word.format("add") for word in route))
    stack.callback(scene.on_node, "node2", *(word.format("del") for word in route))


def _processor(scene: Scene, stack: ExitStack) -> None:
    # The healthy nodes share the cores of this machine, with each other and with whatever else it does: they outweigh
    # the rest, and the slow one is slow beside the little that each of them may get. It needs longer to start, too.
    scene.cluster.prioritize_cpu(100)
    stack.callback(scene.cluster.prioritize_cpu, 1)
    scene.settings += ["supervise.join_s=90"]
    scene.cluster.slow_cpu("node2", 0.08)
    stack.callback(scene.cluster.mend_cpu, "node2")


def _twin(scene: Scene, stack: ExitStack) -> None:
    stack.enter_context(scene.variables(node3={"SLURM_NODEID": "1"}))


def _alone(scene: Scene, stack: ExitStack) -> None:
    stack.enter_context(scene.variables(node2={"SLURM_NODEID": None, "RLHF_NODES": None}))


def _no_file(scene: Scene, stack: ExitStack) -> None:
    def hide(run_dir: Path) -> None:
        stack.enter_context(scene.mounted("node2", run_dir / "spec.json", "--bind", "/dev/null"))

    scene.before_submission.append(hide)


UNLIKE_THE_PLAN = (
    Case("NPROC_PER_NODE 7 against 8", _nproc, "node.launch", "node3", ("NPROC_PER_NODE = 7",)),
    Case("NNODES unset on one node", _no_nnodes, "node.launch", "node2", ("NNODES absent",)),
    Case("another vllm version", _version, "node.versions", "node2", ("vllm = 0.31.1",), ("node.variables",)),
    Case("a wrong clock", _clock, "node.clock", "node3", ("s ahead",), ("node.variables",)),
)
UNLIKE_THE_OTHERS = (
    Case("NPROC_PER_NODE 7, unset elsewhere", _nproc_alone, "node.launch", "node2", ("NPROC_PER_NODE = 7",)),
    Case("the same NODE_RANK twice", _same_rank, "node.launch", "node3", ("node2 and node3", "NODE_RANK = 1")),
    Case("another environment variable", _variable, "node.variables", "node2", ("NCCL_ALGO = Ring",)),
    Case("another config", _config, "node.content", "node3", ("config (spec.json)",)),
    Case("another dataset file", _data, "node.content", "node2", ("data.train",)),
    Case("full shared memory", _disk, "node.disk", "node2", ("/dev/shm",)),
)
SLOW_LINK = Case("a slow link", _link, "probe.bandwidth", "node3", ("GB/s with node1", "GB/s with node2"))
ALONE = (
    Case("the same SLURM_NODEID twice", _twin, "node.identity", "node3", ("node 1 is node2",)),
    Case("a node that takes itself for alone", _alone, "node.identity", "node2", (f"planned for {NUM_NODES} nodes",)),
    Case("a node that does not come", _missing, "node.missing", "node3", (f"{NUM_NODES - 1} of {NUM_NODES} nodes",)),
    # On busy cores its other link may be slow as well: the node is then named instead of the link.
    Case("a link that nothing gets through", _dead_link, "probe.bandwidth", "node3", ("no response within", "node2")),
    # It may send as slowly as it computes.
    Case("a slow processor", _processor, "probe.matmul", "node2", ("of its cores",), ("probe.bandwidth",)),
    Case("a run directory that shows something else", _no_file, "node.shared_files", "node2", ("spec.json",)),
)
"""Faults that could hide others: they end the probe early, or change what is measured."""

CASES = (*UNLIKE_THE_PLAN, *UNLIKE_THE_OTHERS, SLOW_LINK, *ALONE)
FEW_PROBES: Mapping[str, tuple[Case, ...]] = {
    "a node unlike the plan": UNLIKE_THE_PLAN,
    "a node unlike the others": UNLIKE_THE_OTHERS,
    **{case.name: (case,) for case in ALONE},
}
"""The cases in as few probes as show each of them, by name; without the slow link, which whole runs have."""


@dataclass(frozen=True)
class Seen:
    """Result of a case."""

    results: tuple[CheckResult, ...]
    seconds: float
    """Time from the submission to the findings."""

    @property
    def troubles(self) -> list[CheckResult]:
        """Findings that did not pass."""
        return [one for one in self.results if one.status in (CheckStatus.BLOCKED, CheckStatus.WARNING)]

    def problems_with(self, *cases: Case) -> list[str]:
        """List the deviations from the expected result: one finding for each case, and nothing else."""
        problems = [f"{case.name}: {problem}" for case in cases for problem in self._missing_of(case)]
        known = {name for case in cases for name in (case.check, *case.also)}
        may_block = {(name, case.node) for case in cases for name in (case.check, *case.also)}
        return problems + [
            f"also found: {one.id} {one.node} {one.found}"
            for one in self.troubles
            if one.id not in known or (one.status is CheckStatus.BLOCKED and (one.id, one.node) not in may_block)
        ]

    def _missing_of(self, case: Case) -> list[str]:
        found = [one for one in self.troubles if (one.id, one.node) == (case.check, case.node)]
        blocks = [one for one in found if one.status is CheckStatus.BLOCKED]
        if not blocks:
            return [f"not found; instead: {[(one.id, one.node, one.found) for one in self.troubles]}"]
        text = " ".join(f"{one.found} {one.expected}" for one in blocks)
        return [f"{says!r} is missing in {text!r}" for says in case.says if says not in text]


class _Watched:
    """Scheduler with a hook before each submission."""

    def __init__(self, behind: Any, scene: Scene) -> None:
        self._behind = behind
        self._scene = scene

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)

    def submit(self, request: JobRequest) -> Submission:
        for change in self._scene.before_submission:
            change(request.scheduler_dir.parents[2])
        return self._behind.submit(request)  # type: ignore[no-any-return]


def probe(cluster: throwaway.Cluster, folder: Path, *cases: Case) -> Seen:
    """Probe the nodes of a cluster with these faults, or with none."""
    with ExitStack() as stack:
        scene = Scene(cluster, folder)
        for case in cases:
            case.disturb(scene, stack)
        spec, site = _run(scene, folder)
        scheduler: Any = _Watched(get_scheduler("slurm"), scene)
        began_s = time.monotonic()
        results = probe_nodes(spec, site, scheduler, lambda text: None)
        return Seen(results, time.monotonic() - began_s)


def _run(scene: Scene, folder: Path) -> tuple[RunSpec, Site]:
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    site = Site(
        home=folder, runs_dir=folder / "runs", database_url="", scheduler="slurm", compute_python=sys.executable
    )
    size = [f"resources.num_nodes={NUM_NODES}", "loops.main.algorithm.prompts_per_step=12"]
    return load("slurm-quickstart", [*size, "preflight.min_relative_speed=0.5", *scene.settings]), site
