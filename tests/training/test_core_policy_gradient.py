"""Parts shared by the algorithms that sample: correction, estimators, whitening, mini-batches, and choice of groups."""

import dataclasses
import math
from collections import Counter
from typing import Any

import pytest
import torch
from core_losses import policy_loss_of, settings_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlhf_core.schemas.algorithms import specs
from rlhf_core.training.algorithms import ALGORITHMS
from rlhf_core.training.algorithms.advantages import (
    discounted_returns,
    generalised_advantages,
    moments,
    token_rewards,
    whitened_sequences,
    whitened_tokens,
)
from rlhf_core.training.algorithms.objective import SampledBatch, StepSums
from rlhf_core.training.algorithms.ppo import value_loss
from rlhf_core.training.algorithms.surrogate import clipped_surrogate, mean_ratio, mismatch_weights, sequence_ratio
from rlhf_core.training.trainers.ppo import explained_variance
from rlhf_core.training.trainers.sampling import select_groups
from rlhf_core.training.trainers.updates import divide

pytestmark = pytest.mark.training

LENGTHS = torch.tensor([3, 1, 2])
MASK = torch.arange(3) < LENGTHS[:, None]
TOKENS, SEQUENCES = 6, 3


def random(seed: int, scale: float = 0.5) -> Tensor:
    """``[3, 3]`` log-probabilities; values outside the mask must not matter."""
    generator = torch.Generator().manual_seed(seed)
    return torch.where(MASK, -1 + scale * torch.randn(3, 3, generator=generator, dtype=torch.float64), 7.0)


def sampled(rewards: Tensor, **scores: Tensor) -> SampledBatch:
    return SampledBatch(rewards, MASK, MASK, LENGTHS, **scores)


# --- correction of the mismatch between sampler and trainer ---


def test_weights_by_hand() -> None:
    """exp of the differences 1, 0.5 and -0.2, for single tokens and for the whole completion."""
    old = torch.zeros(1, 4)
    sampler = torch.tensor([[-1.0, -0.5, 0.2, 9.0]])
    mask = torch.tensor([[True, True, True, False]])
    tokens, whole = [math.e, math.exp(0.5), math.exp(-0.2)], math.exp(1.3)

    def weights(correction: Any, cap: float) -> list[float]:
        return [float(value) for value in mismatch_weights(old, sampler, mask, correction, cap)[0, :3]]

    assert weights("token_truncate", 2.0) == pytest.approx([2.0, *tokens[1:]])
    assert weights("token_mask", 2.0) == pytest.approx([0.0, *tokens[1:]])
    assert weights("sequence_truncate", 3.0) == pytest.approx([3.0])
    assert weights("sequence_mask", 3.0) == [0.0]
    assert weights("sequence_mask", 4.0) == pytest.approx([whole])
    unnamed = mismatch_weights(old, torch.full((1, 4), math.nan), mask, "token_mask", 2.0)
    assert unnamed.tolist() == [[1.0] * 4], "a token for which the sampler reported no probability"


