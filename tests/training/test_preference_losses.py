"""Losses that learn from the rows of the data: their formulas, and the same gradient for every split of a batch."""

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from core_models import QWEN, char_tokenizer, tiny_model
from pydantic import JsonValue, TypeAdapter, ValidationError
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from rlhf_core.schemas.algorithms import Algorithm
from rlhf_core.schemas.algorithms.base import AlgorithmSpec
from rlhf_core.training.algorithms import ALGORITHMS
from rlhf_core.training.algorithms.objective import MicroBatch, PolicyOutput, StepSums
from rlhf_core.training.algorithms.orpo import log1mexp
from rlhf_core.training.algorithms.pairs import pair_losses
from rlhf_core.training.data.examples import Example, make_batch, score_batch, step_sums
from rlhf_core.training.evaluation.ranking import desirable_sample, pair_sample
from rlhf_core.training.models.causal_lm import PolicyModel
from rlhf_core.training.models.reward_model import RewardModel, is_reward_model, load_reward_model
from rlhf_core.training.trainers.step import Totals
from rlhf_core.training.types import Row

pytestmark = pytest.mark.training

SPECS: list[dict[str, Any]] = [
    {"name": "sft"},
    {"name": "dpo"},
    {"name": "dpo", "loss": "ipo"},
    {"name": "dpo", "loss": "hinge", "beta": 0.5},
    {"name": "dpo", "loss": "robust", "label_smoothing": 0.2},
    {"name": "dpo", "sft_coefficient": 0.5},
    {"name": "cpo", "label_smoothing": 0.1},
    {"name": "cpo", "loss": "hinge"},
    {"name": "cpo", "loss": "ipo", "nll_coefficient": 0.0},
    {"name": "simpo"},
    {"name": "orpo", "beta": 0.5},
    {"name": "reward_model", "centring_coefficient": 0.01},
    {"name": "kto", "undesirable_weight": 0.7},
]


def named(spec: dict[str, Any]) -> str:
    return "-".join(str(value) for value in spec.values())


def parsed(spec: dict[str, Any]) -> AlgorithmSpec:
    found: AlgorithmSpec = TypeAdapter(Algorithm).validate_python(spec)
    return found


def examples(algorithm: AlgorithmSpec) -> list[Example]:
    """Twelve rows of different lengths."""
    count = 2 if algorithm.pairs else 1
    return [
        Example(
            prompt=[5 + (7 * row) % 90, 6 + row, 9],
            completions=tuple(
                [20 + (3 * row + 11 * of + at) % 60 for at in range(1 + (row + 3 * of) % 6)] for of in range(count)
            ),
            margin=0.1 * row,
            desirable=row % 3 != 0,
        )
        for row in range(12)
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Invariance

CUTS: list[list[list[range]]] = [
    [[range(12)]],
    [[range(6), range(6, 12)]],
    [[range(row, row + 1) for row in range(12)]],
    [[range(5), range(5, 6)], [range(6, 7), range(7, 12)]],
    [[range(4)], [range(4, 8)], [range(8, 11), range(11, 12)]],
]
"""Rows of each micro-batch of each rank."""


def ranker(seed: int = 1, config: Mapping[str, JsonValue] = QWEN) -> PreTrainedModel:
    """A reward model made from the tiny language model."""
    with tempfile.TemporaryDirectory() as folder:
        tiny_model(config, seed=1).save_pretrained(folder)
        return load_reward_model(Path(folder), "float32", seed, char_tokenizer().pad_token_id)


class Trained:
    """A policy and its reference, in double precision."""

    def __init__(self) -> None:
        self.policy = PolicyModel(tiny_model(seed=1).double())
        self.ranker = RewardModel(ranker().double())
        self.reference = PolicyModel(tiny_model(seed=2).double()).requires_grad_(False)

    def gradient(self, algorithm: AlgorithmSpec, cut: Sequence[Sequence[range]], *, naive: bool = False) -> Tensor:
        """Gradient of a step, summed over ranks and micro-batches; with ``naive``, the mean of their own means."""
        rows, objective = examples(algorithm), ALGORITHMS[algorithm.name]
        reference = self.reference if algorithm.reference else None
        pad_id = char_tokenizer().pad_token_id
        parts = [[rows[at] for at in part] for rank in cut for part in rank]
        whole = self.sums(rows, parts, algorithm)
        policy = self.ranker if algorithm.ranks_completions else self.policy
        policy.zero_grad()
        for part in parts:
            batch, made = make_batch(part, algorithm, pad_id)
            sums = self.sums(part, [part], algorithm) if naive else whole
            loss, _ = objective.loss(score_batch(policy, reference, batch, made, algorithm), made, sums, algorithm)
            (loss / len(parts) if naive else loss).backward()
        return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])

    def sums(self, rows: Sequence[Example], parts: Sequence[Sequence[Example]], algorithm: AlgorithmSpec) -> StepSums:
        """Statistics of a step, measured in micro-batches."""
        num_tokens, num_sequences, num_chosen = step_sums(rows, algorithm)
        sums = StepSums(num_tokens, num_sequences, num_chosen_tokens=num_chosen)
        if not algorithm.mismatches:
            return sums
        before = {row.prompt[0]: other.completions for row, other in zip(rows, [rows[-1], *rows[:-1]], strict=True)}
        total = 0.0
        for part in parts:
            others = [replace(row, completions=before[row.prompt[0]]) for row in part]
            batch, made = make_batch(others, algorithm, char_tokenizer().pad_token_id)
            with torch.no_grad():
                output = score_batch(self.policy, self.reference, batch, made, algorithm)
            total += float(ALGORITHMS[algorithm.name].measure(output, made, algorithm)["mismatched"])
        # The tiny models differ at random: with the opposite sign the divergence would be 0, and nothing would be
        # tested.
        return replace(sums, measured={"mismatched": abs(total)})


