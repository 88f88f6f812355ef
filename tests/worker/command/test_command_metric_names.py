"""Metric names of other trainers: those of real logs, and hostile ones."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from watched_programs import FIXTURES, trainer

from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.reports import MetricsLine
from rlhf_core.worker.command.metric_names import COMMON, MAX_NAMES, OPENRLHF, MetricNames, legal_name

DOCUMENTED = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
FOR_HEALTH = {
    "train/loss", "train/grad_norm", "train/learning_rate", "reward/mean", "reward/std", "rollout/zero_std_groups",
    "rollout/truncated_share", "rollout/length_mean", "rollout/entropy", "policy/kl",
}  # fmt: skip


def numbers(values: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in values.items() if isinstance(value, int | float) and name != "step"}


def of_state(name: str) -> dict[str, float]:
    return numbers(json.loads((FIXTURES / name).read_text())["log_history"][0])


def of_swift() -> dict[str, float]:
    return numbers(json.loads((FIXTURES / "swift-grpo-logging.jsonl").read_text().splitlines()[0]))


@pytest.mark.parametrize("values", [of_swift(), of_state("trl-grpo-trainer_state.json")], ids=["swift", "trl"])
def test_all_that_health_needs_of_a_real_grpo_log(values: dict[str, float]) -> None:
    found = MetricNames(trainer()).rename(values)
    assert set(found) >= FOR_HEALTH
    assert found["rollout/zero_std_groups"] == values["frac_reward_zero_std"]
    assert len(found) == len(values)  # none is lost


def test_a_real_cpo_log() -> None:
    found = MetricNames(trainer(framework="trl")).rename(of_state("trl-cpo-trainer_state.json"))
    assert {"preference/margin", "preference/accuracy", "preference/chosen_reward", "loss/nll"} <= set(found)
    assert [name for name in found if name.startswith("trainer/")] == ["trainer/epoch"]


def test_tensorboard_has_the_same_names_with_a_group() -> None:
    values = of_state("trl-grpo-trainer_state.json")
    names = MetricNames(trainer())
    assert names.rename({f"train/{name}": value for name, value in values.items()}) == names.rename(values)
    evaluated = {"eval_loss": 1.0, "eval_runtime": 2.0, "eval_rewards/chosen": 3.0}
    in_tensorboard = {f"eval/{name.removeprefix('eval_')}": value for name, value in evaluated.items()}
    expected = {"time/evaluate_s": 2.0, "eval/loss": 1.0, "eval/rewards/chosen": 3.0}
    assert names.rename(evaluated) == names.rename(in_tensorboard) == expected


def test_openrlhf() -> None:
    values = {
        "train/policy_loss": 0.1, "train/actor_grad_norm": 0.2, "train/actor_lr": 1e-6, "train/kl": 0.3,
        "train/rollout/reward_mean": 0.4, "train/reward": 0.45, "train/rollout/reward_std": 0.5,
        "train/rollout/response_length_mean": 60.0, "train/rollout/truncated_rate": 0.7, "train/entropy_loss": 0.8,
        "train/timing/broadcast": 1.0, "train/timing/reward": 2.0,
    }  # fmt: skip
    assert MetricNames(trainer(framework="openrlhf")).rename(values) == {
        "train/loss": 0.1, "train/grad_norm": 0.2, "train/learning_rate": 1e-6, "policy/kl": 0.3, "reward/mean": 0.45,
        "trainer/rollout/reward_mean": 0.4, "reward/std": 0.5, "rollout/length_mean": 60.0,
        "rollout/truncated_share": 0.7, "rollout/entropy": 0.8, "time/weight_sync_s": 1.0, "time/reward": 2.0,
    }  # fmt: skip
    assert MetricNames(trainer()).rename({"policy_loss": 0.1}) == {"loss/policy": 0.1}


def test_the_name_of_the_user_wins() -> None:
    names = MetricNames(trainer(metrics={"score": "reward/mean", "train/kl": "", "loss": "train/other", "x": "own/x"}))
    values = {"reward": 1.0, "score": 2.0, "train/kl": 3.0, "train/loss": 4.0, "x": 5.0, "y": 6.0}
    assert names.rename(values) == {
        "reward/mean": 2.0, "train/other": 4.0, "own/x": 5.0, "trainer/reward": 1.0, "trainer/y": 6.0
    }  # fmt: skip


def test_two_names_of_the_same_metric_are_both_kept() -> None:
    assert MetricNames(trainer()).rename({"train_speed(s/it)": 2.0, "step_time": 1.0}) == {
        "time/step_s": 1.0,
        "time/train_speed(s/it)": 2.0,
    }


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        ("rewards/digits/mean", "reward/digits"),
        ("rewards/digits/std", "reward/digits/std"),
        ("timing/reward_model", "time/reward_model"),
        ("samples_per_second", "speed/samples_per_second"),
        ("perf/mfu", "speed/perf/mfu"),
        ("memory(GiB)", "trainer/memory(GiB)"),
        ("actor/pg_loss", "trainer/actor/pg_loss"),
        ("percentage", None),
    ],
)
def test_unknown_names(raw: str, name: str | None) -> None:
    assert list(MetricNames(trainer()).rename({raw: 1.0})) == ([] if name is None else [name])


def test_hostile_names_are_escaped_to_a_line_that_can_be_stored() -> None:
    values = {"a\nb": 1.0, "a\\nb": 2.0, "\x1b[31mred": 3.0, "": 4.0, "x" * 5_000: 5.0, "x" * 5_001: 6.0, "\ud800": 7.0}
    values |= {f"many{number}": 0.0 for number in range(3_000)} | {"loss": 8.0}
    found = MetricNames(trainer(metrics={"y": "b\x00" * 500})).rename({**values, "y": 9.0})
    assert len(found) == MAX_NAMES
    assert found["train/loss"] == 8.0  # known metrics are not crowded out
    line = MetricsLine(step=1, time=utc_now(), loop="grpo", metrics=found)
    assert MetricsLine.model_validate_json(line.model_dump_json()).metrics == found
    assert {1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 9.0} <= set(found.values())


def test_without_the_escapes_such_a_line_is_refused() -> None:
    with pytest.raises(ValueError, match="control characters"):
        MetricsLine(step=1, time=utc_now(), loop="grpo", metrics={"trainer/a\nb": 1.0})
    assert legal_name("a\nb") == "a\\u{a}b"


def test_every_name_is_documented() -> None:
    documented = set(re.findall(r"`([a-z]+/[a-z_<>/]+)`", DOCUMENTED))
    assert {*COMMON.values(), *OPENRLHF.values()} - {""} <= documented
