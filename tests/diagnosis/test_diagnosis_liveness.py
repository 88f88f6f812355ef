"""Hung and waiting ranks: the rule, its exceptions, and the learned gaps."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_reports import rank_status

from rlhf_core.diagnosis.hangs.liveness import Condition, ConditionClock, GapTracker, overdue
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.reports import Phase, RankStatus, RepresentedProcess
from rlhf_core.schemas.supervision import SuperviseSpec

FLOOR_S = 10.0
SPEC = SuperviseSpec(
    floor_s=FLOOR_S, setup_floor_s=100.0, rollout_floor_s=FLOOR_S, reward_floor_s=FLOOR_S, checkpoint_floor_s=FLOOR_S,
    weight_sync_floor_s=FLOOR_S, evaluate_floor_s=FLOOR_S,
)  # fmt: skip
_sequence = itertools.count(1)


def rank(
    number: int,
    age_s: float,
    *,
    phase: Phase = Phase.TRAIN,
    inside: bool = False,
    state: str = "S",
    collectives: int = 0,
    sequence: int = 0,
    warm: bool = True,
) -> RankStatus:
    given = {"sequence": sequence, "collectives": collectives, "phase": phase, "age_s": age_s, "warm": warm}
    return rank_status(number, in_collective=inside, step=7, process_state=state, **given)


def make_tracker() -> GapTracker:
    """Tracker that has seen fast progress of four ranks."""
    tracker = GapTracker(SPEC)
    for _ in range(2):
        tracker.observe([rank(number, 0.1, sequence=next(_sequence)) for number in range(4)])
    return tracker


def suspects(ranks: Sequence[RankStatus], tracker: GapTracker | None = None) -> list[int]:
    return [suspect.status.rank for suspect in overdue(ranks, (tracker or make_tracker()).limit_s)]


def test_a_phase_may_have_a_floor_of_its_own() -> None:
    spec = SuperviseSpec(floor_s=10.0, setup_floor_s=60.0, checkpoint_floor_s=30.0, rollout_floor_s=5.0)
    tracker = GapTracker(spec)
    limits = {phase: tracker.limit_s(rank(0, 0.1, phase=phase)) for phase in Phase}
    assert limits[Phase.TRAIN] == 10.0
    assert limits[Phase.CHECKPOINT] == 30.0
    assert limits[Phase.ROLLOUT] == 5.0
    assert limits[Phase.SETUP] == 60.0
    assert suspects([rank(0, 20.0, phase=Phase.CHECKPOINT)], tracker) == []
    assert suspects([rank(0, 20.0, phase=Phase.CHECKPOINT)]) == [0], "with the single floor it is an alarm"


def test_silence_below_the_floor_is_fine_and_above_it_is_not() -> None:
    assert suspects([rank(0, 9.9), rank(1, 0.1)]) == []
    assert suspects([rank(0, 10.1), rank(1, 0.1)]) == [0]


def test_set_up_has_its_own_floor() -> None:
    assert suspects([rank(0, 99.0, phase=Phase.SETUP)]) == []
    assert suspects([rank(0, 101.0, phase=Phase.SETUP)]) == [0]


def test_the_first_time_in_a_phase_has_the_allowance_of_set_up_and_teaches_nothing() -> None:
    """The first time includes compilation. Once the worker has completed the phase, the floor of the phase applies."""
    tracker = make_tracker()
    tracker.observe([rank(0, 50.0, phase=Phase.REWARD, sequence=next(_sequence), warm=False)])
    assert suspects([rank(0, 50.0, phase=Phase.REWARD, warm=False)], tracker) == []
    assert suspects([rank(0, 101.0, phase=Phase.REWARD, warm=False)], tracker) == [0]
    tracker.observe([rank(0, 0.1, phase=Phase.REWARD, sequence=next(_sequence))])
    assert tracker.longest_s(Phase.REWARD) == 0.0
    assert suspects([rank(0, 11.0, phase=Phase.REWARD)], tracker) == [0]


@pytest.mark.parametrize(
    ("silences_s", "pid", "is_hung"),
    [
        ([50.0, 0.1, 49.0, 0.1], 7, False),
        ([50.0, 0.1, 0.1, 0.1], 7, True),
        ([50.0, 0.1, 0.1, 49.0], 8, True),
    ],
    ids=["a server samples in every step", "control: compilation", "control: compilation in a new process"],
)
def test_silences_that_recur_in_the_first_pass_are_usual_after_it(
    silences_s: list[float], pid: int, is_hung: bool
) -> None:
    """An external trainer never leaves its phase, which becomes warm between two such silences."""
    tracker = make_tracker()
    for silence_s, process in zip(silences_s, (7, 7, 7, pid), strict=True):
        cold = rank(0, silence_s, sequence=next(_sequence), warm=False)
        tracker.observe([cold.model_copy(update={"pid": process})])
        tracker.observe([cold.model_copy(update={"pid": process, "sequence": next(_sequence), "age_s": 0.0})])
    assert suspects([rank(0, 48.0)], tracker) == ([0] if is_hung else [])
    # It may have been a second compilation: what can be proven is found early, and later runs learn nothing of it.
    assert tracker.suspicion_s(rank(0, 48.0)) == min(SPEC.suspect_s, SPEC.floor_s)
    assert tracker.all_longest_s == {"trainer/train": 0.1}


def test_what_earlier_runs_have_taught_holds_from_the_beginning_and_is_not_handed_on() -> None:
    """Control: if passed on, one long silence would raise the thresholds of all later runs forever."""
    tracker = GapTracker(SPEC, {"trainer/rollout": 50.0})
    assert suspects([rank(0, 200.0, phase=Phase.ROLLOUT)], tracker) == []
    assert suspects([rank(0, 251.0, phase=Phase.ROLLOUT)], tracker) == [0]
    assert suspects([rank(0, 20.0)], tracker) == [0], "another phase"
    evaluator = rank(0, 200.0, phase=Phase.ROLLOUT).model_copy(update={"role": Role.EVALUATOR})
    assert suspects([evaluator], tracker) == [0], "another role"
    assert tracker.all_longest_s == {}
    tracker.observe([rank(0, 3.0, phase=Phase.ROLLOUT, sequence=next(_sequence))])
    tracker.observe([rank(0, 0.1, phase=Phase.ROLLOUT, sequence=next(_sequence))])
    assert tracker.all_longest_s == {"trainer/rollout": 3.0}


def test_ranks_of_different_nodes_are_told_apart_by_their_node() -> None:
    """Control: if treated as one worker, each would seem to end the other's silence."""
    tracker = GapTracker(SPEC)
    for sequence in (5, 6):
        here = rank(0, 9.0, sequence=100)
        tracker.observe([here, here.model_copy(update={"node": "n2", "rank": 1, "sequence": sequence, "age_s": 0.1})])
    assert tracker.all_longest_s == {"trainer/train": 0.1}


