"""The probe of an attempt, which compares and measures the nodes before the workers start.

Every agent reports its node's facts (``facts.py``) and measures it with one process per rank
(``training/probes/node.py``); agent 0 compares them (``diagnosis``), writes ``probe-report.json`` and decides. An unfit
node ends the attempt, which records the node's name so that the next attempt excludes it.
"""

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlhf_core.diagnosis.nodes.checks import NEVER_OFF, NodeCheck, Plan, blocked, compare, missing
from rlhf_core.diagnosis.nodes.speed import Floors, better, judge_speed, needs_second_measurement
from rlhf_core.files.private import FILE_MODE
from rlhf_core.files.whole import write_model
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.checks import CheckResult, CheckStatus
from rlhf_core.schemas.probe import NodeFacts, NodeSpeed, PairSpeed, ProbeReport
from rlhf_core.schemas.resources import Placement
from rlhf_core.schemas.run import RunSpec
from rlhf_core.text.formatting import sentence
from rlhf_core.worker import processes
from rlhf_core.worker.nodes import facts as node_facts
from rlhf_core.worker.nodes.membership import Nodes

FACTS_S = 300.0
"""Time that a node has to gather its facts, in seconds; an external trainer's take up to twice its ``ANSWER_S``."""
GRACE_S = 15.0
"""Time that agent 0 waits for measurements beyond the nodes' own limit, in seconds."""
KILL_TIMEOUT_S = 5.0
"""Longest wait for killed processes to exit, in seconds."""
POLL_INTERVAL_S = 0.05


class Starter(Protocol):
    """Starts processes of this package."""

    @property
    def is_importing(self) -> bool:
        """True while it is worth waiting before the next start."""

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> processes.Child:
        """Start a process with these interpreter arguments and this environment."""


