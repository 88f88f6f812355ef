"""The recovery ladder: every kind has a row, budgets are respected, progress renews them."""

import pytest
from control_fakes import make_spec
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from rlhf_core.diagnosis.policy import (
    MOST_REMEDIES,
    RULES,
    UNDECIDED,
    backoff_s,
    decide_in_place,
    decide_next,
    excluded_after,
    oom_remedy,
    rollback_step,
)
from rlhf_core.run_dir.initial_model import larger_shares
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.changes import with_changes
from rlhf_core.schemas.failures import Action, FailureKind
from rlhf_core.schemas.run import RunSpec
from rlhf_core.schemas.supervision import SuperviseSpec
from rlhf_core.training.checkpoints.soundness import training_part

SPEC = SuperviseSpec(max_restarts=3, max_attempts=3, backoff_s=30.0, max_backoff_s=600.0)
HOPELESS = [
    FailureKind.CONFIG,
    FailureKind.IMPORT_ERROR,
    FailureKind.DATA,
    FailureKind.REWARD_FUNCTION,
    FailureKind.SHAPE,
    FailureKind.DISK_FULL,
    FailureKind.COLLECTIVE_MISMATCH,
    FailureKind.INCOMPLETE,
    FailureKind.USER_CANCEL,
]
NEEDS_A_REMEDY = [FailureKind.CUDA_OOM, FailureKind.NON_FINITE, FailureKind.DEGENERATE_RL]


def test_every_kind_has_a_rule_with_a_reason() -> None:
    assert set(RULES) == set(FailureKind)
    assert all(rule.why for rule in RULES.values())


@pytest.mark.parametrize("kind", HOPELESS)
def test_what_would_come_back_stops_on_both_rungs(kind: FailureKind) -> None:
    assert decide_in_place(kind, 0, SPEC).action is Action.STOP
    assert decide_next(kind, 0, False, SPEC, 0.5).action is Action.STOP


@pytest.mark.parametrize("kind", NEEDS_A_REMEDY)
def test_what_would_come_back_unchanged_is_retried_with_a_change_only(kind: FailureKind) -> None:
    assert decide_in_place(kind, 0, SPEC).action is Action.NEW_ATTEMPT
    assert decide_next(kind, 0, False, SPEC, 0.5).action is Action.STOP
    changed = decide_next(kind, 5, True, SPEC, 0.5, remedy="half of it")
    assert (changed.action, changed.delay_s) == (Action.NEW_ATTEMPT, 0.0)
    assert "half of it" in changed.reason


def test_a_damaged_checkpoint_ends_a_run_only_where_none_is_left() -> None:
    kind = FailureKind.CHECKPOINT_CORRUPT
    instead = "step-000020 is set aside; resuming from step-000010"
    assert decide_in_place(kind, 0, SPEC).action is Action.STOP
    assert decide_next(kind, 0, False, SPEC, 0.5).action is Action.STOP
    # Independent of the number of restarts, because each of these removes one checkpoint.
    choice = decide_in_place(kind, 99, SPEC, same_fingerprint_before=True, remedy=instead)
    assert (choice.action, choice.reason) == (Action.RESTART_IN_PLACE, f"checkpoint_corrupt: {instead}")
    in_place_is_off = SuperviseSpec(max_restarts=0)
    assert decide_in_place(kind, 0, in_place_is_off, remedy=instead).action is Action.NEW_ATTEMPT
    for fruitless in (0, SPEC.max_attempts - 1):
        assert decide_next(kind, fruitless, True, SPEC, 0.5, instead).action is Action.NEW_ATTEMPT
    # A disk that damages every new checkpoint must not be retried forever.
    assert decide_next(kind, SPEC.max_attempts, True, SPEC, 0.5, instead).action is Action.STOP


def test_a_mismatch_that_only_words_tell_of_is_confirmed_once() -> None:
    kind = FailureKind.COLLECTIVE_MISMATCH
    assert decide_in_place(kind, 0, SPEC, undecided=True).action is Action.RESTART_IN_PLACE
    # Without restarts in place, or if the controller finds it itself, a new attempt shows whether it was chance.
    in_place_is_off = SuperviseSpec(max_restarts=0)
    assert decide_in_place(kind, 0, in_place_is_off, undecided=True).action is Action.NEW_ATTEMPT
    assert decide_next(kind, 1, False, SPEC, 0.5, undecided=True).action is Action.NEW_ATTEMPT
    assert decide_next(kind, 2, False, SPEC, 0.5, undecided=True).action is Action.STOP
    # Kinds without a row for undecided failures are decided: a wrong setting stays wrong, whatever the evidence.
    assert decide_in_place(FailureKind.CONFIG, 0, SPEC, undecided=True).action is Action.STOP
    assert set(UNDECIDED) == {kind}