@pytest.mark.parametrize("correction", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_the_correction_weighs_the_surrogate_and_not_the_penalty(correction: str) -> None:
    logprobs, reference, sampler = random(0), random(1), random(2, 2.0)
    gain = torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
    settings = {"kl_coefficient": 0.3, "correction_cap": 1.2, "clip_low": 1.0, "clip_high": 1e9}

    def loss(**changes: Any) -> float:
        found, stats = policy_loss_of(
            "grpo",
            logprobs,
            None,
            gain,
            MASK,
            sums=StepSums(TOKENS, SEQUENCES),
            ref_logprobs=reference,
            sampler_logprobs=sampler,
            **settings | changes,
        )
        assert ("policy/mismatch_weight" in stats) == (changes["correction"] != "none")
        return float(found)

    weights = mismatch_weights(logprobs, sampler, MASK, correction, 1.2)  # type: ignore[arg-type]
    surrogate = torch.where(MASK, -weights * gain, 0.0).sum() / TOKENS
    difference = reference - logprobs
    penalty = 0.3 * torch.where(MASK, torch.exp(difference) - difference - 1, 0.0).sum() / TOKENS
    assert loss(correction=correction) == pytest.approx(float(surrogate + penalty))
    assert abs(loss(correction="none") - float(surrogate + penalty)) > 1e-3


# --- ratios ---


def test_ratios_of_whole_sequences() -> None:
    logprobs, old = random(0), random(1)
    for row, length in enumerate(LENGTHS.tolist()):
        difference = float((logprobs - old)[row, :length].sum())
        assert mean_ratio(logprobs, old, MASK)[row].tolist() == pytest.approx([math.exp(difference / length)] * 3)
        assert sequence_ratio(logprobs, old, MASK)[row].tolist() == pytest.approx([math.exp(difference)] * 3)


# --- advantages ---


@pytest.mark.parametrize("advantage", [0.5, 0.0])
def test_a_clipped_ratio_that_would_overflow_has_no_gradient(advantage: float) -> None:
    """Drift of 0.011 per token over the 8,192 tokens of one completion: e to the power of 90."""
    logprobs = torch.full((1, 8192), -0.5, requires_grad=True)
    mask = torch.ones(1, 8192, dtype=torch.bool)
    ratio = sequence_ratio(logprobs, logprobs.detach() - 0.011, mask)
    losses, _ = clipped_surrogate(ratio, torch.full((1, 1), advantage), mask, 0.2, 0.2)
    losses.mean().backward()
    assert float(losses.detach().mean()) == pytest.approx(-1.2 * advantage)
    assert logprobs.grad is not None
    assert not logprobs.grad.any()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_penalty_is_taken_off_each_token_and_the_reward_is_at_the_last(estimator: str) -> None:
    logprobs, reference = random(0), random(1)
    spec = settings_of("reinforce_plus_plus", {"kl_coefficient": 0.5, "kl_estimator": estimator})
    rewards = torch.tensor([1.0, 2.0, 3.0])
    found = token_rewards(rewards, sampled(rewards[:, None], logprobs=logprobs, ref_logprobs=reference), spec)
    difference = reference - logprobs
    expected = {"k1": -difference, "k2": difference**2 / 2, "k3": difference.exp() - difference - 1}[estimator] * -0.5
    for row, length in enumerate(LENGTHS.tolist()):
        expected[row, length - 1] += rewards[row]
    torch.testing.assert_close(found, torch.where(MASK, expected, 0.0))
    without = token_rewards(rewards, sampled(rewards[:, None]), settings_of("reinforce_plus_plus", {}))
    assert without.tolist() == [[0.0, 0.0, 1.0], [2.0, 0.0, 0.0], [0.0, 3.0, 0.0]]


def test_returns_and_advantages_by_their_definitions() -> None:
    """Explicit sums over all later tokens (arXiv 1506.02438, eq. 11 to 16)."""
    discount, gae_lambda = 0.9, 0.8
    rewards = torch.where(MASK, random(3), 0.0)
    values = random(4)
    returns = discounted_returns(rewards, discount)
    advantages = generalised_advantages(rewards, values, MASK, discount, gae_lambda)
    for row, length in enumerate(LENGTHS.tolist()):
        value = [float(values[row, t]) for t in range(length)] + [0.0]
        delta = [float(rewards[row, t]) + discount * value[t + 1] - value[t] for t in range(length)]
        for t in range(length):
            later = range(t, length)
            expected = sum((discount * gae_lambda) ** (k - t) * delta[k] for k in later)
            assert float(advantages[row, t]) == pytest.approx(expected)
            expected = sum(discount ** (k - t) * float(rewards[row, k]) for k in later)
            assert float(returns[row, t]) == pytest.approx(expected)
        assert not advantages[row, length:].any()


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=30), st.integers(1, 4))
def test_whitening_over_ranks_is_whitening_of_all(values: list[float], num_ranks: int) -> None:
    everything = torch.tensor([values], dtype=torch.float64)
    mask = torch.ones_like(everything, dtype=torch.bool)
    parts = [part for part in everything.chunk(num_ranks, -1) if part.numel()]
    sums = [sum(column) for column in zip(*(moments(part) for part in parts), strict=True)]
    tokens = whitened_tokens(everything, mask, sums)
    expected = (everything - everything.mean()) / everything.var(unbiased=False).clamp(min=1e-8).sqrt()
    torch.testing.assert_close(tokens, expected, atol=1e-3, rtol=1e-5)
    sequences = whitened_sequences(everything, mask, sums)
    torch.testing.assert_close(
        sequences, (everything - everything.mean()) / (everything.std() + 1e-4), atol=1e-3, rtol=1e-5
    )


