"""Our side of the comparison: the same tokens through our objectives, in micro-batches split as the loops split
them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from conformance_cases import MAX_NEW_TOKENS, TEMPERATURE, Case
from safetensors.torch import load_file
from tiny_models import EOS, PAD, config, fill, flat_gradient
from torch import Tensor
from transformers import OPTForCausalLM, OPTForSequenceClassification

from rlhf_core.schemas.algorithms import specs
from rlhf_core.schemas.algorithms.base import AlgorithmSpec
from rlhf_core.training.algorithms import ALGORITHMS
from rlhf_core.training.algorithms.advantages import moments, whitened_sequences
from rlhf_core.training.algorithms.objective import MicroBatch, SampledBatch, StepSums
from rlhf_core.training.data.batches import SequenceBatch, collate
from rlhf_core.training.data.examples import Example, make_batch, score_batch, scored, step_sums
from rlhf_core.training.models.causal_lm import PolicyModel
from rlhf_core.training.models.reward_model import RewardModel
from rlhf_core.training.trainers.step import Totals

FIXTURES = Path(__file__).parent / "fixtures"
TRL: dict[str, Any] = json.loads((FIXTURES / "trl_1_16_0.json").read_text(encoding="utf-8"))
"""Inputs and results of TRL, by the name of the case."""

ROWS_PER_MICRO_BATCH = 3

METRICS = {
    "kl": "policy/kl",
    "clip_ratio/low_mean": "policy/clip_low_share",
    "clip_ratio/high_mean": "policy/clip_high_share",
}
"""Name of a metric in TRL to the statistic of ours."""


@dataclass(frozen=True)
class Result:
    """Results of one project for one case."""

    loss: float
    gradient: Tensor
    """``[N]`` float64, all parameters in the order of their names."""
    advantages: Tensor | None = None
    """``[B]`` float64, for an algorithm that samples."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics by their names in TRL."""


@dataclass(frozen=True)
class Difference:
    """Largest absolute differences between two results."""

    loss: float
    gradient: float
    advantages: float | None

    @property
    def largest(self) -> float:
        """Largest of all differences."""
        return max(self.loss, self.gradient, self.advantages or 0.0)


def theirs(case: Case) -> Result:
    """Recorded result of TRL."""
    recorded = TRL["cases"][case.name]
    advantages = recorded["given"].get("advantages")
    return Result(
        recorded["loss"],
        _gradients()[case.name],
        None if advantages is None else torch.tensor(advantages, dtype=torch.float64),
        recorded.get("metrics", {}),
    )


def ours(case: Case, micro_batch: int = ROWS_PER_MICRO_BATCH, **changes: Any) -> Result:
    """Result of our objective.

    Args:
        micro_batch: rows per micro-batch.
        changes: settings that differ from those of the case, for a control.
    """
    spec = specs()[case.algorithm].model_validate({"name": case.algorithm, **case.settings, **changes})
    given = TRL["cases"][case.name]["given"]
    return _sampled(case, spec, given, micro_batch) if spec.samples else _offline(spec, given, micro_batch)


def difference(one: Result, other: Result) -> Difference:
    """Largest absolute difference of each part."""
    advantages = None
    if one.advantages is not None and other.advantages is not None:
        advantages = float((one.advantages - other.advantages).abs().max())
    return Difference(abs(one.loss - other.loss), float((one.gradient - other.gradient).abs().max()), advantages)


@cache
def _gradients() -> dict[str, Tensor]:
    return load_file(FIXTURES / "trl_1_16_0_gradients.safetensors")


@cache
def model(name: str) -> PolicyModel:
    """The model with the weights of this name."""
    causal_lm = OPTForCausalLM(config())
    fill(causal_lm, name)
    return PolicyModel(causal_lm)


@cache
def reward_model() -> RewardModel:
    """A reward model with one output and the weights of the policy."""
    classifier = OPTForSequenceClassification(config(num_labels=1))
    fill(classifier, "policy")
    return RewardModel(classifier)


def _offline(spec: AlgorithmSpec, given: Mapping[str, Any], micro_batch: int) -> Result:
    """Rows or pairs, in one update."""
    objective, policy = ALGORITHMS[spec.name], reward_model() if spec.ranks_completions else model("policy")
    reference = model("reference") if spec.reference else None
    policy.zero_grad()
    examples = _examples(spec, given)
    num_tokens, num_sequences, num_chosen_tokens = step_sums(examples, spec)
    measured = _measured(spec, given, micro_batch) if spec.mismatches else {}
    sums = StepSums(num_tokens, num_sequences, num_chosen_tokens=num_chosen_tokens, measured=measured)
    total = 0.0
    for part in _parts(len(examples), micro_batch):
        batch, sequences = make_batch([examples[index] for index in part], spec, PAD)
        output = score_batch(policy, reference, batch, sequences, spec)
        loss, _ = objective.loss(output, sequences, sums, spec)
        loss.backward()
        total += loss.item()
    return Result(total, flat_gradient(policy.pretrained))


def _examples(spec: AlgorithmSpec, given: Mapping[str, Any]) -> list[Example]:
    """Rows as the loop holds them. TRL stacks pairs, with the rejected completions after the chosen ones."""
    if spec.ranks_completions:  # for which TRL has no prompts
        whole = given["tokens"]
        given = {**given, "prompts": [one[:1] for one in whole], "completions": [one[1:] for one in whole]}
    prompts, completions = given["prompts"], given["completions"]
    if not spec.pairs:
        labels = given.get("desirable", [True] * len(prompts))
        rows = zip(prompts, completions, labels, strict=True)
        return [Example(prompt, (tokens,), desirable=label) for prompt, tokens, label in rows]
    count = len(prompts) // 2
    margins = given.get("margins", [0.0] * count)
    return [Example(prompts[i], (completions[i], completions[count + i]), margins[i]) for i in range(count)]