@pytest.fixture(scope="module")
def trained() -> Trained:
    return Trained()


@pytest.mark.parametrize("spec", SPECS, ids=named)
def test_the_gradient_does_not_depend_on_how_a_batch_is_cut(trained: Trained, spec: dict[str, Any]) -> None:
    """The negative control is a mean of means, which depends on it."""
    algorithm = parsed(spec)
    expected = trained.gradient(algorithm, CUTS[0])
    assert float(expected.norm()) > 1e-3
    for cut in CUTS[1:]:
        assert float((trained.gradient(algorithm, cut) - expected).abs().max()) <= 1e-10
    assert float((trained.gradient(algorithm, CUTS[3], naive=True) - expected).abs().max()) > 1e-4


# ---------------------------------------------------------------------------------------------------------------------
# DPO

CHOSEN, REJECTED = torch.tensor([0.3, -2.0], dtype=torch.float64), torch.tensor([-0.4, 1.0], dtype=torch.float64)


def logistic(value: float) -> float:
    return 1 / (1 + math.exp(-value))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, lambda d: -math.log(logistic(0.1 * d))),
        ({"beta": 2.0}, lambda d: -math.log(logistic(2 * d))),
        ({"loss": "hinge", "beta": 2.0}, lambda d: max(0.0, 1 - 2 * d)),
        ({"loss": "ipo", "beta": 0.5}, lambda d: (d - 1) ** 2),
        (
            {"label_smoothing": 0.25},
            lambda d: -0.75 * math.log(logistic(0.1 * d)) - 0.25 * math.log(logistic(-0.1 * d)),
        ),
        (
            {"loss": "robust", "label_smoothing": 0.25},
            lambda d: (-0.75 * math.log(logistic(0.1 * d)) + 0.25 * math.log(logistic(-0.1 * d))) / 0.5,
        ),
    ],
)
def test_the_loss_of_a_pair_is_its_formula(settings: dict[str, Any], expected: Any) -> None:
    found = pair_losses(CHOSEN, REJECTED, **settings).tolist()
    assert found == pytest.approx([expected(0.7), expected(-3.0)], abs=1e-12)


def output_of(rows: list[list[float]], reference: list[list[float]]) -> tuple[PolicyOutput, MicroBatch]:
    logprobs, ref = (torch.tensor(values, dtype=torch.float64) for values in (rows, reference))
    return PolicyOutput(logprobs, ref), MicroBatch(ref != 0)


def test_ipo_is_taken_per_token_and_rewards_are_not() -> None:
    output, batch = output_of([[-1, -1, -1], [-3, 0, 0]], [[-2, -2, -2], [-1, 0, 0]])
    sums, ipo = StepSums(4, 2), parsed({"name": "dpo", "loss": "ipo", "beta": 0.5})
    loss, stats = ALGORITHMS["dpo"].loss(output, batch, sums, ipo)
    assert float(loss) == pytest.approx((3 / 3 - (-2 / 1) - 1) ** 2)
    assert float(stats["margin"][0]) == pytest.approx(0.5 * (3 - (-2)))
    assert float(stats["accuracy"][0]) == 1


