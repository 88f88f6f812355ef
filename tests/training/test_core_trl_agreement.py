"""Agreement with TRL 1.16.0, whose answers were recorded by fixtures/make_trl_fixtures.py."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_core.training.algorithms.aggregation import Aggregation, step_normaliser
from rlhf_core.training.algorithms.grpo import group_advantages, grpo_loss

pytestmark = pytest.mark.training

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "fixtures" / "trl_1_16_0_grpo.json").read_text())
OUR_NAMES: dict[str, Aggregation] = {
    "grpo": "sequence_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "dr_grpo": "fixed_length",
}
OUR_METRICS = {
    "kl": "policy/kl",
    "clip_ratio/low_mean": "policy/clip_low_share",
    "clip_ratio/high_mean": "policy/clip_high_share",
}


def ours(case: dict[str, Any], aggregation: Aggregation) -> tuple[float, Tensor, dict[str, float]]:
    """Loss, gradient and metrics of our functions on the recorded inputs."""
    given = {name: torch.tensor(values, dtype=torch.float64) for name, values in RECORDED["inputs"].items()}
    logprobs, mask, wanted = given["logprobs"].requires_grad_(), given["mask"].bool(), case["settings"]
    loss, stats = grpo_loss(
        logprobs,
        None if wanted.get("on_policy") else given["old_logprobs"],
        given["advantages"],
        mask,
        normaliser=step_normaliser(aggregation, int(mask.sum()), len(mask), RECORDED["max_completion_length"]),
        clip_low=wanted["epsilon_low"],
        clip_high=wanted["epsilon_high"],
        ref_logprobs=given["ref_logprobs"],
        kl_coefficient=wanted["beta"],
        aggregation=aggregation,
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), gradient, {name: (total / count).item() for name, (total, count) in stats.items()}


@pytest.mark.parametrize("name", sorted(RECORDED["losses"]))
def test_loss_gradient_and_metrics_agree(name: str) -> None:
    case = RECORDED["losses"][name]
    loss, gradient, metrics = ours(case, OUR_NAMES[case["settings"]["loss_type"]])
    assert loss == pytest.approx(case["loss"], abs=1e-6)
    torch.testing.assert_close(gradient, torch.tensor(case["gradient"], dtype=torch.float64), atol=1e-6, rtol=0)
    for trl_name, value in case["metrics"].items():
        assert metrics[OUR_METRICS[trl_name]] == pytest.approx(value, abs=1e-6)


def test_the_recorded_cases_reach_both_sides_of_the_clip() -> None:
    metrics = RECORDED["losses"]["dapo"]["metrics"]
    assert min(metrics["clip_ratio/low_mean"], metrics["clip_ratio/high_mean"]) > 0


@pytest.mark.parametrize(
    ("name", "wrong"), [("grpo", "token_mean"), ("dr_grpo", "sequence_mean"), ("dapo", "fixed_length")]
)
def test_negative_control_another_aggregation_disagrees(name: str, wrong: Aggregation) -> None:
    case = RECORDED["losses"][name]
    loss, gradient, _ = ours(case, wrong)
    assert abs(loss - case["loss"]) > 1e-3
    assert float((gradient - torch.tensor(case["gradient"], dtype=torch.float64)).abs().max()) > 1e-3


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_agree(scale: Any) -> None:
    recorded = RECORDED["advantages"][scale]
    found = group_advantages(torch.tensor(recorded["rewards"]), scale, epsilon=1e-4)
    torch.testing.assert_close(found, torch.tensor(recorded["advantages"], dtype=torch.float64), atol=1e-6, rtol=0)
