"""Proof of a standstill, from recorded observations: detections at default floors, and workers that are not ended."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_reports import group_place, rank_status

from rlhf_core.diagnosis.hangs import standstill
from rlhf_core.diagnosis.hangs.liveness import GapTracker, Suspect, overdue
from rlhf_core.diagnosis.hangs.standstill import (
    MIN_INSPECTIONS,
    SPAN_S,
    Standstill,
    confirm,
    is_promising,
    movement,
    prove,
)
from rlhf_core.diagnosis.hangs.verdict import blame
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.inspections import Inspection, Wait
from rlhf_core.schemas.reports import Phase, RankStatus
from rlhf_core.schemas.supervision import SuperviseSpec

SILENT_S = 11.0
WAITS_FOR_TIME_OR_OUTSIDE = (Wait.TIME, Wait.OUTSIDE, Wait.KERNEL, Wait.RUNNING, Wait.TRACED, Wait.COLLECTIVE)


def rank(number: int, **changes: Any) -> RankStatus:
    """A rank of a warm run that has been silent for longer than usual; rank 0 waits in collective 41, the others have
    left 40."""
    inside = changes.get("in_collective", number == 0)
    plain = {"node": f"node{number}", "local_rank": 0, "sequence": 500, "step": 21, "age_s": SILENT_S, "warm": True}
    return rank_status(number, **{**plain, "collectives": 41 if inside else 40, "in_collective": inside, **changes})


def inspected(status: RankStatus, at_s: float, main: Wait = Wait.LOCK, **changes: Any) -> Inspection:
    return Inspection.model_validate(
        {"status": status, "at_s": at_s, "main": main, "detail": "a lock of its own"} | changes
    )


def record(*at_every_inspection: Sequence[Inspection]) -> Standstill:
    found = Standstill()
    for inspections in at_every_inspection:
        found.add(inspections)
    return found


def watch(stuck: dict[str, Any], peer: dict[str, Any] | None = None, **status: Any) -> list[Suspect]:
    """Proof after three observations of rank 1 and of its peer, which waits in a collective for it."""
    ranks = [rank(0, **(peer or {}).pop("status", {})), rank(1, **status)]
    inspections = [
        [inspected(ranks[0], 2.0 * number, Wait.TIME, **(peer or {})), inspected(ranks[1], 2.0 * number, **stuck)]
        for number in range(3)
    ]
    return prove(record(*inspections).still, suspects_of(ranks), len(ranks))


def tracker() -> GapTracker:
    """The default settings, in a run that has learned nothing unusual."""
    return GapTracker(SuperviseSpec())


def suspects_of(ranks: Sequence[RankStatus]) -> list[Suspect]:
    return overdue(ranks, tracker().suspicion_s)


# ---------------------------------------------------------------------------------------------------------------------
# EarlyHangCheck


def test_at_default_settings_a_silence_of_eleven_seconds_is_worth_a_look_and_no_more() -> None:
    ranks = [rank(0), rank(1)]
    assert [one.status.rank for one in suspects_of(ranks)] == [1]
    assert overdue(ranks, tracker().limit_s) == []
    assert suspects_of([rank(0), rank(1, age_s=9.0)]) == []


def test_the_long_floors_alone_find_nothing_within_thirty_seconds() -> None:
    """Control with the former rule: not even a stopped process is found."""
    ranks = [rank(0, age_s=30.0), rank(1, age_s=30.0, process_state="T")]
    assert overdue(ranks, tracker().limit_s) == []
    assert overdue([rank(0, age_s=121.0), rank(1, age_s=121.0, process_state="T")], tracker().limit_s) != []


def test_a_silence_that_is_usual_is_not_suspect_unless_the_process_is_stopped() -> None:
    slow = tracker()
    for sequence, age_s in ((1, 40.0), (2, 0.1)):
        slow.observe([rank(1, phase=Phase.ROLLOUT, sequence=sequence, age_s=age_s)])
    assert overdue([rank(1, phase=Phase.ROLLOUT, age_s=39.0)], slow.suspicion_s) == []
    assert overdue([rank(1, phase=Phase.ROLLOUT, age_s=41.0)], slow.suspicion_s) != []
    assert overdue([rank(1, phase=Phase.ROLLOUT, process_state="T")], slow.suspicion_s) != []


@pytest.mark.parametrize("status", [{"phase": Phase.SETUP}, {"warm": False}])
def test_set_up_and_a_first_pass_keep_their_long_floor(status: dict[str, Any]) -> None:
    assert suspects_of([rank(0), rank(1, **status)]) == []
    assert suspects_of([rank(0), rank(1, process_state="T", **status)]) != []


# ---------------------------------------------------------------------------------------------------------------------
# Proofs


def test_a_stopped_process_is_proven() -> None:
    (found,) = watch({"main": Wait.STOPPED}, process_state="T")
    assert found.status.rank == 1
    assert found.evidence == "was stopped (process state T) in 3 inspections over 4.0 s"


def test_a_deadlock_that_peers_wait_for_is_proven() -> None:
    (found,) = watch({"others": {Wait.LOCK: 4}})
    assert found.status.rank == 1
    assert "waits for a lock of its own, which nothing in the job can end" in found.evidence


def test_a_deadlocked_rank_without_peers_is_proven() -> None:
    alone = rank(1)
    inspections = [[inspected(alone, 2.0 * number)] for number in range(3)]
    assert prove(record(*inspections).still, suspects_of([alone]), 1) != []


def test_waiting_for_a_peer_is_proven_where_nothing_in_the_job_can_send() -> None:
    here = {"main": Wait.CONNECTION, "awaited": ("a:1-b:2",), "connections": ("b:2-a:1",)}
    there = {"connections": ("a:1-b:2",), "others": {Wait.LOCK: 2, Wait.COLLECTIVE: 1}}
    assert watch(here, dict(there)) != []
    assert watch(here, there | {"connections": ("a:1-c:3",)}) == [], "the other end is no rank: a service"
    assert watch(here, there | {"others": {Wait.TIME: 1}}) == [], "a thread of the peer may send later"
    assert watch(here, there | {"awaited": ("x:9-a:8",)}) == [], "the peer itself waits for something outside"


def test_ranks_that_disagree_are_proven() -> None:
    def inside(number: int, shape: str) -> RankStatus:
        recorded = group_place("0", (), 41, shape=shape)
        return rank(number, in_collective=True, collective_sequence=41, process_groups=(recorded,))

    ranks = [inside(0, "Float [[17]]"), inside(1, "Float [[17]]"), inside(2, "Float [[9]]")]
    inspections = [[inspected(one, 2.0 * number, io=number) for one in ranks] for number in range(3)]
    found = prove(record(*inspections).still, suspects_of(ranks), 3)
    assert [one.status.rank for one in found] == [0, 1, 2]
    verdict = blame(ranks, [], {one.status.rank: one.evidence for one in found})
    assert (verdict.kind, verdict.ranks) == (FailureKind.COLLECTIVE_MISMATCH, (2,))
    # The control: all ranks agree and wait for the network.
    same = [inside(number, "Float [[17]]") for number in range(3)]
    inspections = [[inspected(one, 2.0 * number) for one in same] for number in range(3)]
    assert prove(record(*inspections).still, suspects_of(same), 3) == []


# ---------------------------------------------------------------------------------------------------------------------
# Workers that are not ended


@pytest.mark.parametrize("wait", WAITS_FOR_TIME_OR_OUTSIDE)
def test_a_worker_that_waits_for_time_or_for_the_outside_keeps_the_long_floor(wait: Wait) -> None:
    """Control: the early floor without evidence ends all of them."""
    assert watch({"main": wait}) == []
    assert watch({"others": {wait: 1}}) == [], "a thread that may wake the main thread"
    assert [one.status.rank for one in suspects_of([rank(0), rank(1)])] == [1]


@pytest.mark.parametrize(
    "grows", ["switches", "cpu_ticks", "child_cpu_ticks", "num_children", "io"], ids=lambda name: f"{name} grows"
)
def test_whatever_moves_keeps_the_long_floor(grows: str) -> None:
    ranks = [rank(0), rank(1)]
    inspections = [
        [inspected(ranks[0], 2.0 * number), inspected(ranks[1], 2.0 * number, Wait.LOCK, **{grows: number})]
        for number in range(20)
    ]
    assert prove(record(*inspections).still, suspects_of(ranks), 2) == []


@pytest.mark.parametrize(
    ("stuck", "peer"),
    [
        pytest.param({"problem": "it may not be read"}, {}, id="it cannot be looked at"),
        pytest.param({}, {"problem": "it may not be read"}, id="a peer cannot be looked at"),
        pytest.param({}, {"unsent_bytes": 1}, id="data is on its way"),
        pytest.param({"uses_gpu": True, "gpu_percent": 7.0}, {}, id="its GPU works"),
        pytest.param({"uses_gpu": True}, {}, id="nothing is known of its GPU"),
        pytest.param({}, {"status": {"in_collective": False}}, id="no rank waits for it"),
        pytest.param({}, {"status": {"collectives": 40}}, id="peers are still in the collective that it has left"),
    ],
)
def test_what_is_not_known_or_waited_for_keeps_the_long_floor(stuck: dict[str, Any], peer: dict[str, Any]) -> None:
    assert watch(stuck, dict(peer)) == []
    assert watch({"uses_gpu": True, "gpu_percent": 0.0}) != [], "the control"


@pytest.mark.parametrize("busy", [{"uses_gpu": True, "gpu_percent": 7.0}, {"unsent_bytes": 1}])
def test_what_was_on_its_way_at_the_first_look_counts_at_the_last(busy: dict[str, Any]) -> None:
    ranks = [rank(0), rank(1)]
    idle = {"uses_gpu": True, "gpu_percent": 0.0}
    inspections = [
        [
            inspected(ranks[0], 2.0 * number, Wait.TIME),
            inspected(ranks[1], 2.0 * number, **(idle | (busy if not number else {}))),
        ]
        for number in range(3)
    ]
    assert prove(record(*inspections).still, suspects_of(ranks), 2) == []
    assert prove(record(*inspections[1:], inspections[2]).still, suspects_of(ranks), 2) == [], (
        "two observations are too few"
    )


def test_a_node_that_gives_no_looks_keeps_the_long_floor_for_all_but_the_stopped() -> None:
    ranks = [rank(0), rank(1), rank(2, in_collective=True)]
    inspections = [[inspected(one, 2.0 * number, Wait.LOCK) for one in ranks[:2]] for number in range(3)]
    assert prove(record(*inspections).still, suspects_of(ranks), 3) == []
    ranks[1] = rank(1, process_state="T")
    inspections = [[inspected(ranks[1], 2.0 * number, Wait.STOPPED)] for number in range(3)]
    assert prove(record(*inspections).still, suspects_of(ranks), 3) != []


def test_the_connections_of_all_workers_are_compared_once_for_all_suspects(monkeypatch: pytest.MonkeyPatch) -> None:
    """For every suspect, 512 ranks with hundreds of connections each would keep agent 0 from its work."""
    calls: list[int] = []
    is_closed = standstill._is_closed
    monkeypatch.setattr(standstill, "_is_closed", lambda still: calls.append(len(still)) or is_closed(still))
    ranks = [rank(0), *(rank(number) for number in range(1, 9))]
    link = {"main": Wait.CONNECTION, "awaited": ("a:1-b:2",), "connections": ("a:1-b:2",)}
    inspections = [
        [inspected(one, 2.0 * number, **(link if one.rank else {"main": Wait.COLLECTIVE})) for one in ranks]
        for number in range(3)
    ]
    assert len(prove(record(*inspections).still, suspects_of(ranks), len(ranks))) == 8
    assert calls == [9]


@pytest.mark.parametrize(
    ("num_inspections", "step_s"), [(MIN_INSPECTIONS - 1, SPAN_S), (MIN_INSPECTIONS + 5, SPAN_S / 100)]
)
def test_neither_few_looks_nor_looks_in_quick_succession_prove_anything(num_inspections: int, step_s: float) -> None:
    ranks = [rank(0), rank(1, process_state="T")]
    inspections = [[inspected(ranks[1], step_s * number, Wait.STOPPED)] for number in range(num_inspections)]
    still = record(*inspections).still
    assert prove(still, suspects_of(ranks), 2) == []
    assert is_promising(still, suspects_of(ranks))


def test_a_beat_or_a_process_that_went_on_takes_the_proof_back() -> None:
    (found,) = watch({"main": Wait.STOPPED}, process_state="T")
    assert confirm([found], [rank(0), rank(1, process_state="T", age_s=15.0)])[0].status.age_s == 15.0
    assert confirm([found], [rank(0), rank(1, process_state="T", sequence=501)]) == []
    assert confirm([found], [rank(0), rank(1)]) == [], "it was continued"
    assert confirm([found], [rank(0)]) == [], "it has ended"
    assert confirm([Suspect(rank(1), 10.0)], [rank(1)]) == [], "silence alone is judged by the floors"


def test_blame_names_the_proven_rank_and_not_a_peer_that_is_late_too() -> None:
    """Control: by the counts alone, neither has reached the collective."""
    ranks = [rank(0), rank(1), rank(2)]
    verdict = blame(ranks, [1], {1: "waits for a lock of its own"})
    assert (verdict.kind, verdict.ranks) == (FailureKind.HANG, (1,))
    assert verdict.reason.startswith("rank 1 waits for a lock of its own, silent for 11.0 s in phase train")
    assert blame(ranks, [1]).ranks == (1, 2)


WAITS = st.sampled_from(list(Wait))
INSPECTIONS = st.lists(
    st.tuples(WAITS, st.dictionaries(WAITS, st.just(1), max_size=3), st.integers(0, 1), st.booleans()),
    min_size=3,
    max_size=6,
)


@given(INSPECTIONS)
def test_nothing_is_proven_of_a_worker_that_moved_last_or_might_wake_up(inspections: list[tuple[Any, ...]]) -> None:
    ranks = [rank(0), rank(1)]
    recorded = [
        inspected(ranks[1], 2.0 * number, main, others=others, io=io, problem="unreadable" * hidden)
        for number, (main, others, io, hidden) in enumerate(inspections)
    ]
    standstill = record(*([inspected(ranks[0], one.at_s), one] for one in recorded))
    if prove(standstill.still, suspects_of(ranks), 2):
        last = recorded[-3:]
        waits = {wait for one in last for wait in (one.main, *one.others)}
        # A connection to another rank counts if no rank can send; none of them has one to another job here.
        assert waits <= {Wait.LOCK, Wait.CONNECTION} or all(one.main is Wait.STOPPED for one in last)
        assert not any(movement(before, after) for before, after in pairwise(last))
