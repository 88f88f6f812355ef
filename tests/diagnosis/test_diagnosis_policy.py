"""The recovery ladder: every kind has a row, budgets hold, progress renews them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.diagnosis.policy import RULES, backoff_s, decide_in_place, decide_next
from rlhf_core.schemas.failures import Action, FailureKind
from rlhf_core.schemas.run import SuperviseSpec

SPEC = SuperviseSpec(max_restarts=3, max_attempts=3, backoff_s=30.0, max_backoff_s=600.0)
HOPELESS = [
    FailureKind.CONFIG,
    FailureKind.IMPORT_ERROR,
    FailureKind.DATA,
    FailureKind.REWARD_FUNCTION,
    FailureKind.SHAPE,
    FailureKind.DISK_FULL,
    FailureKind.CHECKPOINT_CORRUPT,
    FailureKind.NON_FINITE,
    FailureKind.COLLECTIVE_MISMATCH,
    FailureKind.CUDA_OOM,
    FailureKind.DEGENERATE_RL,
    FailureKind.USER_CANCEL,
]


def test_every_kind_has_a_rule_with_a_reason() -> None:
    assert set(RULES) == set(FailureKind)
    assert all(rule.why for rule in RULES.values())


@pytest.mark.parametrize("kind", HOPELESS)
def test_what_would_come_back_stops_on_both_rungs(kind: FailureKind) -> None:
    assert decide_in_place(kind, 0, SPEC).action is Action.STOP
    assert decide_next(kind, 0, False, SPEC, 0.5).action is Action.STOP


@pytest.mark.parametrize("kind", sorted(set(FailureKind) - set(HOPELESS)))
def test_what_may_be_chance_gets_a_new_attempt(kind: FailureKind) -> None:
    assert decide_next(kind, 1, False, SPEC, 0.5).action is Action.NEW_ATTEMPT
    assert decide_next(kind, 3, False, SPEC, 0.5).action is Action.STOP


@pytest.mark.parametrize("kind", [FailureKind.WORKER_KILLED, FailureKind.HANG, FailureKind.NETWORK])
def test_restarts_in_place_stay_within_the_budget(kind: FailureKind) -> None:
    actions = [decide_in_place(kind, spent, SPEC).action for spent in range(4)]
    assert actions == [Action.RESTART_IN_PLACE] * 3 + [Action.NEW_ATTEMPT]
    none = SPEC.model_copy(update={"max_restarts": 0})
    assert decide_in_place(kind, 0, none).action is Action.NEW_ATTEMPT


@pytest.mark.parametrize("kind", [FailureKind.NODE_LOST, FailureKind.GPU_HARDWARE, FailureKind.PREEMPTION])
def test_some_allocations_are_not_worth_a_restart(kind: FailureKind) -> None:
    assert decide_in_place(kind, 0, SPEC).action is Action.NEW_ATTEMPT


def test_an_unknown_failure_is_confirmed_once() -> None:
    unknown = FailureKind.UNKNOWN
    assert decide_in_place(unknown, 0, SPEC).action is Action.RESTART_IN_PLACE
    assert decide_in_place(unknown, 1, SPEC, same_fingerprint_before=True).action is Action.STOP
    assert decide_in_place(unknown, 1, SPEC).action is Action.NEW_ATTEMPT
    assert decide_next(unknown, 1, False, SPEC, 0.0).action is Action.NEW_ATTEMPT
    assert decide_next(unknown, 1, True, SPEC, 0.0).action is Action.STOP
    assert decide_next(unknown, 2, False, SPEC, 0.0).action is Action.STOP


@pytest.mark.parametrize("kind", [FailureKind.PREEMPTION, FailureKind.TIME_LIMIT])
def test_what_the_scheduler_does_is_retried_while_checkpoints_advance(kind: FailureKind) -> None:
    choice = decide_next(kind, 0, True, SPEC, 0.9)
    assert (choice.action, choice.delay_s) == (Action.NEW_ATTEMPT, 0.0)
    assert decide_next(kind, SPEC.max_attempts, False, SPEC, 0.0).action is Action.STOP


def test_the_back_off_doubles_up_to_its_longest() -> None:
    waits = [backoff_s(failures, SPEC, 1.0) for failures in range(1, 8)]
    assert waits == [30.0, 60.0, 120.0, 240.0, 480.0, 600.0, 600.0]
    assert backoff_s(1, SPEC, 0.0) == 15.0
    assert backoff_s(3, SPEC.model_copy(update={"backoff_s": 0.0}), 0.7) == 0.0


@given(
    st.sampled_from(list(FailureKind)),
    st.integers(0, 10_000),
    st.booleans(),
    st.floats(0, 1, exclude_max=True),
    st.integers(1, 5),
)
def test_the_ladder_always_answers_and_always_ends(
    kind: FailureKind, fruitless: int, seen: bool, random: float, max_attempts: int
) -> None:
    spec = SPEC.model_copy(update={"max_attempts": max_attempts})
    choice = decide_next(kind, fruitless, seen, spec, random)
    assert choice.action in (Action.NEW_ATTEMPT, Action.STOP)
    assert 0.0 <= choice.delay_s <= spec.max_backoff_s
    assert choice.reason
    if fruitless >= max_attempts:
        assert choice.action is Action.STOP
    in_place = decide_in_place(kind, fruitless, spec, same_fingerprint_before=seen)
    if fruitless >= spec.max_restarts:
        assert in_place.action is not Action.RESTART_IN_PLACE