class Probe:
    """One node's part in the probe of an attempt; on agent 0 also the evaluation of all nodes.

    Args:
        endpoint: ``host:port`` of the agents' store; unused on a single node.
    """

    def __init__(
        self, run_dir: RunDir, attempt: int, nodes: Nodes, spec: RunSpec, placement: Placement, endpoint: str
    ) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self._nodes = nodes
        self._spec = spec
        self._placement = placement
        self._endpoint = endpoint
        self._folder = run_dir.attempt(attempt)
        self._plan = Plan(
            names=nodes.names,
            ranks_per_node=spec.resources.ranks_per_node,
            gpus_per_node=placement.gpus_per_node,
            per_node_variables=spec.preflight.per_node_variables,
            max_clock_offset_s=spec.preflight.max_clock_offset_s,
            num_trainer_nodes=placement.num_nodes - spec.rollout.nodes,
        )
        self._limit_s = spec.preflight.measurement_s(nodes.num)
        self._began_s = time.monotonic()
        # The original environment: variables that an agent sets for its workers depend on the node and may differ.
        self._environment = dict(os.environ)
        self._found: list[CheckResult] = []
        self._speeds: dict[int, NodeSpeed] = {}
        self._first_speeds: dict[int, NodeSpeed] = {}

    @property
    def measures(self) -> bool:
        """True if there is something to measure: links between nodes, or GPUs."""
        return self._nodes.num > 1 or self._plan.gpus_per_node > 0

    @property
    def timeout_s(self) -> float:
        """Time that agent 0 waits for the nodes' measurements, in seconds."""
        return self._limit_s + GRACE_S

    # -----------------------------------------------------------------------------------------------------------------
    # On every node

    def facts(self) -> NodeFacts:
        """Gather this node's facts and write them to the run directory if possible."""
        gpus = self._plan.gpus_per_node
        own = node_facts.gather(self._run_dir, self._attempt, self._nodes, self._spec, gpus, self._environment)
        with contextlib.suppress(OSError):
            write_model(self._folder.node_facts(own.node), own, FILE_MODE)
        return own

    def measure(self, number: int, starter: Starter, is_over: Callable[[], bool]) -> NodeSpeed:
        """Measure this node, together with all others, in ``PreflightSpec.measurement_s`` or little more.

        Args:
            number: 1, or 2 for the second measurement.
            starter: Starts the processes that measure.
            is_over: Polled during the measurement, which ends once it returns True.
        """
        deadline = time.monotonic() + self._limit_s

        def may_continue() -> bool:
            return time.monotonic() < deadline and not is_over()

        with tempfile.TemporaryDirectory(prefix="rlhf-probe-") as folder:
            store = str(Path(folder) / "store") if self._nodes.num == 1 else self._endpoint
            outputs = [Path(folder) / f"{local}.jsonl" for local in range(self._plan.ranks_per_node)]
            while starter.is_importing and may_continue():
                time.sleep(POLL_INTERVAL_S)
            started = [
                starter.start(self._command(local, number, store, output), os.environ)
                for local, output in enumerate(outputs)
            ]
            while any(process.poll() is None for process in started) and may_continue():
                time.sleep(POLL_INTERVAL_S)
            codes = [process.poll() for process in started]
            processes.kill_and_reap(started, KILL_TIMEOUT_S)
            return _digest(self._nodes.name, [_lines(output) for output in outputs], codes)

    def _command(self, local_rank: int, number: int, store: str, output: Path) -> Sequence[str]:
        fields = {
            "node": self._nodes.index,
            "num_nodes": self._nodes.num,
            "local_rank": local_rank,
            "ranks_per_node": self._plan.ranks_per_node,
            "store": store,
            "prefix": f"probe-{number}",
            "gpu": self._plan.gpus_per_node > 0,
            # Startup takes longest: all ranks import torch from one file system.
            "start_s": self._limit_s / 2,
            "timeout_s": self._limit_s / 6,
        }
        log = self._folder.restart(0).log(Role.PROBE, self._nodes.name, local_rank)
        command = ["-u", "-P", "-m", "rlhf_core.worker", "probe", json.dumps(fields)]
        return [*command, "--output", str(output), "--log", str(log)]

    # -----------------------------------------------------------------------------------------------------------------
    # On agent 0

    def without(self, joined: Collection[str]) -> bool:
        """Record that the agents of some nodes did not join.

        Args:
            joined: Names of the nodes whose agents joined.

        Returns:
            True if a node reports that a contradictory environment keeps it from joining.
        """
        confused = node_facts.all_confused(self._folder)
        self._found += [complaint for one in confused for complaint in one.complaints]
        self._found += missing({*joined, *(one.node for one in confused)}, self._plan)
        return bool(confused)

    def take_facts(
        self, facts: Mapping[int, NodeFacts], ahead_s: Mapping[int, float], broken: Mapping[str, str]
    ) -> None:
        """Compare the nodes' facts.

        Args:
            facts: Facts by index in the allocation.
            ahead_s: Seconds by which this node's clock is ahead of each other node's.
            broken: Reason why the agent of a node cannot read its orders, by node name.
        """
        found = compare(facts, ahead_s, self._plan)
        # A node that joined but could not read its orders is not missing.
        self._found += [one for one in found if not (one.id == NodeCheck.MISSING and one.node in broken)]
        advice = "check that the shared file system is mounted there and has the same content as elsewhere"
        expected = "a node that sees the run directory"
        self._found += [
            blocked(NodeCheck.SHARED_FILES, problem, expected, advice, node) for node, problem in broken.items()
        ]

    def take_speeds(self, speeds: Mapping[int, NodeSpeed], number: int) -> bool:
        """Judge the nodes' measurements; True if a second measurement is needed before reporting."""
        silent = {
            index: NodeSpeed(node=name, reached=("",), problems=("its agent did not report",))
            for index, name in enumerate(self._plan.names)
            if index not in speeds
        }
        self._speeds = {**speeds, **silent}
        if number == 1:
            self._first_speeds = self._speeds
        else:
            self._speeds = {index: better(self._first_speeds[index], one) for index, one in self._speeds.items()}
        found = self._judge()
        if number == 1 and needs_second_measurement(found):
            return True
        self._found += found
        return False

    def _judge(self) -> list[CheckResult]:
        preflight = self._spec.preflight
        floors = Floors(
            relative=preflight.min_relative_speed,
            bandwidth_gb_s=preflight.min_bandwidth_gb_s,
            latency_ms=preflight.max_latency_ms,
            matmul_tflops=preflight.min_matmul_tflops,
        )
        earlier = self._placement.usual_speeds
        # Compare each node with its own earlier readings on the same device.
        usual = {one.node: earlier.get(one.node, {}).get(one.device, {}) for one in self._speeds.values()}
        return judge_speed(self._speeds, floors, usual)

    def report(self) -> ProbeReport:
        """The report with all findings."""
        return ProbeReport(
            attempt=self._attempt,
            results=tuple(_with_disabled_skipped(self._found, self._spec.preflight.off)),
            speeds=tuple(self._speeds[index] for index in sorted(self._speeds)),
            seconds=round(time.monotonic() - self._began_s, 2),
            made_at=utc_now(),
        )