def test_whitening_each_rank_by_itself_is_something_else() -> None:
    """Negative control."""
    values = torch.tensor([[0.0, 1.0, 10.0, 20.0]], dtype=torch.float64)
    mask = torch.ones_like(values, dtype=torch.bool)
    whole = whitened_tokens(values, mask, moments(values))
    alone = torch.cat([whitened_tokens(part, mask[:, :2], moments(part)) for part in values.split(2, -1)], -1)
    assert float((whole - alone).abs().max()) > 1


# --- mini-batches ---


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("num_minibatches", [1, 2, 3, 5])
def test_the_division_does_not_depend_on_the_ranks(num_ranks: int, num_minibatches: int) -> None:
    size = 24

    def parts(number: int) -> list[set[int]]:
        """Positions of each part, assembled from the results that each rank computes by itself."""
        share = size // num_ranks
        found: list[set[int]] = [set() for _ in range(num_minibatches)]
        for rank in range(num_ranks):
            places = range(rank * share, (rank + 1) * share)
            own = divide(places, num_minibatches, "seed", number)
            assert max(map(len, own)) - min(map(len, own)) <= 2, "every rank has an equal share of each part"
            for part, indices in zip(found, own, strict=True):
                part.update(places[index] for index in indices)
        return found

    whole = [set(part) for part in divide(range(size), num_minibatches, "seed", 0)]
    assert parts(0) == whole
    assert Counter(place for part in whole for place in part) == dict.fromkeys(range(size), 1)
    assert max(map(len, whole)) - min(map(len, whole)) <= 1
    if num_minibatches > 1:
        assert parts(1) != whole, "each pass divides the rows anew"


# --- choice of groups (DAPO) ---


@given(st.lists(st.lists(st.booleans(), min_size=12, max_size=12), min_size=1, max_size=3))
def test_the_choice_of_groups_does_not_depend_on_the_ranks(rounds: list[list[bool]]) -> None:
    wanted = 12

    def chosen(num_ranks: int) -> dict[int, tuple[int, int]]:
        """Round and row of the group chosen for each position."""
        share = wanted // num_ranks
        flags = [
            [[float(flag) for flag in round_flags[r * share : (r + 1) * share]] for r in range(num_ranks)]
            for round_flags in rounds
        ]
        found: dict[int, tuple[int, int]] = {}
        for rank in range(num_ranks):
            groups, places = select_groups(flags, wanted, rank)
            for group, place in zip(groups, places, strict=True):
                assert place not in found
                found[place] = (group // share, rank * share + group % share)
        return found

    one = chosen(1)
    assert one == chosen(2) == chosen(3)
    assert sorted(one) == list(range(wanted)), "always a full batch"
    informative = [
        (number, row) for number, round_flags in enumerate(rounds) for row, flag in enumerate(round_flags) if flag
    ]
    assert set(informative[:wanted]) <= set(one.values()), "the first groups with differing rewards are chosen"
    assert [one[place] for place in range(wanted)] == sorted(one.values())


# --- every algorithm against the formula of its paper ---


def token_loss_of(name: str, gain: Tensor, **settings: Any) -> Tensor:
    """Gradient of the loss with respect to the log-probabilities, ``[3, 3]``."""
    logprobs = random(0).requires_grad_()
    reference = random(2) if settings_of(name, settings).reference else None
    loss, _ = policy_loss_of(name, logprobs, random(1), gain, MASK, sums=SUMS, ref_logprobs=reference, **settings)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return gradient


SUMS = StepSums(TOKENS, SEQUENCES, max_new_tokens=5)
GAIN = torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)


SAMPLING = [name for name, spec in specs().items() if spec.samples]


@pytest.mark.parametrize(
    ("name", "dual_clip"),
    [*((name, 0.0) for name in SAMPLING), *((name, 1.5) for name in SAMPLING if name != "cispo")],
)
def test_gradients_by_hand(name: str, dual_clip: float) -> None:
    """d loss / d log policy(t), token by token, as in the papers."""
    settings = {"clip_high": 0.4}
    if name != "cispo":
        settings |= {"clip_low": 0.3, "dual_clip": dual_clip}
    gains = -GAIN if dual_clip else GAIN
    ratios = torch.exp(random(0) - random(1))
    expected = torch.zeros(3, 3, dtype=torch.float64)
    clipped = 0
    for row, length in enumerate(LENGTHS.tolist()):
        advantage = float(gains[row])
        whole = math.prod(ratios[row, :length].tolist())
        ratio_of = {"gspo": whole ** (1 / length), "rloo": whole}
        for t in range(length):
            ratio = ratio_of.get(name, float(ratios[row, t]))
            is_clipped = ratio > 1.4 if advantage > 0 else ratio < 0.7 or ratio > (dual_clip or math.inf)
            clipped += is_clipped
            weight = min(ratio, 1.4) if name == "cispo" else 0.0 if is_clipped else ratio
            divisor = {"gspo": SEQUENCES * length, "rloo": SEQUENCES, "dr_grpo": SEQUENCES * 5}.get(name, TOKENS)
            expected[row, t] = -weight * advantage / divisor
    assert clipped, "the clip takes effect"
    torch.testing.assert_close(token_loss_of(name, gains, **settings), expected)