def test_out_of_memory_everything_shrinks_that_leaves_the_gradient_alone() -> None:
    gpus = {"ranks_per_node": 2, "gpus_per_node": 2}
    spec = make_spec(train={"micro_batch_size": 4}, rollout={"batch_size": 2}, resources=gpus)
    before = training_part(spec)
    seen = []
    while remedy := oom_remedy(spec):
        seen.append(remedy)
        spec = with_changes(spec, remedy)
        assert training_part(spec) == before
    assert seen == [
        {"trainer.micro_batch_size": 2},
        {"trainer.micro_batch_size": 1},
        {"trainer.gradient_checkpointing": True},
        {"trainer.zero_stage": 2},
        {"trainer.zero_stage": 3},
        {"trainer.offload": "optimizer"},
        {"rollout.batch_size": 1},
        {"trainer.offload": "parameters"},
    ]
    assert len([one for one in seen if "rollout.batch_size" not in one]) < MOST_REMEDIES
    # Ranks share sequences only in passes over them, and in numbers that keep the rows of a step divided evenly.
    spec, config = with_changes(spec, {"resources.ranks_per_node": 12}), {"num_attention_heads": 18}
    assert oom_remedy(spec, phase="rollout", larger_shares=larger_shares(spec, config)) == {}
    shared: list[JsonValue] = []
    while remedy := oom_remedy(spec, phase="train", larger_shares=larger_shares(spec, config)):
        shared += remedy.values()
        spec = with_changes(spec, remedy)
        assert training_part(spec) == before
    assert shared == [2, 6]
    alone = make_spec(train={"micro_batch_size": 1, "gradient_checkpointing": True}, rollout={"batch_size": 2})
    alone = with_changes(alone, {"resources.ranks_per_node": 1})
    assert oom_remedy(alone) == {"rollout.batch_size": 1}, "no rank to split with, and no memory besides the main one"


def test_out_of_memory_before_the_first_step_only_what_is_always_there_shrinks() -> None:
    spec = make_spec(resources={"ranks_per_node": 2, "gpus_per_node": 2})
    seen = []
    while remedy := oom_remedy(spec, phase="setup"):
        seen.append(remedy)
        spec = with_changes(spec, remedy)
    # Also stage 2: in bfloat16, the whole gradients of stage 1 are there from the start.
    assert [next(iter(one.values())) for one in seen] == [2, 3, "optimizer", "parameters"]
    for role in (Role.ROLLOUT, Role.EVALUATOR):
        assert oom_remedy(spec, role)
        assert oom_remedy(spec, role, "setup") == {}


def remedies(spec: RunSpec, phase: str) -> list[dict[str, JsonValue]]:
    """Remedies of a trainer in the order in which the attempts of a run try them, until it is stopped."""
    seen: list[dict[str, JsonValue]] = []
    while len(seen) < MOST_REMEDIES - 1 and (remedy := oom_remedy(spec, phase=phase)):
        seen.append(remedy)
        spec = with_changes(spec, remedy)
    return seen


BATCHES: list[dict[str, JsonValue]] = [{"rollout.batch_size": number} for number in (128, 64, 32, 16)]
SMALL_BATCHES: list[dict[str, JsonValue]] = [{"rollout.batch_size": number} for number in (8, 4, 2, 1)]
SPLITS: list[dict[str, JsonValue]] = [{"trainer.zero_stage": 2}, {"trainer.zero_stage": 3}]
OFFLOAD: dict[str, JsonValue] = {"trainer.offload": "optimizer"}


