"""Health judged from metrics alone.

The metrics are hand-made steps, logs of other trainers, and recorded runs of the native trainer.
"""

import json
import math
from pathlib import Path

import pytest
from watched_programs import FIXTURES, trainer

from rlhf_core.diagnosis.health.metric_judge import MetricJudge, MetricWarning
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.health import HealthSpec
from rlhf_core.worker.command.metric_names import MetricNames

NATIVE = Path(__file__).parents[2] / "training" / "fixtures" / "health"
WELL = {
    "train/loss": 0.01,
    "train/grad_norm": 0.5,
    "reward/mean": 0.5,
    "reward/std": 0.3,
    "rollout/zero_std_groups": 0.2,
    "rollout/truncated_share": 0.1,
    "policy/kl": 0.05,
}
NO_SPREAD = {"reward/mean": 0.0, "reward/std": 0.0, "rollout/zero_std_groups": 1.0}
NAN = math.nan


def judged(steps: int, changes: dict[str, float], *, every: int = 1, **spec: object) -> list[MetricWarning]:
    """Ten healthy steps, followed by as many others."""
    judge = MetricJudge(HealthSpec.model_validate(spec))
    for step in range(every, 10 * every + 1, every):
        reward = 0.1 * math.sin(step)
        assert judge.judge(step, {**WELL, "reward/mean": 0.5 + reward}) == []
    found = []
    for step in range(11 * every, (11 + steps) * every, every):
        found += judge.judge(step, {**WELL, **changes})
    return found


@pytest.mark.parametrize(
    ("changes", "rule", "kind", "after"),
    [
        ({"train/loss": NAN}, "non_finite", FailureKind.NON_FINITE, 1),
        ({"train/loss": math.inf}, "non_finite", FailureKind.NON_FINITE, 1),
        ({"train/grad_norm": NAN}, "non_finite", FailureKind.NON_FINITE, 5),
        ({"train/grad_norm": 0.0}, "frozen", FailureKind.DEGENERATE_RL, 5),
        (NO_SPREAD, "no_spread", FailureKind.DEGENERATE_RL, 20),
        ({"rollout/truncated_share": 1.0, "reward/mean": 0.3}, "truncated", FailureKind.DEGENERATE_RL, 20),
        ({"policy/kl": 50.0}, "kl", FailureKind.DEGENERATE_RL, 20),
        ({"policy/kl": NAN}, "kl", FailureKind.DEGENERATE_RL, 20),
    ],
)
def test_each_rule_warns_once_after_its_steps(
    changes: dict[str, float], rule: str, kind: FailureKind, after: int
) -> None:
    found = judged(60, changes)
    assert [(one.rule, one.kind, one.step) for one in found] == [(rule, kind, 10 + after)]
    since = ", since step 11" if after > 1 else ""
    assert found[0].message.startswith(f"At step {10 + after}{since}: ")
    assert "found " in found[0].message
    assert "expected " in found[0].message
    assert judged(after - 1, changes) == []


@pytest.mark.parametrize(("value", "words"), [(NAN, "that is not finite (nan)"), (math.inf, "not finite (inf)")])
def test_a_divergence_that_is_no_number_is_called_not_finite(value: float, words: str) -> None:
    (found,) = judged(20, {"policy/kl": value})
    assert words in found.message
    assert "nan nats" not in found.message


def test_healthy_steps_warn_of_nothing() -> None:
    assert judged(200, {}) == []


def test_a_warning_is_repeated_after_a_recovery() -> None:
    judge = MetricJudge(HealthSpec())
    bad = {**WELL, "train/loss": NAN}
    warnings = [[one.rule for one in judge.judge(step, bad if step in (3, 4, 6) else WELL)] for step in range(1, 8)]
    assert warnings == [[], [], ["non_finite"], [], [], ["non_finite"], []]


def test_a_good_step_in_between_restarts_the_count() -> None:
    judge = MetricJudge(HealthSpec())
    for step in range(1, 100):
        changes = {} if step % 15 == 0 else {"policy/kl": 50.0}
        assert judge.judge(step, {**WELL, **changes}) == []


def test_a_rule_that_is_off_is_not_applied() -> None:
    assert judged(60, {"policy/kl": 50.0}, off={"kl": "measured against a far model"}) == []
    assert judged(60, {"policy/kl": 50.0}, max_kl=100.0) == []


