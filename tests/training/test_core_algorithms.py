"""Losses as mathematics: formulas, invariance under every split of the batch, and agreement of the statistics."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from core_losses import policy_loss_of, sft_loss
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rlhf_core.schemas.algorithms import specs
from rlhf_core.training.algorithms.aggregation import Aggregation, Stats, masked_stat, step_normaliser, summed
from rlhf_core.training.algorithms.grpo import group_advantages, std_of_moments, zero_std_groups
from rlhf_core.training.algorithms.kl import k1, k2, k3
from rlhf_core.training.algorithms.objective import StepSums
from rlhf_core.training.algorithms.ppo import value_loss

pytestmark = pytest.mark.training

AGGREGATIONS: list[Aggregation] = ["token_mean", "sequence_mean", "fixed_length"]
MAX_NEW_TOKENS = 9

# --- advantages ---


def test_advantages_by_hand() -> None:
    rewards = torch.tensor([[0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 4.0]])
    none = group_advantages(rewards, "none")
    assert none.tolist() == [[-0.5, 0.5, 0.5, -0.5], [-1.0, -1.0, -1.0, 3.0]]
    group = group_advantages(rewards, "group", epsilon=0.0)
    torch.testing.assert_close(group, none / torch.tensor([[math.sqrt(1 / 3)], [2.0]], dtype=torch.float64))
    batch = group_advantages(rewards, "batch", epsilon=0.5)
    torch.testing.assert_close(batch, none / (float(rewards.double().std()) + 0.5))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_give_exactly_no_advantage(scale: str) -> None:
    rewards = torch.tensor([[0.1] * 3, [0.0, 1.0, 0.0]])
    advantages = group_advantages(rewards, scale, epsilon=0.0)  # type: ignore[arg-type]
    assert advantages[0].tolist() == [0.0, 0.0, 0.0]
    assert torch.isfinite(advantages).all()
    assert zero_std_groups(rewards).tolist() == [True, False]


@pytest.mark.filterwarnings("error")
def test_a_rank_without_groups_has_no_advantages_and_no_warning() -> None:
    assert group_advantages(torch.zeros(0, 4)).shape == (0, 4)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=30))
def test_the_batch_deviation_can_be_summed_up_over_ranks(values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float64)
    parts = tensor.chunk(3)
    moments = [
        sum(float(f(part)) for part in parts) for f in (lambda t: t.numel(), torch.sum, lambda t: t.square().sum())
    ]
    assert std_of_moments(*moments) == pytest.approx(float(tensor.std()), abs=1e-5)
    assert std_of_moments(1, 5.0, 25.0) == 0.0


# --- GRPO ---


def one_token(ratio: float, advantage: float, **options: Any) -> tuple[float, float]:
    """Loss and its gradient with respect to the log-probability, for a single token with this ratio."""
    logprob = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    loss, _ = policy_loss_of(
        "grpo",
        logprob,
        torch.zeros(1, 1, dtype=torch.float64),
        torch.tensor([[advantage]]),
        torch.ones(1, 1, dtype=torch.bool),
        **options,
    )
    (gradient,) = torch.autograd.grad(loss, logprob)
    return loss.item(), gradient.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, (-2.0, -2.0)),
        (1.1, 2.0, (-2.2, -2.2)),
        (1.5, 2.0, (-2.56, 0.0)),  # above 1 + clip_high and to be raised: the clip removes the gradient
        (1.5, -2.0, (3.0, 3.0)),  # above 1 + clip_high and to be lowered: it does not
        (0.5, 2.0, (-1.0, -1.0)),
        (0.5, -2.0, (1.8, 0.0)),  # below 1 - clip_low and to be lowered
    ],
)
def test_the_clip_is_one_sided_and_may_be_asymmetric(
    ratio: float, advantage: float, expected: tuple[float, float]
) -> None:
    assert one_token(ratio, advantage, clip_low=0.1, clip_high=0.28) == pytest.approx(expected)


def test_the_penalty_is_k3_and_needs_a_reference() -> None:
    logprobs = torch.tensor([[-1.0, -2.0]], dtype=torch.float64)
    reference = torch.tensor([[-1.5, -1.0]], dtype=torch.float64)
    mask, nothing = torch.tensor([[True, True]]), torch.zeros(1, 1)
    step = {"sums": StepSums(2, 1), "ref_logprobs": reference}
    loss, stats = policy_loss_of("grpo", logprobs, None, nothing, mask, **step, kl_coefficient=0.1)
    divergences = [math.exp(d) - d - 1 for d in (-0.5, 1.0)]
    assert loss.item() == pytest.approx(0.1 * sum(divergences) / 2)
    total, count = stats["policy/kl"]
    assert (total.item(), count.item()) == (pytest.approx(sum(divergences)), 2)
    measured, stats = policy_loss_of("grpo", logprobs, None, nothing, mask, **step)
    assert measured.item() == 0.0
    assert stats["policy/kl"][0].item() == pytest.approx(sum(divergences))
    with pytest.raises(AssertionError):
        policy_loss_of("grpo", logprobs, None, nothing, mask, kl_coefficient=0.1)


def test_on_policy_the_loss_is_flat_and_its_gradient_is_not() -> None:
    logprobs = torch.tensor([[-1.0], [-2.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2, 1, dtype=torch.bool)
    loss, _ = policy_loss_of("grpo", logprobs, None, torch.tensor([[1.0], [-1.0]]), mask, sums=StepSums(2, 2))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss.item() == 0.0
    assert gradient.tolist() == [[-0.5], [0.5]]


def test_masked_positions_may_hold_anything() -> None:
    mask = torch.tensor([[True, False], [False, False]])
    logprobs = torch.tensor([[-1.0, float("nan")], [float("inf"), 50.0]], dtype=torch.float64, requires_grad=True)
    for aggregation in AGGREGATIONS:
        loss, stats = policy_loss_of(
            "grpo", logprobs, None, torch.tensor([[2.0], [3.0]]), mask, loss_aggregation=aggregation
        )
        assert loss.item() == -2.0
        assert all(math.isfinite(total.item()) and count.item() == 1 for total, count in stats.values())


@given(st.lists(st.floats(-20, 0), min_size=1, max_size=20), st.floats(-3, 3))
def test_estimators_of_the_divergence(values: list[float], shift: float) -> None:
    logprobs = torch.tensor([values], dtype=torch.float64)
    assert (k3(logprobs, logprobs + shift) >= -1e-15).all(), "up to rounding"
    assert (k2(logprobs, logprobs + shift) >= 0).all()
    torch.testing.assert_close(k1(logprobs, logprobs + shift), torch.full_like(logprobs, -shift), atol=1e-9, rtol=0)
    for estimator in (k1, k2, k3):
        assert not estimator(logprobs, logprobs).any()


def test_k1_and_k3_estimate_the_divergence_without_bias() -> None:
    generator = torch.Generator().manual_seed(0)
    policy, reference = (
        torch.log_softmax(torch.randn(6, generator=generator, dtype=torch.float64), -1) for _ in range(2)
    )
    exact = (policy.exp() * (policy - reference)).sum()
    for estimator in (k1, k3):
        torch.testing.assert_close((policy.exp() * estimator(policy, reference)).sum(), exact)


# --- one batch, split in every way ---

LENGTHS = [1, 5, 3, 9, 2, 7, 4, 6]
"""Completion tokens of eight sequences."""

LossOfPart = Callable[[Tensor, list[int], Aggregation], tuple[Tensor, Stats]]
"""Function (log-probabilities of some sequences, which, aggregation) -> loss."""


class ToyModel(nn.Module):
    """Plain torch module that computes the log-probabilities of fixed tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.out = nn.Embedding(11, 5).double(), nn.Linear(5, 11).double()

    def forward(self, tokens: Tensor) -> Tensor:
        logprobs = torch.log_softmax(self.out(torch.tanh(self.embedding(tokens))), -1)
        return logprobs.gather(-1, (tokens[..., None] * 3 + 1) % 11).squeeze(-1)