def test_the_supervised_term_of_dpo_counts_the_tokens_of_all_chosen_completions() -> None:
    """Two micro-batches of a pair: 3 nats in the 2 tokens of the first chosen completion, 3 in the 1 of the other."""
    rows: list[list[list[float]]] = [[[-1, -2], [-3, 0]], [[-3, 0], [-1, -1]]]
    sums, spec = StepSums(6, 4, num_chosen_tokens=3), parsed({"name": "dpo", "sft_coefficient": 0.5})
    total, totals = 0.0, Totals()
    for row in rows:
        loss, stats = ALGORITHMS["dpo"].loss(*output_of(row, row), sums, spec)
        total += float(loss)
        totals.add(stats)
    assert total == pytest.approx(math.log(2) + 0.5 * 6 / 3)
    assert totals.read("loss/dpo") == pytest.approx((2 * total, 2)), "the metric train/loss is the whole loss"
    assert totals.read("nll") == (6, 3)


def test_a_policy_that_is_its_reference_prefers_nothing() -> None:
    output, batch = output_of([[-1, -1], [-3, 0]], [[-1, -1], [-3, 0]])
    loss, stats = ALGORITHMS["dpo"].loss(output, batch, StepSums(3, 2), parsed({"name": "dpo"}))
    assert float(loss) == pytest.approx(math.log(2))
    assert float(stats["accuracy"][0]) == 0, "counted as in TRL"


@pytest.mark.parametrize("settings", [{"label_smoothing": 0.1}, {"loss": "robust", "label_smoothing": 0.5}])
def test_smoothing_without_its_loss_has_no_meaning(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"label_smoothing"):
        parsed({"name": "dpo", **settings})


# ---------------------------------------------------------------------------------------------------------------------
# CPO, SimPO, ORPO


def loss_of(spec: dict[str, Any], prompts: int = 0) -> float:
    """Loss of one pair: a prompt of one token, a chosen completion of two tokens and a rejected one of one."""
    keep = torch.tensor([[0, 1, 1], [0, 1, 0]], dtype=torch.bool)
    prompt_mask = torch.zeros_like(keep)
    prompt_mask[0, :prompts] = True
    output = PolicyOutput(torch.tensor([[-0.5, -1.5, -0.25], [-2.0, -1.0, 0.0]], dtype=torch.float64))
    sums = StepSums(float(keep.sum()), 2, num_chosen_tokens=float(keep[0].sum()) + prompts)
    objective = ALGORITHMS[spec["name"]]
    loss, stats = objective.loss(output, MicroBatch(keep, prompt_mask=prompt_mask), sums, parsed(spec))
    parts = next(definition.stats for definition in objective.metrics if definition.name == "train/loss")
    shown = sum(float(stats[name][0]) for name in parts) / float(stats[parts[0]][1])
    assert shown == pytest.approx(float(loss), abs=1e-12), "the metric equals the loss"
    return float(loss)


def odds(logprob: float) -> float:
    return math.exp(logprob) / (1 - math.exp(logprob))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"name": "cpo", "beta": 2.0}, -math.log(logistic(2 * (-1.75 + 1))) + 1.75 / 2),
        ({"name": "cpo", "loss": "hinge", "nll_coefficient": 0.0}, 1 - 0.1 * -0.75),
        ({"name": "cpo", "loss": "ipo", "beta": 0.5, "nll_coefficient": 2.0}, (-0.875 + 1 - 1) ** 2 + 2 * 1.75 / 2),
        (
            {"name": "cpo", "label_smoothing": 0.25, "nll_coefficient": 0.0},
            -0.75 * math.log(logistic(-0.075)) - 0.25 * math.log(logistic(0.075)),
        ),
        ({"name": "simpo", "beta": 2.0, "gamma": 0.5}, -math.log(logistic(2 * (-0.875 + 1) - 0.5))),
        ({"name": "orpo", "beta": 0.5}, 2.25 / 3 - 0.5 * math.log(logistic(math.log(odds(-0.875) / odds(-1.0))))),
    ],
    ids=lambda value: named(value) if isinstance(value, dict) else "",
)
def test_a_loss_without_reference_is_its_formula(spec: dict[str, Any], expected: float) -> None:
    assert loss_of(spec, prompts=1 if spec["name"] == "orpo" else 0) == pytest.approx(expected, abs=1e-12)