def test_out_of_memory_in_sampling_fewer_completions_come_first() -> None:
    """From the default settings, the run is not stopped before it has tried each remedy that can help there."""
    spec = make_spec(resources={"ranks_per_node": 2, "gpus_per_node": 2}, rollout={"batch_size": 256})
    spec = with_changes(spec, {"trainer.micro_batch_size": 8})
    assert spec.row_evaluations == ()
    both = remedies(spec, "rollout"), remedies(spec, "evaluate")
    assert both == ([*BATCHES, *SPLITS, OFFLOAD, *SMALL_BATCHES[:3]],) * 2
    one_gpu = with_changes(spec, {"resources.ranks_per_node": 1})
    assert remedies(one_gpu, "rollout") == [*BATCHES, OFFLOAD, *SMALL_BATCHES]
    # The trainers have no cache of their own, and the memory of vLLM does not depend on it.
    for elsewhere in ({"rollout.engines": 2}, {"rollout.engine": "vllm"}):
        assert remedies(with_changes(spec, elsewhere), "rollout")[:3] == [*SPLITS, OFFLOAD]
    assert "trainer.micro_batch_size" in remedies(spec, "train")[0]


def fine_tuning(**changes: JsonValue) -> RunSpec:
    """Supervised fine-tuning on two GPUs, whose evaluations score rows, 8 in a pass, and sample 256 completions."""
    loop = {"num_steps": 1, "algorithm": {"name": "sft", "batch_size": 8}, "optimizer": {"learning_rate": 1e-4}}
    spec = make_spec(
        resources={"ranks_per_node": 2, "gpus_per_node": 2},
        rollout={"batch_size": 256},
        loops={"main": loop, "warm_start": None},
    )
    return with_changes(spec, {"trainer.micro_batch_size": 8, **changes})


def test_out_of_memory_in_an_evaluation_of_rows_both_sizes_shrink() -> None:
    """It is unknown which were too many, the sampled completions or the held-out rows."""
    spec = fine_tuning()
    assert spec.row_evaluations
    both = [one | {"trainer.micro_batch_size": size} for one, size in zip(BATCHES, (4, 2, 1), strict=False)]
    assert remedies(spec, "evaluate") == [*both, BATCHES[3], *SPLITS, OFFLOAD, *SMALL_BATCHES[:3]]
    of_rows = with_changes(spec, {"rollout.batch_size": 16})
    assert remedies(of_rows, "evaluate")[0] == {"trainer.micro_batch_size": 4}


def test_out_of_memory_where_nothing_is_sampled_completions_are_not_halved() -> None:
    spec = fine_tuning(**{"evaluate.completions": False})
    sizes: list[dict[str, JsonValue]] = [{"trainer.micro_batch_size": size} for size in (4, 2, 1)]
    assert remedies(spec, "evaluate") == [*sizes, *SPLITS, OFFLOAD, {"trainer.offload": "parameters"}]
    assert oom_remedy(spec, Role.EVALUATOR) == sizes[0]
    assert oom_remedy(with_changes(spec, sizes[-1]), Role.EVALUATOR) == {}


def test_out_of_memory_in_passes_cut_by_tokens_their_bound_is_halved() -> None:
    """A number of sequences that is set high does not bind."""
    longest = fine_tuning().max_tokens
    spec = fine_tuning(**{"trainer.micro_batch_tokens": 4 * longest})
    both: dict[str, JsonValue] = {"rollout.batch_size": 128, "trainer.micro_batch_tokens": 2 * longest}
    assert oom_remedy(spec, phase="evaluate") == oom_remedy(spec, Role.EVALUATOR) == both


def test_remedies_end_when_many_attempts_in_a_row_saved_nothing() -> None:
    def action(attempts: int, max_attempts: int = 3) -> Action:
        spec = SuperviseSpec(max_attempts=max_attempts)
        return decide_next(FailureKind.CUDA_OOM, attempts, True, spec, 0.5, remedy="half of it").action

    assert action(MOST_REMEDIES - 1) is Action.NEW_ATTEMPT
    assert action(MOST_REMEDIES) is Action.STOP
    assert action(MOST_REMEDIES, MOST_REMEDIES + 1) is Action.NEW_ATTEMPT