def test_a_rank_that_waits_in_a_collective_for_a_working_one_is_not_hung() -> None:
    """The rollout takes five times the floor, because rollouts of that length ended well before."""
    tracker = make_tracker()
    tracker.observe([rank(0, 50.0, phase=Phase.ROLLOUT, sequence=next(_sequence))])
    tracker.observe([rank(0, 0.1, phase=Phase.ROLLOUT, sequence=next(_sequence))])
    assert tracker.longest_s(Phase.ROLLOUT) == 50.0
    waiting = [rank(0, 200.0, phase=Phase.ROLLOUT), rank(1, 199.0, inside=True), rank(2, 199.0, inside=True)]
    assert suspects(waiting, tracker) == []
    assert suspects([rank(0, 251.0, phase=Phase.ROLLOUT), *waiting[1:]], tracker) == [0]
    # The control: with no outside process to wait for, the same silence is a hang.
    assert suspects(waiting[1:], tracker) == [1, 2]


def test_a_collective_is_judged_by_the_last_rank_that_entered() -> None:
    assert suspects([rank(0, 60.0, inside=True), rank(1, 3.0, inside=True)]) == []
    assert suspects([rank(0, 60.0, inside=True), rank(1, 10.5, inside=True)]) == [0, 1]


def test_a_stopped_process_is_suspect_even_inside_a_collective() -> None:
    ranks = [rank(0, 11.0, inside=True, state="T"), rank(1, 0.1, phase=Phase.ROLLOUT)]
    assert suspects(ranks) == [0]


