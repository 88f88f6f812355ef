"""Conversion of rows to training sequences, and their scoring; shared by training and evaluation."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_core.schemas.algorithms.base import AlgorithmSpec
from rlhf_core.schemas.trainers import NativeTrainer
from rlhf_core.training.algorithms import ALGORITHMS
from rlhf_core.training.algorithms.objective import MicroBatch, PolicyOutput, StepSums
from rlhf_core.training.data.batches import SequenceBatch, collate
from rlhf_core.training.data.loading import completion_tokens, learned_tokens
from rlhf_core.training.data.micro_batches import evened, micro_batches
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.types import Row

Scorer = Callable[..., Any]
"""A policy, a reference or a reward model, or the engine around one."""


@dataclass(frozen=True)
class Example:
    """The sequences of one row that an algorithm trains on."""

    prompt: list[int]
    """Tokens of the prompt."""
    completions: tuple[list[int], ...]
    """Tokens of one completion, or of the chosen and the rejected one of a pair."""
    margin: float = 0.0
    """Margin by which the chosen completion is better."""
    desirable: bool = True
    """Label of the completion, for an algorithm with labelled rows."""
    learned: tuple[bool, ...] = ()
    """True for each token of the only completion that is learned; empty if all tokens of the completions are."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the completions that are learned."""
        return sum(self.learned) if self.learned else sum(map(len, self.completions))

    @property
    def length(self) -> int:
        """Number of tokens of the longest sequence, prompt included."""
        return len(self.prompt) + max(map(len, self.completions))


def make_examples(
    rows: Sequence[Row], prompts: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase, algorithm: AlgorithmSpec
) -> list[Example]:
    """Make examples from rows whose texts are ready.

    Args:
        prompts: tokens of the prompt of each row.
    """
    examples = []
    for row, prompt in zip(rows, prompts, strict=True):
        if algorithm.pairs:
            pair = tuple(completion_tokens(text, row, tokenizer) for text in (row.chosen, row.rejected))
            examples.append(Example(list(prompt), pair, row.margin, row.desirable))
        else:
            target, learned = learned_tokens(row.target, row, tokenizer)
            examples.append(Example(list(prompt), (target,), row.margin, row.desirable, learned))
    return examples


def make_batch(
    examples: Sequence[Example], algorithm: AlgorithmSpec, pad_id: int, device: torch.device | str = "cpu"
) -> tuple[SequenceBatch, MicroBatch]:
    """Pad the sequences of a micro-batch: the chosen completions of all pairs, then the rejected ones."""
    num_completions = len(examples[0].completions)
    batch = collate(
        [example.prompt for _ in range(num_completions) for example in examples],
        [example.completions[at] for at in range(num_completions) for example in examples],
        pad_id,
        device,
        [example.learned for _ in range(num_completions) for example in examples],
    )
    prompt_mask = None
    if algorithm.scores_prompt:
        prompt_mask = batch.prompt_mask.clone()
        prompt_mask[len(examples) :] = False  # the rejected completions have the same prompts
    margins = torch.tensor([example.margin for example in examples], device=device) if algorithm.pairs else None
    desirable = torch.tensor([example.desirable for example in examples], device=device) if algorithm.labelled else None
    return batch, MicroBatch(batch.target_mask, prompt_mask=prompt_mask, desirable=desirable, margins=margins)