def test_out_of_memory_a_bound_of_tokens_falls_to_the_longest_sequence() -> None:
    spec = make_spec(train={"micro_batch_size": 4, "gradient_checkpointing": True})
    longest = spec.max_tokens
    spec = with_changes(spec, {"trainer.micro_batch_tokens": 3 * longest})
    seen = []
    while "trainer.micro_batch_tokens" in (remedy := oom_remedy(spec)):
        seen.append(remedy["trainer.micro_batch_tokens"])
        spec = with_changes(spec, remedy)
    assert seen == [3 * longest // 2, longest]
    assert "trainer.micro_batch_size" not in remedy, "long sequences are already alone"


def test_nodes_are_excluded_at_once_or_at_the_second_strike() -> None:
    lost, hang, oom = FailureKind.NODE_LOST, FailureKind.HANG, FailureKind.CUDA_OOM
    assert excluded_after(lost, ["n1"], {"n1": 1}, [], 4) == ("n1",)
    assert excluded_after(hang, ["n1"], {"n1": 1}, [], 4) == ()
    assert excluded_after(hang, ["n1"], {"n1": 2}, [], 4) == ("n1",)
    assert excluded_after(oom, ["n1"], {"n1": 9}, ["n0"], 4) == ("n0",)  # no fault of a node; what was, stays
    assert excluded_after(lost, ["n3"], {}, ["n1", "n2"], 2) == ("n2", "n3")  # the newest suspects stay
    assert excluded_after(lost, ["n1"], {}, [], 0) == ()


def test_a_node_that_does_not_arrive_is_excluded_at_once() -> None:
    """Control: a log names the node on which a port was in use, for instance, which may be chance."""
    kind = FailureKind.RENDEZVOUS
    assert excluded_after(kind, ["n1"], {"n1": 1}, [], 4) == ("n1",)
    assert excluded_after(kind, ["n1"], {"n1": 1}, [], 4, undecided=True) == ()


@pytest.mark.parametrize(
    "kind",
    sorted(set(FailureKind) - {*HOPELESS, *NEEDS_A_REMEDY, FailureKind.CHECKPOINT_CORRUPT, FailureKind.NO_NODES}),
)
def test_what_may_be_chance_gets_a_new_attempt(kind: FailureKind) -> None:
    assert decide_next(kind, 1, False, SPEC, 0.5).action is Action.NEW_ATTEMPT
    assert decide_next(kind, 3, False, SPEC, 0.5).action is Action.STOP


def test_only_the_total_of_attempts_limits_waits_for_nodes() -> None:
    for number, delay_s in ((1, 30.0), (2, 60.0), (9, 600.0)):
        choice = decide_next(FailureKind.NO_NODES, number, True, SPEC, 1.0)
        assert (choice.action, choice.delay_s) == (Action.NEW_ATTEMPT, delay_s)
        assert choice.reason.endswith("which only supervise.max_total_attempts limits")
    assert excluded_after(FailureKind.NO_NODES, ["n1"], {"n1": 9}, [], 4) == ()


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


def test_a_new_attempt_waits_unless_the_last_one_made_progress_or_it_gets_another_node() -> None:
    for fruitless in (1, 2):
        waits = decide_next(FailureKind.HANG, fruitless, False, SPEC, 0.5)
        assert (waits.action, waits.delay_s) == (Action.NEW_ATTEMPT, backoff_s(fruitless, SPEC, 0.5))
        assert f"attempt without a new checkpoint {fruitless} of 3" in waits.reason
    assert decide_next(FailureKind.HANG, 0, False, SPEC, 0.5).delay_s == 0.0
    assert decide_next(FailureKind.NODE_UNFIT, 1, False, SPEC, 0.5).delay_s == 0.0


@given(
    st.sampled_from([kind for kind in FailureKind if kind is not FailureKind.NO_NODES]),
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


@pytest.mark.parametrize(
    ("kind", "steps", "failed_at", "back_to"),
    [
        (FailureKind.NON_FINITE, (30, 40, 50), 52, 40),
        (FailureKind.DEGENERATE_RL, (30, 40, 50), 52, 30),  # 40 and 50 lie in the twenty steps that were judged
        (FailureKind.DEGENERATE_RL, (10, 30, 40, 50), 61, 40),
        (FailureKind.DEGENERATE_RL, (40, 45, 50), 52, 40),  # none is old enough: the oldest
        (FailureKind.DEGENERATE_RL, (30, 40), 90, 30),  # never the newest
        (FailureKind.DEGENERATE_RL, (30, 40, 50), None, 40),
        (FailureKind.DEGENERATE_RL, (30,), 52, None),
        (FailureKind.DEGENERATE_RL, (), 5, None),
    ],
)
def test_a_run_goes_back_to_before_the_fault(
    kind: FailureKind, steps: tuple[int, ...], failed_at: int | None, back_to: int | None
) -> None:
    spec = make_spec(health={"window_steps": 20})
    assert rollback_step(kind, steps, failed_at, spec) == back_to
