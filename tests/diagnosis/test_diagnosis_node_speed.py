"""Causes of slow measurements: a node, a link, or neither."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from rlhf_core.diagnosis.nodes.checks import failure_kind
from rlhf_core.diagnosis.nodes.speed import STEPS, Floors, better, judge_speed, needs_second_measurement
from rlhf_core.schemas.checks import CheckResult, CheckStatus
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.probe import NodeSpeed, PairSpeed

DONE = STEPS[-1]


def speeds(
    num: int = 4, links: dict[tuple[int, int], float | str] | None = None, **tflops: float
) -> dict[int, NodeSpeed]:
    """Nodes n0, n1 ... in a ring, equal except for some links and devices; a text is the problem of a link."""
    ring = [(node, (node + 1) % num) for node in range(num)] if num > 2 else [(0, 1)][: num - 1]
    found = {}
    for node in range(num):
        pairs = []
        for ends in ring:
            if node in ends:
                speed = (links or {}).get(ends, 10.0)
                peer = sum(ends) - node
                pairs.append(
                    PairSpeed(peer=peer, problem=speed)
                    if isinstance(speed, str)
                    else PairSpeed(peer=peer, gb_s=speed, latency_ms=0.1)
                )
        found[node] = NodeSpeed(
            node=f"n{node}",
            device="cpu x 1 threads",
            matmul_tflops=tflops.get(f"n{node}", 1.0),
            pairs=tuple(pairs),
            reached=(DONE,),
            problems=("",),
        )
    return found


def change(found: dict[int, NodeSpeed], node: int, **fields: Any) -> dict[int, NodeSpeed]:
    return {**found, node: found[node].model_copy(update=fields)}


def troubles(results: Iterable[CheckResult]) -> list[tuple[str, str, str]]:
    return [(one.id, one.status.value, one.node) for one in results if one.status is not CheckStatus.PASSED]


def judge(found: dict[int, NodeSpeed], floors: Floors | None = None, **usual: dict[str, float]) -> list[CheckResult]:
    return judge_speed(found, floors or Floors(), usual)


@pytest.mark.parametrize("num", [1, 2, 3, 4, 7])
def test_nodes_that_are_alike_are_well(num: int) -> None:
    """Negative control of this file."""
    found = judge(speeds(num))
    assert troubles(found) == []
    assert not needs_second_measurement(found)


@pytest.mark.parametrize(
    ("links", "expected"),
    [
        # Slow with both neighbours: the node.
        ({(1, 2): 1.0, (2, 3): 1.0}, [("probe.bandwidth", "blocked", "n2")]),
        ({(3, 0): 1.0, (0, 1): 1.0}, [("probe.bandwidth", "blocked", "n0")]),
        # Slow with one neighbour, while both nodes are fast with others: the link.
        ({(1, 2): 1.0}, [("probe.bandwidth", "warning", "")]),
        # A dead link: one of the two nodes must be excluded.
        ({(1, 2): "timed out"}, [("probe.bandwidth", "blocked", "n2")]),
        ({(1, 2): "timed out", (2, 3): "timed out"}, [("probe.bandwidth", "blocked", "n2")]),
    ],
)
def test_a_slow_node_and_a_slow_link_are_told_apart(
    links: dict[tuple[int, int], float | str], expected: list[tuple[str, str, str]]
) -> None:
    assert troubles(judge(speeds(links=links))) == expected


@pytest.mark.parametrize(
    ("links", "expected"),
    [
        # Its own link is as slow as its processor.
        ({(1, 2): 1.0}, []),
        ({(1, 2): 1.0, (2, 3): 1.0}, [("probe.bandwidth", "blocked", "n2")]),
        # Controls: findings that a slow processor does not explain.
        ({(1, 2): "timed out"}, [("probe.bandwidth", "blocked", "n2")]),
        ({(3, 0): 1.0}, [("probe.bandwidth", "warning", "")]),
    ],
)
def test_a_slow_link_of_a_node_that_computes_slowly_is_no_finding_of_its_own(
    links: dict[tuple[int, int], float | str], expected: list[tuple[str, str, str]]
) -> None:
    found = judge(speeds(links=links, n2=0.1))
    assert troubles(found) == [("probe.matmul", "blocked", "n2"), *expected]


def test_of_two_nodes_none_can_be_blamed_for_their_link() -> None:
    found = judge(speeds(2, links={(0, 1): 0.1}), Floors(bandwidth_gb_s=1.0))
    assert troubles(found) == [("probe.bandwidth", "blocked", "")]
    assert any("somewhere between n0 and n1" in one.found for one in found)


def test_when_all_are_slow_it_is_not_one_node() -> None:
    found = judge(speeds(), Floors(bandwidth_gb_s=100.0))
    assert {(status, node) for _, status, node in troubles(found)} == {("blocked", "")}


@pytest.mark.parametrize("num", [2, 3, 4])
def test_a_slow_device_is_named(num: int) -> None:
    assert troubles(judge(speeds(num, n1=0.3))) == [("probe.matmul", "blocked", "n1")]
    assert troubles(judge(speeds(num, n1=0.7))) == []


def test_floors_hold_for_a_node_that_is_alone() -> None:
    assert troubles(judge(speeds(1), Floors(matmul_tflops=2.0))) == [("probe.matmul", "blocked", "n0")]


def test_a_node_is_held_against_its_own_past() -> None:
    assert troubles(judge(speeds(1), n0={"matmul_tflops": 3.0})) == [("probe.matmul", "warning", "n0")]
    assert troubles(judge(speeds(1), n0={"matmul_tflops": 1.1})) == []
    assert troubles(judge(speeds(), n2={"bandwidth_gb_s": 50.0})) == [("probe.bandwidth", "warning", "n2")]


def test_the_node_with_the_least_progress_is_to_blame_and_not_those_that_waited() -> None:
    found = speeds()
    for node in range(4):
        found = change(found, node, reached=("pairs",), problems=("timed out",))
    found = change(found, 2, reached=("started",), problems=("",))
    results = judge(found)
    assert troubles(results) == [("probe.answer", "blocked", "n2")]
    (result,) = [one for one in results if one.node == "n2"]
    assert result.found == "rank 0 of n2 got no further than started: no answer in time"


def test_a_node_that_says_nothing_did_not_start() -> None:
    results = judge(change(speeds(), 3, reached=("",), problems=("its agent did not report",), pairs=()))
    assert ("probe.answer", "blocked", "n3") in troubles(results)
    assert any("did not start: its agent did not report" in one.found for one in results)


def test_without_progress_of_any_rank_none_is_blamed() -> None:
    found = {node: one.model_copy(update={"reached": ("pairs",)}) for node, one in speeds().items()}
    failed = change(found, 2, problems=("RuntimeError: connection refused",))
    assert troubles(judge(failed)) == [("probe.answer", "blocked", "")]
    assert kind_of(judge(failed)) is FailureKind.CONFIG, "it would fail again in the same way"


def test_nodes_that_are_all_late_without_an_error_may_be_measured_again() -> None:
    """Cold file systems, and many ranks that meet: no setting is wrong."""
    late = {node: one.model_copy(update={"reached": ("pairs",)}) for node, one in speeds().items()}
    assert troubles(judge(late)) == [("probe.late", "blocked", "")]
    assert kind_of(judge(late)) is FailureKind.RENDEZVOUS
    (found,) = [one for one in judge(late) if one.id == "probe.late"]
    assert "raise preflight.probe_s" in found.advice
    # The slow device that held up all the others is the cause.
    assert kind_of(judge(change(late, 1, matmul_tflops=0.1))) is FailureKind.NODE_UNFIT


@pytest.mark.parametrize("reached", ["", "started"])
def test_ranks_that_waited_in_vain_do_not_explain_why_others_were_late(reached: str) -> None:
    """One rank of each node imported faster, and gave up on those that still did."""
    waited = "Late: 2 of 4 ranks started within 30 s"
    late = {
        node: one.model_copy(update={"reached": ("started", reached), "problems": (waited, "")})
        for node, one in speeds(2).items()
    }
    assert troubles(judge(late)) == [("probe.late", "blocked", "")]
    assert kind_of(judge(late)) is FailureKind.RENDEZVOUS
    broken = {
        node: one.model_copy(update={"problems": (waited, "it ended with exit code 1")}) for node, one in late.items()
    }
    assert kind_of(judge(broken)) is FailureKind.CONFIG, "control: it would fail again in the same way"


def kind_of(results: Sequence[CheckResult]) -> FailureKind:
    return failure_kind([one for one in results if one.status is CheckStatus.BLOCKED])


def test_a_dead_link_is_named_instead_of_all_nodes_that_waited_for_it() -> None:
    dead = speeds(links={(1, 2): "timed out", (2, 3): "timed out"})
    found = {node: one.model_copy(update={"reached": ("pairs",)}) for node, one in dead.items()}
    assert troubles(judge(found)) == [("probe.bandwidth", "blocked", "n2")]


def test_a_wrong_sum_is_never_forgiven() -> None:
    wrong = change(speeds(), 1, problems=("all_reduce: 3 of 1024 sums are wrong",))
    assert troubles(judge(wrong)) == [("probe.all_reduce", "blocked", "n1")]
    assert not needs_second_measurement(judge(wrong))
    again = {node: better(one, speeds()[node]) for node, one in wrong.items()}
    assert troubles(judge(again)) == [("probe.all_reduce", "blocked", "n1")]


def test_what_was_slow_once_may_have_been_chance() -> None:
    first = speeds(links={(1, 2): 1.0, (2, 3): 1.0}, n0=0.1)
    assert needs_second_measurement(judge(first))
    assert troubles(judge({node: better(first[node], one) for node, one in speeds().items()})) == []
    twice = {node: better(one, one) for node, one in first.items()}
    assert troubles(judge(twice)) == troubles(judge(first))


def test_a_limit_of_latency() -> None:
    assert troubles(judge(speeds(), Floors(latency_ms=0.01))) == [("probe.latency", "warning", "")]