def test_silences_that_ended_well_raise_the_limit_of_their_phase_only() -> None:
    tracker = make_tracker()
    tracker.observe([rank(0, 8.0, sequence=next(_sequence))])
    tracker.observe([rank(0, 0.0, sequence=next(_sequence))])
    assert tracker.longest_s(Phase.TRAIN) == 8.0
    assert suspects([rank(0, 39.0)], tracker) == []
    assert suspects([rank(0, 41.0)], tracker) == [0]
    assert suspects([rank(0, 11.0, phase=Phase.CHECKPOINT)], tracker) == [0]


@pytest.mark.parametrize(
    ("peer", "learned_s"),
    [
        (rank(1, 0.1), 9.0),
        (rank(1, 9.0, state="T"), 0.1),
    ],
)
def test_a_silence_beside_a_stopped_process_teaches_nothing(peer: RankStatus, learned_s: float) -> None:
    tracker = make_tracker()
    before = next(_sequence)
    tracker.observe([rank(0, 9.0, sequence=before), peer.model_copy(update={"sequence": before})])
    tracker.observe([rank(0, 0.0, sequence=next(_sequence)), rank(1, 0.0, sequence=before)])
    assert tracker.longest_s(Phase.TRAIN) == learned_s


def test_waiting_for_a_slow_peer_teaches_nothing_about_collectives() -> None:
    tracker = make_tracker()
    before = next(_sequence)
    tracker.observe([rank(0, 9.0, inside=True, sequence=before), rank(1, 9.0, phase=Phase.ROLLOUT, sequence=before)])
    tracker.observe([rank(number, 0.0, sequence=next(_sequence)) for number in range(2)])
    assert tracker.longest_s(Phase.TRAIN) == 0.1
    assert tracker.longest_s(Phase.ROLLOUT) == 9.0


AGES = st.lists(
    st.tuples(st.floats(0, 300), st.booleans(), st.sampled_from(list(Phase)), st.sampled_from("RSDT")),
    min_size=1,
    max_size=4,
)


@given(AGES)
def test_no_false_alarm_below_the_floor_and_no_miss_when_no_rank_moves(
    ages: list[tuple[float, bool, Phase, str]],
) -> None:
    ranks = [
        rank(n, age, inside=inside, phase=phase, state=state) for n, (age, inside, phase, state) in enumerate(ages)
    ]
    tracker = make_tracker()
    limits = [tracker.limit_s(one) for one in ranks]
    found = suspects(ranks, tracker)
    over = [one.rank for one, limit_s in zip(ranks, limits, strict=True) if one.age_s > limit_s]
    assert set(found) <= set(over)
    if len(over) == len(ranks):
        assert found


WELL, AT_FAULT = Condition(is_at_fault=False), Condition(is_at_fault=True)