def test_odds_lose_no_accuracy_near_certainty_or_impossibility() -> None:
    values = [-1e-12, -1e-3, -math.log(2), -5.0, -50.0]
    exact = [math.log(-math.expm1(value)) if value > -1 else math.log1p(-math.exp(value)) for value in values]
    found = log1mexp(torch.tensor(values, dtype=torch.float64))
    assert found.tolist() == pytest.approx(exact, rel=1e-14)
    naive = torch.log(1 - torch.exp(torch.tensor(values, dtype=torch.float64)))
    assert abs(float(naive[0]) - exact[0]) > 1e-6, "negative control"


def test_a_certain_completion_gives_no_gradient_that_is_not_finite() -> None:
    certain = torch.tensor([0.0, -1e-9, -80.0], requires_grad=True)
    log1mexp(certain).sum().backward()
    assert certain.grad is not None
    assert bool(torch.isfinite(certain.grad).all())


# ---------------------------------------------------------------------------------------------------------------------
# Reward model


def test_a_reward_model_is_its_formula_with_margin_and_centring() -> None:
    scores = torch.tensor([1.0, 0.2, -0.5, 0.4], dtype=torch.float64)
    batch = MicroBatch(torch.ones(4, 1, dtype=torch.bool), margins=torch.tensor([0.5, 0.0]))
    spec = parsed({"name": "reward_model", "centring_coefficient": 0.1})
    output = PolicyOutput(scores.new_empty(0), scores=scores)
    loss, stats = ALGORITHMS["reward_model"].loss(output, batch, StepSums(4, 4), spec)
    first = -math.log(logistic(1.5 - 0.5)) + 0.1 * 0.5**2
    second = -math.log(logistic(-0.2)) + 0.1 * 0.6**2
    assert float(loss) == pytest.approx((first + second) / 2)
    assert float(stats["accuracy"][0]) == 1


def test_rewards_are_those_that_transformers_gives(tmp_path: Path) -> None:
    model = ranker()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert loaded.config.num_labels == 1
    ids = torch.tensor([[5, 6, 7, 2, 0, 0], [8, 9, 10, 11, 12, 2]])
    expected = loaded(ids, attention_mask=(ids != 0).long()).logits.squeeze(-1)
    torch.testing.assert_close(RewardModel(model)(ids), expected)
    again = load_reward_model(tmp_path, "float32", 7, 0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)), "not rebuilt"


def test_the_head_of_a_reward_model_follows_from_the_seed() -> None:
    heads = [ranker(seed).state_dict()["score.weight"] for seed in (1, 1, 2)]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert is_reward_model(ranker())
    assert not is_reward_model(tiny_model())
    decoder = ranker().base_model.state_dict()
    assert all(torch.equal(value, decoder[name]) for name, value in tiny_model(seed=1).base_model.state_dict().items())


# ---------------------------------------------------------------------------------------------------------------------
# KTO


@pytest.mark.parametrize("measured", [3.0, -3.0])
def test_kto_is_its_formula_with_a_divergence_that_is_not_negative(measured: float) -> None:
    output, batch = output_of([[-1, -1], [-3, 0]], [[-2, -2], [-1, 0]])
    batch = replace(batch, desirable=torch.tensor([True, False]))
    spec = parsed({"name": "kto", "beta": 0.5, "desirable_weight": 0.3, "undesirable_weight": 0.7})
    loss, stats = ALGORITHMS["kto"].loss(output, batch, StepSums(3, 2, measured={"mismatched": measured}), spec)
    z = max(0.0, measured / 2)
    expected = 0.3 * (1 - logistic(0.5 * (2 - z))) + 0.7 * (1 - logistic(0.5 * (z + 2)))
    assert float(loss) == pytest.approx(expected / 2, abs=1e-12)
    assert [float(stats[name][0]) for name in ("chosen_reward", "rejected_reward")] == [1.0, -1.0]


def test_a_desirable_completion_is_scored_among_the_undesirable_ones() -> None:
    row = Row("a", "1=", "1", "1", {})
    assert desirable_sample(row, 0.0, [-1.0, 0.0, 1.0, 2.0]).score == (1 + 0.5) / 4
    pair = Row("a", "1=", "", "", {}, "1", "2")
    assert [pair_sample(pair, *rewards).score for rewards in ((1, 0), (0, 1), (0, 0))] == [1, 0, 0.5]
    assert [pair_sample(pair, *rewards).completion for rewards in ((1, 0), (0, 1))] == ["1", "2"]