def test_the_dual_clip_is_that_of_verl() -> None:
    """``compute_policy_loss_vanilla`` of verl, and its ``pg_clipfrac_lower``."""
    logprobs, advantages = random(0, 2.0).requires_grad_(), random(2)
    ratio = torch.exp(logprobs - random(1))
    unbounded, clipped, bound = -advantages * ratio, -advantages * ratio.clamp(0.8, 1.2), -advantages * 3.0
    larger = torch.max(unbounded, clipped)
    expected = torch.where(advantages < 0, torch.min(larger, bound), larger)
    found, stats = clipped_surrogate(ratio, advantages, MASK, 0.2, 0.2, dual_clip=3.0)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(losses.sum(), logprobs, retain_graph=True)[0] for losses in (found, expected)]
    torch.testing.assert_close(*gradients)
    bounded = (larger > bound) & (advantages < 0) & MASK
    assert [float(value) for value in stats["policy/dual_clip_share"]] == [int(bounded.sum()), TOKENS]
    assert bounded.any()
    plain, without = clipped_surrogate(ratio, advantages, MASK, 0.2, 0.2)
    assert (plain[bounded] > found[bounded]).all()
    assert "policy/dual_clip_share" not in without


def test_a_dual_clip_without_effect_is_refused() -> None:
    with pytest.raises(ValueError, match=r"found dual_clip = 1\.2 with clip_high = 0\.2; expected more than 1\.2"):
        settings_of("grpo", {"dual_clip": 1.2})
    with pytest.raises(ValueError, match=r"found dual_clip = 3\.0, which cispo does not have"):
        settings_of("cispo", {"dual_clip": 3.0})


REWARDS = torch.tensor([[1.0], [2.0], [4.0]]).view(1, 3)


def advantages_of(name: str, trained: Tensor = MASK, **settings: Any) -> Tensor:
    """Advantages of one group of three completions, without whitening; one value per token."""
    logprobs, reference = random(0), random(1)
    batch = sampled(REWARDS, logprobs=logprobs, ref_logprobs=reference, values=random(2))
    batch = dataclasses.replace(batch, trained=trained)
    objective, spec = ALGORITHMS[name], settings_of(name, settings)
    rewards = objective.shaped(batch, 3, spec)
    sums = StepSums(TOKENS, SEQUENCES, float(rewards.sum()), float(rewards.square().sum()), max_new_tokens=3)
    found: Tensor = objective.advantages(batch, sums, spec).tokens
    assert not found[~MASK].any()
    return found


def test_advantages_by_hand() -> None:
    mean, deviation = 7 / 3, math.sqrt(7 / 3)
    differences = torch.tensor([[1 - mean], [2 - mean], [4 - mean]], dtype=torch.float64).expand(3, 3)
    kl = torch.where(MASK, random(0) - random(1), 0.0)
    whole = kl.sum(-1)

    def expect(name: str, expected: Tensor, **settings: Any) -> None:
        torch.testing.assert_close(advantages_of(name, **settings), torch.where(MASK, expected, 0.0), rtol=0, atol=1e-9)

    for name in ("grpo", "dapo", "gspo", "cispo"):
        expect(name, differences / (deviation + 1e-4))
    for name in ("dr_grpo", "reinforce_plus_plus_baseline"):
        expect(name, differences)
    shaped = torch.tensor([0.0, 2.0, 3.5], dtype=torch.float64)  # lengths 3, 1 and 2 of at most 3
    punished = (shaped - shaped.mean())[:, None].expand(3, 3)
    expect("dapo", punished, overlong_buffer=2, advantage_scale="none")
    for scale in ("group", "batch"):
        expect("dapo", punished / (shaped.std() + 1e-4), overlong_buffer=2, advantage_scale=scale)
    penalised = REWARDS.flatten() - 0.1 * whole
    alone = [float(penalised[i] - (penalised.sum() - penalised[i]) / 2) for i in range(3)]
    expect("rloo", torch.tensor(alone, dtype=torch.float64)[:, None].expand(3, 3), kl_coefficient=0.1)
    kept = torch.tensor([True, False, True])
    penalised = REWARDS.flatten() - 0.1 * torch.where(kept, whole, 0.0)
    alone = [float(penalised[i] - (penalised.sum() - penalised[i]) / 2) for i in range(3)]
    without = torch.tensor(alone, dtype=torch.float64)[:, None].expand(3, 3)
    expect("rloo", without, trained=MASK & kept[:, None], kl_coefficient=0.1)
    later = kl.flip(-1).cumsum(-1).flip(-1)
    expect("reinforce_plus_plus", REWARDS.double().view(3, 1) - 0.1 * later, kl_coefficient=0.1)
    expect("distillation", -kl)
    expect("distillation", -0.5 * later, kl_coefficient=0.5, discount=1.0)
    expect("ppo", REWARDS.double().view(3, 1) - 0.1 * later - random(2), kl_coefficient=0.1, gae_lambda=1.0)