TOKENS = torch.arange(len(LENGTHS) * max(LENGTHS)).view(len(LENGTHS), -1) * 7 % 11
MASK = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
ADVANTAGES = torch.linspace(-1.5, 2.0, len(LENGTHS), dtype=torch.float64)
NOISE = torch.linspace(-0.5, 0.5, TOKENS.numel(), dtype=torch.float64).view_as(TOKENS)


SUMS = StepSums(sum(LENGTHS), len(LENGTHS), max_new_tokens=MAX_NEW_TOKENS)


def part_of(name: str, **settings: Any) -> LossOfPart:
    """Our loss of a micro-batch, divided by the normaliser of the whole step."""

    def loss(logprobs: Tensor, which: list[int], aggregation: Aggregation) -> tuple[Tensor, Stats]:
        noise = NOISE[which, : logprobs.shape[1]]
        if "loss_aggregation" in specs()[name].model_fields and name != "gspo":
            settings["loss_aggregation"] = aggregation
        return policy_loss_of(
            name,
            logprobs,
            logprobs.detach() + noise,
            ADVANTAGES[which][:, None],
            MASK[which, : logprobs.shape[1]],
            sums=SUMS,
            ref_logprobs=logprobs.detach() - noise,
            sampler_logprobs=logprobs.detach() + NOISE.roll(1, 0)[which, : logprobs.shape[1]] / 3,
            kl_coefficient=0.1,
            **settings,
        )

    return loss