@torch.no_grad()
def _measured(spec: AlgorithmSpec, given: Mapping[str, Any], micro_batch: int) -> dict[str, float]:
    """Statistics of the whole batch, measured on the mismatched completions that TRL built."""
    others = {name.removeprefix("mismatched_"): value for name, value in given.items() if name.startswith("mismatched")}
    examples = _examples(spec, others)
    found: dict[str, float] = {}
    for part in _parts(len(examples), micro_batch):
        batch, sequences = make_batch([examples[index] for index in part], spec, PAD)
        output = score_batch(model("policy"), model("reference"), batch, sequences, spec)
        for name, value in ALGORITHMS[spec.name].measure(output, sequences, spec).items():
            found[name] = found.get(name, 0.0) + float(value)
    return found


def _sampled(case: Case, spec: AlgorithmSpec, given: Mapping[str, Any], micro_batch: int) -> Result:
    """Groups of completions in one update; if the case says so, the policy has moved since they were sampled."""
    objective, policy = ALGORITHMS[spec.name], model("policy")
    policy.zero_grad()
    batch = _sampled_batch(case, spec, given)
    rewards, mask = batch.rewards, batch.mask
    sums = StepSums(
        float(batch.trained.sum()),
        len(mask),
        float(rewards.sum()),
        float(rewards.square().sum()),
        MAX_NEW_TOKENS,
    )
    advantages = objective.advantages(batch, sums, spec).tokens
    if objective.whitens(spec) == "sequences":
        advantages = whitened_sequences(advantages, mask, moments(advantages[:, :1]))
    sampler = _rows(of_sampled(given["sampler_logprobs"], given), mask) if case.sampler else None
    flags = given.get("sampled", [()] * len(mask))
    total, totals = 0.0, Totals()
    for part in _parts(len(mask), micro_batch):
        prompts, completions = ([given[name][i] for i in part] for name in ("prompts", "completions"))
        sequences = collate(prompts, completions, PAD, learned=[flags[i] for i in part])
        loss, stats = objective.loss(
            scored(
                policy,
                model("reference") if spec.reference else None,
                sequences.input_ids,
                sequences.target_mask,
                TEMPERATURE,
                entropy_gradient=spec.entropy_in_loss,
            )[0],
            MicroBatch(
                sequences.place(batch.trained[part][mask[part]]),
                advantages=sequences.place(advantages[part][mask[part]]),
                old_logprobs=_placed(batch.logprobs if case.several_updates else None, part, mask, sequences),
                sampler_logprobs=_placed(sampler, part, mask, sequences),
            ),
            sums,
            spec,
        )
        loss.backward()
        totals.add(stats)
        total += loss.item()
    return Result(total, flat_gradient(policy.causal_lm), advantages[:, 0], _means(totals))


def _sampled_batch(case: Case, spec: AlgorithmSpec, given: Mapping[str, Any]) -> SampledBatch:
    """Completions of the step, with the log-probabilities of the sampling policy and of the reference."""
    prompts, completions = given["prompts"], given["completions"]
    sampled = given.get("sampled", [[True] * len(tokens) for tokens in completions])
    mask = torch.arange(MAX_NEW_TOKENS) < torch.tensor([sum(flags) for flags in sampled])[:, None]
    finished = torch.tensor([tokens[-1] == EOS for tokens in completions])
    batch = collate(prompts, completions, PAD, learned=sampled)
    found = {}
    for name in ("old" if case.several_updates else "policy", "reference"):
        with torch.no_grad():
            logprobs, _ = model(name)(batch.input_ids, target_mask=batch.target_mask, temperature=TEMPERATURE)
        found[name] = _rows(logprobs[batch.target_mask], mask)
    logprobs, ref_logprobs = found.values()
    return SampledBatch(
        torch.tensor(given["rewards"], dtype=torch.float64),
        mask,
        mask & finished[:, None] if spec.masks_truncated else mask,
        torch.tensor([len(tokens) for tokens in completions]),
        logprobs,
        ref_logprobs if spec.reference else None,
    )


def of_sampled(values: Sequence[Sequence[float]], given: Mapping[str, Any]) -> list[list[float]]:
    """Values of the sampled tokens of each completion."""
    flags = given.get("sampled", [[True] * len(row) for row in values])
    return [list(compress(row, own)) for row, own in zip(values, flags, strict=True)]


def _rows(values: Any, mask: Tensor) -> Tensor:
    """Concatenated values of the sampled tokens, completion by completion, as ``[B, T]`` float64."""
    flat = values.tolist() if isinstance(values, Tensor) else [value for row in values for value in row]
    rows = torch.zeros(mask.shape, dtype=torch.float64)
    rows[mask] = torch.tensor(flat, dtype=torch.float64)
    return rows


def _placed(rows: Tensor | None, part: list[int], mask: Tensor, sequences: SequenceBatch) -> Tensor | None:
    return None if rows is None else sequences.place(rows[part][mask[part]])


def _means(totals: Totals) -> dict[str, float]:
    found = {theirs: totals.read(name) for theirs, name in METRICS.items() if name in totals}
    return {name: total / count for name, (total, count) in found.items()}


def _parts(rows: int, micro_batch: int) -> Sequence[list[int]]:
    return [list(range(rows))[start : start + micro_batch] for start in range(0, rows, micro_batch)]