def _with_disabled_skipped(results: Iterable[CheckResult], off: Mapping[str, str]) -> list[CheckResult]:
    """The findings, with those of disabled checks marked as skipped and annotated with the reason."""
    return [
        one.model_copy(
            update={
                "status": CheckStatus.SKIPPED,
                "found": f"turned off: {off[one.id]}" + (f" ({one.found})" if one.expected else ""),
            }
        )
        if one.id in off and one.id not in NEVER_OFF
        else one
        for one in results
    ]


def in_a_sentence(results: Sequence[CheckResult]) -> str:
    """Summarise the blocking findings in a sentence: the reason why the attempt cannot continue."""
    shown = "; ".join(f"{one.found}, expected {one.expected}" for one in results[:3])
    more = f"; and {len(results) - 3} more" if len(results) > 3 else ""
    ids = ", ".join(dict.fromkeys(one.id for one in results))
    return f"the nodes did not pass their checks ({ids}): {shown}{more}. {sentence(results[0].advice)}"


# ---------------------------------------------------------------------------------------------------------------------
# Output of the measuring processes


def _lines(output: Path) -> list[dict[str, Any]]:
    """JSON lines of a process; none if it did not start. Truncated lines and other programs' output are skipped."""
    found = []
    for line in output.read_bytes().splitlines() if output.exists() else ():
        with contextlib.suppress(ValueError):
            content = json.loads(line)
            if isinstance(content, dict):
                found.append(content)
    return found


def _digest(node: str, outputs: Sequence[Sequence[Mapping[str, Any]]], codes: Sequence[int | None]) -> NodeSpeed:
    """One node's speed from its ranks' output: that of its slowest device, and the sum of its links.

    Args:
        codes: exit code of each rank; None for one that had to be ended.
    """
    merged = [{key: value for line in lines for key, value in line.items()} for lines in outputs]
    speeds = {rank: float(one["tflops"]) for rank, one in enumerate(merged) if "tflops" in one}
    slowest = min(speeds, key=lambda rank: speeds[rank], default=0)
    return NodeSpeed(
        node=node,
        device=next((str(one["device"]) for one in merged if "device" in one), ""),
        matmul_tflops=speeds.get(slowest, 0.0),
        slowest_rank=slowest,
        core_share=float(merged[slowest].get("core_share", 1.0)),
        pairs=_pairs([[line["pair"] for line in lines if "pair" in line] for lines in outputs]),
        reached=tuple(next((line["step"] for line in reversed(lines) if "step" in line), "") for lines in outputs),
        problems=tuple(
            str(one.get("problem", "")) or (f"it ended with exit code {code}" if code else "")
            for one, code in zip(merged, codes, strict=True)
        ),
    )


def _pairs(by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[PairSpeed, ...]:
    """Speed per peer node: the better of each rank's measurements, combined over all ranks of the node."""
    found = []
    for peer in sorted({int(pair["peer"]) for own in by_rank for pair in own}):
        tries = [[pair for pair in own if pair["peer"] == peer] for own in by_rank]
        good = [[pair for pair in own if "problem" not in pair] for own in tries]
        problem = next((str(own[0]["problem"]) for own, ok in zip(tries, good, strict=True) if own and not ok), "")
        found.append(
            PairSpeed(
                peer=peer,
                gb_s=sum(max(pair["gb_s"] for pair in own) for own in good if own),
                latency_ms=max((min(pair["latency_ms"] for pair in own) for own in good if own), default=0.0),
                problem=problem,
            )
        )
    return tuple(found)