@pytest.mark.parametrize("phase", [Phase.ROLLOUT, Phase.WEIGHT_SYNC])
def test_a_trainer_waits_for_rollout_workers_that_are_at_fault(phase: Phase) -> None:
    """Controls: beside healthy workers, and in a phase without waits for others."""
    silent = [rank(0, 2 * FLOOR_S, phase=phase), rank(1, 2 * FLOOR_S, phase=phase, inside=True)]

    def found(condition: Condition, ranks: Sequence[RankStatus] = silent) -> list[int]:
        return [one.status.rank for one in overdue(ranks, make_tracker().limit_s, {Role.ROLLOUT: condition})]

    assert found(AT_FAULT) == []
    assert found(WELL) == [0]
    assert found(AT_FAULT, [rank(0, 2 * FLOOR_S)]) == [0], "it trains"
    assert found(AT_FAULT, [rank(0, 2 * FLOOR_S, phase=phase, state="T")]) == [0], "it is stopped itself"


def test_a_trainer_has_its_whole_limit_once_the_rollout_workers_are_well_again() -> None:
    waiting = [rank(0, 10 * FLOOR_S, phase=Phase.ROLLOUT)]
    for well_for_s, hung in ((FLOOR_S - 1, []), (FLOOR_S + 1, [0])):
        conditions = {Role.ROLLOUT: Condition(is_at_fault=False, well_for_s=well_for_s)}
        assert [one.status.rank for one in overdue(waiting, make_tracker().limit_s, conditions)] == hung


@pytest.mark.parametrize("at_fault", [True, False])
def test_waiting_for_a_group_at_fault_teaches_nothing(at_fault: bool) -> None:
    """Control: a wait for healthy workers."""
    tracker = GapTracker(SPEC)
    conditions = {Role.ROLLOUT: Condition(is_at_fault=at_fault)}
    for sequence, age_s in ((1, 0.1), (1, 50.0), (2, 0.1)):
        tracker.observe([rank(0, age_s, phase=Phase.ROLLOUT, sequence=sequence)], conditions)
    assert tracker.longest_s(Phase.ROLLOUT) == (0.0 if at_fault else 50.0)


def test_the_silence_of_a_worker_that_died_teaches_nothing() -> None:
    """Control: a worker that continued."""
    for pid, learned in ((1, 0.0), (1000, 50.0)):
        tracker = GapTracker(SPEC)
        tracker.observe([rank(0, 50.0, sequence=1)])
        tracker.observe([rank(0, 0.1, sequence=2).model_copy(update={"pid": pid})])
        assert tracker.longest_s(Phase.TRAIN) == learned


@pytest.mark.parametrize(
    ("ranks", "num_missing", "at_fault"),
    [
        ([rank(0, 0.1)], 0, False),
        ([rank(0, 0.1)], 1, True),
        ([rank(0, 0.1, phase=Phase.SETUP)], 0, True),
        ([rank(0, 0.1, state="T")], 0, True),
        ([rank(0, 2 * FLOOR_S)], 0, True),
    ],
)
def test_a_group_is_at_fault_when_a_worker_cannot_serve(
    ranks: list[RankStatus], num_missing: int, at_fault: bool
) -> None:
    clock, tracker = ConditionClock(), make_tracker()
    assert clock.observe(ranks, num_missing, tracker, 100.0).is_at_fault is at_fault
    after = clock.observe([rank(0, 0.1)], 0, tracker, 103.0)
    assert after == Condition(False, 3.0 if at_fault else float("inf"))


def test_workers_that_do_not_wait_for_each_other_are_judged_one_by_one() -> None:
    """Control: ranks with common collectives are not hung while one of them works."""
    ranks = [rank(0, 2 * FLOOR_S, inside=True), rank(1, 0.1)]
    assert [one.status.rank for one in overdue(ranks, make_tracker().limit_s, alone=True)] == [0]
    assert overdue(ranks, make_tracker().limit_s) == []


def test_a_worker_is_stopped_when_a_process_that_it_speaks_for_is() -> None:
    represented = tuple(RepresentedProcess(pid=pid, process_state=state) for pid, state in ((7, "S"), (8, "T")))
    speaker = rank(0, 0.1).model_copy(update={"speaks_for": represented})
    assert speaker.is_stopped
    assert not speaker.model_copy(update={"speaks_for": represented[:1]}).is_stopped