def test_the_value_model_learns_by_the_larger_of_two_losses() -> None:
    """The loss is clipped at 0.2 from the old value: no gradient once the value has moved past it towards the
    return."""
    old, returns = torch.zeros(1, 4), torch.tensor([[1.0, 1.0, -1.0, 0.0]])
    values = torch.tensor([[0.1, 0.5, 0.5, 9.0]], requires_grad=True)
    mask = torch.tensor([[True, True, True, False]])
    loss, stats = value_loss(values, old, returns, mask, normaliser=3.0, value_clip=0.2)
    (gradient,) = torch.autograd.grad(loss, values)
    assert loss.item() == pytest.approx((0.9**2 + 0.8**2 + 1.5**2) / 2 / 3)
    assert gradient[0].tolist() == pytest.approx([-0.9 / 3, 0.0, 1.5 / 3, 0.0])
    assert [float(value) for value in stats["value/clip_share"]] == [1, 3]


def test_explained_variance_adds_up_over_ranks() -> None:
    returns = torch.tensor([1.0, 2.0, 5.0, 8.0], dtype=torch.float64)
    values = torch.tensor([1.5, 2.0, 4.0, 9.0], dtype=torch.float64)
    parts = [moments(returns[part]) + moments((returns - values)[part]) for part in (slice(0, 1), slice(1, 4))]
    found = explained_variance([sum(column) for column in zip(*parts, strict=True)])
    assert found == pytest.approx(1 - float((returns - values).var(unbiased=False) / returns.var(unbiased=False)))
    assert explained_variance([4, 8.0, 16.0, 4, 1.0, 1.0]) == 0, "returns that do not vary"
    assert explained_variance([0.0] * 6) == 0


def test_the_expected_gradient_of_distillation_is_that_of_the_divergence_from_the_teacher() -> None:
    """At one state, over the whole vocabulary: every token once, weighted with the probability of sampling it."""
    generator = torch.Generator().manual_seed(0)
    logits, of_teacher = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    policy, teacher = logits.log_softmax(-1), of_teacher.log_softmax(-1)
    ones = torch.ones(7, 1, dtype=torch.bool)
    scores = {"logprobs": policy.detach()[:, None], "ref_logprobs": teacher[:, None]}
    batch = SampledBatch(torch.ones(7, 1), ones, ones, torch.ones(7, dtype=torch.int64), **scores)
    sums = StepSums(1, 1, max_new_tokens=1)
    advantages = ALGORITHMS["distillation"].advantages(batch, sums, settings_of("distillation", {})).tokens

    def loss_of(token: int) -> Tensor:
        one = slice(token, token + 1)
        loss, _ = policy_loss_of(
            "distillation",
            policy[one, None],
            None,
            advantages[one],
            ones[one],
            sums=sums,
            ref_logprobs=teacher[one, None],
        )
        return loss

    def gradient(value: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(value, logits, retain_graph=True)
        return found

    expected = sum(float(policy[token].detach().exp()) * gradient(loss_of(token)) for token in range(7))
    kl_div = torch.nn.functional.kl_div
    torch.testing.assert_close(expected, gradient(kl_div(teacher, policy, reduction="sum", log_target=True)))
    forward = gradient(kl_div(policy, teacher, reduction="sum", log_target=True))
    assert not torch.allclose(expected, forward), "the other direction has another gradient"