def divide_examples(examples: Sequence[Example], trainer: NativeTrainer, *, packed: bool) -> list[list[int]]:
    """Divide a rank's examples into micro-batches with little padding; the completions of a pair stay together.

    Args:
        packed: the model packs its sequences.

    Returns:
        The indices of the examples of each micro-batch.
    """
    each = max((len(example.completions) for example in examples), default=1)
    max_tokens = max(1, trainer.micro_batch_tokens // each) if trainer.micro_batch_tokens else 0
    lengths = [example.length for example in examples]
    return micro_batches(lengths, max(1, trainer.micro_batch_size // each), max_tokens, packed=packed)


def mismatched(examples: Sequence[Example], before: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    """Pair the prompts of examples with the completions of other rows.

    Args:
        before: the row that precedes each example in the order of the step over all ranks.
    """
    others = [learned_tokens(row.target, row, tokenizer) for row in before]
    return [
        replace(example, completions=(target,), learned=learned)
        for example, (target, learned) in zip(examples, others, strict=True)
    ]


def step_sums(examples: Sequence[Example], algorithm: AlgorithmSpec) -> list[float]:
    """Figures of ``StepSums`` that add up over ranks: tokens, sequences, and tokens of the chosen completions."""
    chosen = sum(len(example.completions[0]) for example in examples)
    if algorithm.scores_prompt:
        chosen += sum(len(example.prompt) - 1 for example in examples)
    sequences = sum(len(example.completions) for example in examples)
    return [sum(example.num_tokens for example in examples), sequences, chosen]


def score_batch(
    policy: Scorer, reference: Scorer | None, batch: SequenceBatch, sequences: MicroBatch, algorithm: AlgorithmSpec
) -> PolicyOutput:
    """Run the forward passes for one micro-batch.

    Args:
        policy: returns log-probabilities ``[B, T]`` and entropies; a reward model returns rewards ``[B]``.
        reference: likewise, for an algorithm that has one; its pass has no gradient.
    """
    if algorithm.ranks_completions:
        scores = policy(batch.input_ids)
        return PolicyOutput(scores.new_empty(0), scores=scores)
    mask = sequences.mask if sequences.prompt_mask is None else sequences.mask | sequences.prompt_mask
    return scored(policy, reference, batch.input_ids, mask)[0]


def scored(
    policy: Scorer,
    reference: Scorer | None,
    input_ids: Tensor,
    target_mask: Tensor,
    temperature: float = 1.0,
    *,
    entropy_gradient: bool = False,
) -> tuple[PolicyOutput, Tensor]:
    """Log-probabilities of policy and reference, and entropy of the policy, ``[B, T]``; see ``PolicyModel.forward``."""
    inputs = {"target_mask": target_mask, "temperature": temperature}
    # The reference goes first: it may be the policy without its adapter, whose pass must end before the next begins.
    ref_logprobs: Tensor | None = None
    if reference is not None:
        with torch.no_grad():
            ref_logprobs, _ = reference(input_ids, **inputs)
    logprobs, entropy = policy(input_ids, **inputs, entropy_gradient=entropy_gradient)
    return PolicyOutput(logprobs, ref_logprobs, entropy=entropy if entropy_gradient else None), entropy


class RowPasses:
    """Passes of all ranks over the examples of one step or of one evaluation.

    Every rank makes as many as the rank with the most, whatever its share of the rows: if the weights are split over
    the ranks, each pass is a collective.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        before: Sequence[Row],
        tokenizer: PreTrainedTokenizerBase,
        ranks: Ranks,
        trainer: NativeTrainer,
        algorithm: AlgorithmSpec,
        *,
        packed: bool,
    ) -> None:
        """Divide this rank's examples into micro-batches. Collective.

        Args:
            before: see :func:`mismatched`; none unless the algorithm scores mismatched completions.
            packed: the model packs its sequences.
        """
        self._ranks, self._algorithm, self._pad_id = ranks, algorithm, tokenizer.pad_token_id
        self._examples, self._others = examples, mismatched(examples, before, tokenizer) if before else []
        cuts = [divide_examples(part, trainer, packed=packed) for part in (examples, self._others)]
        own = [*step_sums(examples, algorithm), *map(len, cuts)]
        tokens, sequences, chosen, *numbers = zip(*ranks.numbers_of_replicas(own), strict=True)
        self._parts, self._other_parts = (
            evened(cut, int(max(found))) for cut, found in zip(cuts, numbers, strict=True)
        )
        self._sums = StepSums(sum(tokens), sum(sequences), num_chosen_tokens=sum(chosen))

    @torch.no_grad()
    def sums(self, policy: Scorer, reference: Scorer | None, beat: Callable[[], None]) -> StepSums:
        """Sums over all ranks, with those that the loss needs before its first backward pass. Collective.

        Args: as for :meth:`run`.
        """
        if not self._algorithm.mismatches:
            return self._sums
        found: dict[str, float] = {}
        for part, batch, output in self._run(self._others, self._other_parts, policy, reference, beat):
            for name, value in ALGORITHMS[self._algorithm.name].measure(output, batch, self._algorithm).items():
                found[name] = found.get(name, 0.0) + float(value) * bool(part)
        totals = self._ranks.sum_over_replicas(list(found.values()))
        return replace(self._sums, measured=dict(zip(found, totals, strict=True)))

    def run(
        self, policy: Scorer, reference: Scorer | None, beat: Callable[[], None]
    ) -> Iterator[tuple[list[int], MicroBatch, PolicyOutput]]:
        """Yield the indices of the examples of each pass, its sequences, and its outputs.

        A pass without examples is over padding, and its outputs have to be dropped.

        Args:
            policy: the model or the engine around it.
            reference: reference of the loop, if the algorithm has one.
            beat: called before every pass.
        """
        return self._run(self._examples, self._parts, policy, reference, beat)

    def _run(
        self,
        examples: Sequence[Example],
        parts: Sequence[list[int]],
        policy: Scorer,
        reference: Scorer | None,
        beat: Callable[[], None],
    ) -> Iterator[tuple[list[int], MicroBatch, PolicyOutput]]:
        padding = Example([self._pad_id], ([self._pad_id],) * (2 if self._algorithm.pairs else 1))
        for part in parts:
            beat()
            chosen = [examples[index] for index in part] or [padding]
            batch, sequences = make_batch(chosen, self._algorithm, self._pad_id, self._ranks.device)
            yield part, sequences, score_batch(policy, reference, batch, sequences, self._algorithm)