def test_lines_are_counted_in_optimizer_steps_and_at_least_three_of_them() -> None:
    """With logging_steps = 10, two lines with zero gradients would be twenty steps, but are only two measurements."""
    found = judged(20, {"train/grad_norm": 0.0}, every=10)
    assert [one.message.partition(":")[0] for one in found] == ["At step 130, since step 110"]
    found = judged(20, NO_SPREAD, every=10)
    assert [one.message.partition(":")[0] for one in found] == ["At step 130, since step 110"]


def test_a_step_in_parts_counts_once() -> None:
    """The log and TensorBoard report the same step."""
    judge = MetricJudge(HealthSpec())
    warnings = [one for step in (10, 20) for _ in range(3) for one in judge.judge(step, {"train/grad_norm": 0.0})]
    assert warnings == []
    assert [one.rule for one in judge.judge(30, {"train/grad_norm": 0.0})] == ["frozen"]


def test_a_zero_gradient_without_spread_is_reported_as_no_spread_only() -> None:
    assert [one.rule for one in judged(60, {**NO_SPREAD, "train/grad_norm": 0.0})] == ["no_spread"]


def test_the_deviation_is_used_if_groups_are_not_logged() -> None:
    def rules(spread: float) -> list[str]:
        judge = MetricJudge(HealthSpec())
        steps = (judge.judge(step, {"reward/mean": 0.0, "reward/std": spread}) for step in range(1, 60))
        return [one.rule for found in steps for one in found]

    assert rules(0.0) == ["no_spread"]
    assert rules(1e-3) == []
    assert rules(NAN) == []  # of a single completion


def test_a_solved_task_is_healthy() -> None:
    assert judged(60, {**NO_SPREAD, "reward/mean": 1.0, "train/grad_norm": 0.0}) == []
    assert judged(60, {"rollout/truncated_share": 1.0, "reward/mean": 1.0}) == []


def test_a_risen_reward_is_healthy_and_a_fallen_one_is_not() -> None:
    assert judged(60, {**NO_SPREAD, "reward/mean": 0.9, "reward/max": 2.0}) == []
    assert [one.rule for one in judged(60, {**NO_SPREAD, "reward/mean": 0.2})] == ["no_spread"]


def test_missing_metrics_are_no_finding() -> None:
    """DPO and CPO log no groups, no lengths and no KL; an evaluation is logged in a line of its own."""
    judge = MetricJudge(HealthSpec())
    warnings = [judge.judge(step, {"train/loss": 0.7, "preference/margin": 0.0}) for step in range(1, 100)]
    warnings += [judge.judge(100, {"eval/loss": NAN})]
    assert not any(warnings)


def test_a_restarted_program_is_judged_from_scratch() -> None:
    judge = MetricJudge(HealthSpec(), first_step=50)
    for step in range(51, 70):
        assert judge.judge(step, {**WELL, **NO_SPREAD}) == []
    for step in range(1, 20):
        assert judge.judge(step, {**WELL, **NO_SPREAD}) == []
    assert [one.rule for one in judge.judge(20, {**WELL, **NO_SPREAD})] == ["no_spread"]


def test_a_real_run_whose_completions_never_end_and_are_never_rewarded() -> None:
    """ms-swift with a random model: all completions are cut off at 8 tokens.

    Six steps are too few for the default limits.
    """
    lines = (FIXTURES / "swift-grpo-logging.jsonl").read_text().splitlines()[:6]
    names = MetricNames(trainer())

    def rules(**spec: int) -> set[str]:
        judge = MetricJudge(HealthSpec(**spec))
        steps = (
            names.rename({name: value for name, value in json.loads(line).items() if isinstance(value, float)})
            for line in lines
        )
        return {one.rule for step, metrics in enumerate(steps, 1) for one in judge.judge(step, metrics)}

    assert rules() == set()
    assert "truncated" in rules(window_steps=4)


@pytest.mark.parametrize(
    ("recorded", "rules"),
    [
        ("seed-1", set()),
        ("slow", set()),
        ("two-prompts-a-step", set()),
        ("solved-by-the-warm-start", set()),
        ("reward-always-0", {"no_spread"}),
        ("loss-without-a-gradient", {"frozen"}),
    ],
)
def test_recorded_runs_of_the_native_trainer(recorded: str, rules: set[str]) -> None:
    """The same recorded runs serve as reference for the native judge."""
    judge, found = MetricJudge(HealthSpec()), set()
    for line in (NATIVE / f"{recorded}.jsonl").read_text().splitlines():
        step = json.loads(line)
        found |= {one.rule for one in judge.judge(step["step"], step["metrics"])}
    assert found == rules