def value_part(values: Tensor, which: list[int], aggregation: Aggregation) -> tuple[Tensor, Stats]:
    """Loss of PPO's value model, with its outputs in place of log-probabilities."""
    noise = NOISE[which, : values.shape[1]]
    mask = MASK[which, : values.shape[1]]
    targets = ADVANTAGES[which][:, None] + noise
    return value_loss(values, values.detach() + noise, targets, mask, normaliser=sum(LENGTHS), value_clip=0.2)


def sft_part(logprobs: Tensor, which: list[int], aggregation: Aggregation) -> tuple[Tensor, Stats]:
    return sft_loss(logprobs, MASK[which, : logprobs.shape[1]], sum(LENGTHS))


def mean_per_micro_batch(logprobs: Tensor, which: list[int], aggregation: Aggregation) -> tuple[Tensor, Stats]:
    """The common mistake: each micro-batch is divided by its own tokens, and the results are averaged over
    micro-batches."""
    mask = MASK[which, : logprobs.shape[1]]
    loss = summed(-logprobs * ADVANTAGES[which][:, None], mask, "token_mean") / mask.sum()
    return loss * len(which) / len(LENGTHS), {"loss/policy": masked_stat(-logprobs, mask)}


def parts(order: list[int], num_ranks: int, accumulation: int) -> Iterator[list[int]]:
    """Sequences of each micro-batch of each rank."""
    size = len(order) // (num_ranks * accumulation)
    for start in range(0, len(order), size):
        yield order[start : start + size]


def step_gradient(
    loss_of_part: LossOfPart, micro_batches: list[list[int]], aggregation: Aggregation
) -> tuple[Tensor, dict[str, float]]:
    """Gradient of the whole step as one vector, and the reduced statistics. Each micro-batch is padded to its own
    longest sequence."""
    model = ToyModel()
    totals: dict[str, list[float]] = {}
    for which in micro_batches:
        width = max(LENGTHS[i] for i in which)
        loss, stats = loss_of_part(model(TOKENS[which, :width]), which, aggregation)
        loss.backward()
        for name, (total, count) in stats.items():
            sums = totals.setdefault(name, [0.0, 0.0])
            sums[0] += total.item()
            sums[1] += count.item()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    return gradient, {name: total / count for name, (total, count) in totals.items()}


FACTORISATIONS = [
    (ranks, accumulation) for ranks in (1, 2, 4, 8) for accumulation in (1, 2, 4, 8) if ranks * accumulation <= 8
]


def losses_to_cut_up() -> dict[str, LossOfPart]:
    """All algorithms that sample, with a penalty, and with the correction per token and per completion."""
    found: dict[str, LossOfPart] = {"sft": sft_part, "value model": value_part}
    for name, spec in specs().items():
        if spec.samples:
            found[name] = part_of(name)
            found[f"{name}, corrected"] = part_of(name, correction="sequence_truncate", correction_cap=1.1)
    return found | {"grpo, corrected by token": part_of("grpo", correction="token_mask", correction_cap=1.1)}


@pytest.mark.parametrize("name", losses_to_cut_up())
@settings(max_examples=12)
@given(st.sampled_from(FACTORISATIONS), st.permutations(range(len(LENGTHS))), st.sampled_from(AGGREGATIONS))
def test_gradients_do_not_depend_on_how_the_batch_is_cut_up(
    name: str, factors: tuple[int, int], order: list[int], aggregation: Aggregation
) -> None:
    loss_of_part = losses_to_cut_up()[name]
    expected, expected_stats = step_gradient(loss_of_part, [list(range(len(LENGTHS)))], aggregation)
    found, found_stats = step_gradient(loss_of_part, list(parts(order, *factors)), aggregation)
    assert expected.abs().max() > 1e-3, "there is a gradient to compare"
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    assert found_stats == pytest.approx(expected_stats, abs=1e-10)


def test_negative_control_a_mean_per_micro_batch_is_caught() -> None:
    expected, _ = step_gradient(mean_per_micro_batch, [list(range(len(LENGTHS)))], "token_mean")
    found, _ = step_gradient(mean_per_micro_batch, list(parts(list(range(len(LENGTHS))), 2, 2)), "token_mean")
    assert float((found - expected).abs().max()) > 1e-3


def test_normalisers_count_the_whole_step() -> None:
    assert step_normaliser("token_mean", 30, 8, 9) == 30
    assert step_normaliser("sequence_mean", 30, 8, 9) == 8
    assert step_normaliser("fixed_length", 30, 8, 9) == 72
    assert [step_normaliser(aggregation, 0, 0, 9) for aggregation in AGGREGATIONS] == [1, 1, 1]
