"""Updates of the weights from the completions of one step.

Only necessary model passes run: old log-probabilities are computed only for completions used after the first update, so
never when strictly on-policy, and those of a reference only if there is one. All ranks go through the same collectives,
whatever they sampled: each update has as many micro-batches on every rank as on the rank with the most, padded with
empty ones.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import torch
from torch import Tensor

from rlhf_core.schemas.reports import Phase
from rlhf_core.training.algorithms import ALGORITHMS
from rlhf_core.training.algorithms.advantages import moments, whitened_sequences, whitened_tokens
from rlhf_core.training.algorithms.aggregation import masked_stat
from rlhf_core.training.algorithms.objective import Advantages, MicroBatch, PolicyOutput, SampledBatch, StepSums
from rlhf_core.training.data.batches import SequenceBatch, collate
from rlhf_core.training.data.examples import Scorer, scored
from rlhf_core.training.data.micro_batches import evened, micro_batches
from rlhf_core.training.models.causal_lm import PolicyModel
from rlhf_core.training.trainers.context import Loop, TrainingContext
from rlhf_core.training.trainers.engine import Engine
from rlhf_core.training.trainers.ppo import Critic, explained_variance
from rlhf_core.training.trainers.step import Totals, TrainingStep
from rlhf_core.training.types import Completion

_SCORED, _ALL = -2, -1
"""Positions, after those of the updates, of the completions scored beforehand and of all completions."""


@dataclass(frozen=True)
class StepBatch:
    """The ``B`` completions that a step trains on: one rank's, or those of all ranks that share rows with it."""

    prompts: Sequence[Sequence[int]]
    """Prompt tokens of each completion."""
    completions: Sequence[Completion]
    places: Sequence[int]
    """Index of each completion among those of the whole step, over all ranks."""
    sampled: SampledBatch


class PolicyUpdates:
    """All updates of one step on one rank."""

    def __init__(
        self,
        training: TrainingContext,
        loop: Loop,
        engine: Engine,
        policy: PolicyModel,
        reference: Scorer | None,
        batch: StepBatch,
        step: TrainingStep,
        critic: Critic | None = None,
    ) -> None:
        """Distribute the completions over the updates.

        Args:
            reference: the reference model of the loop, if the algorithm needs one.
            critic: the value model, if the algorithm needs it.
        """
        self.totals = Totals()
        self.num_tokens = 0
        """Number of tokens that a pass trains on, over all ranks; set once the pass has run."""
        self._training, self._loop, self._step = training, loop, step
        self._engine, self._policy, self._reference, self._critic = engine, policy, reference, critic
        self._objective, self._algorithm = ALGORITHMS[loop.algorithm.name], loop.algorithm
        self._batch = batch
        num_passes, num_parts = self._algorithm.passes
        self._updates = [
            part
            for number in range(num_passes)
            for part in divide(batch.places, num_parts, training.spec.seed, step.number, number)
        ]
        self._scored = self._needed_before()
        self._kept: dict[str, Tensor] = {}

    def make(self) -> Advantages:
        """Make all updates of the step.

        Returns:
            The advantages of the completions of this rank.
        """
        counts, sums = self._exchange()
        self.num_tokens = int(sums[_ALL].num_tokens)
        self._score(counts[_SCORED], counts[_ALL])
        advantages = self._advantages(sums[_ALL])
        if self._critic is not None and self._critic.learns_alone(self._step.number):
            self._measure(counts[_ALL], sums[_ALL], advantages)
        else:
            for number, group in enumerate(self._updates):
                self._accumulate(number, counts[number], sums[number], advantages)
                own_tokens = int(self._batch.sampled.trained[_index(group)].sum())
                self._training.apply(self._step, self._loop, self._engine, own_tokens)
        if self._critic is not None:
            self._update_critic(self._critic, counts, sums, advantages)
        self._training.measure_updates(self._step, self._engine)
        return advantages

    def _needed_before(self) -> list[int]:
        """Completions whose log-probabilities are needed before an update has changed the policy."""
        everything = range(len(self._batch.completions))
        if self._algorithm.scores_first:
            return list(everything)
        # The first update computes the log-probabilities of its own completions itself.
        first = set(self._updates[0])
        return [index for index in everything if index not in first]

    def _exchange(self) -> tuple[list[int], list[StepSums]]:
        """Exchange the figures that ranks need from each other, in one collective.

        Returns:
            The largest number of micro-batches on any rank, and sums over the ranks: for each update, for the
            completions to be scored, and for all.
        """
        trained, longest = self._batch.sampled.trained, self._training.spec.rollout.max_new_tokens
        rewards = self._objective.shaped(self._batch.sampled, longest, self._algorithm)
        groups = [*self._updates, self._scored, range(len(trained))]
        own = [float(rewards.sum()), float(rewards.square().sum())]
        for group in groups:
            own += [float(trained[_index(group)].sum()), len(group), len(self._micro_batches(group))]
        columns = list(zip(*self._training.ranks.numbers_of_replicas(own), strict=True))
        total, squares = sum(columns[0]), sum(columns[1])
        sums = [
            StepSums(sum(tokens), sum(sequences), total, squares, longest)
            for tokens, sequences in zip(columns[2::3], columns[3::3], strict=True)
        ]
        return [int(max(column)) for column in columns[4::3]], sums

    def _score(self, num_scored: int, num_all: int) -> None:
        """Run the passes without gradient that are needed before the first update."""
        for part in self._padded(self._scored, num_scored):
            with torch.no_grad():
                sequences, output, _ = self._forward(part, self._reference)
            self._keep(part, sequences, logprobs=output.logprobs, ref_logprobs=output.ref_logprobs)
        if self._critic is not None:
            for part in self._padded(range(len(self._batch.completions)), num_all):
                sequences = self._collated(part)
                self._keep(part, sequences, values=self._critic.values(sequences))

    def _advantages(self, sums: StepSums) -> Advantages:
        """Compute this rank's advantages, whitened over all ranks if the algorithm does so."""
        sampled = dataclasses.replace(self._batch.sampled, **self._kept)
        advantages = self._objective.advantages(sampled, sums, self._algorithm)
        unit = self._objective.whitens(self._algorithm)
        if unit == "no" and advantages.returns is None:
            return advantages
        own = moments(advantages.tokens[:, :1] if unit == "sequences" else advantages.tokens[sampled.trained])
        if advantages.returns is not None and sampled.values is not None:
            returns = advantages.returns[sampled.trained]
            own += moments(returns) + moments(returns - sampled.values[sampled.trained])
        found = self._training.ranks.sum_over_replicas(own)
        if advantages.returns is not None:
            self._step.metrics.shared("value/explained_variance", explained_variance(found[3:]))
        if unit == "no":
            return advantages
        whiten = whitened_sequences if unit == "sequences" else whitened_tokens
        return dataclasses.replace(advantages, tokens=whiten(advantages.tokens, sampled.mask, found[:3]))

    def _accumulate(self, number: int, count: int, sums: StepSums, advantages: Advantages) -> None:
        """Run forward and backward over this rank's share of one update; the gradients accumulate in the engine."""
        # The same on every rank, whatever it sampled: a pass of the reference may be a collective.
        is_known = number > 0 or self._algorithm.scores_first
        for part in self._padded(self._updates[number], count):
            sequences, output, entropy = self._forward(part, None if is_known else self._reference)
            if is_known:
                output = dataclasses.replace(output, ref_logprobs=self._placed("ref_logprobs", part, sequences))
            elif len(self._updates) > 1:
                self._keep(part, sequences, logprobs=output.logprobs, ref_logprobs=output.ref_logprobs)
            old = self._placed("logprobs", part, sequences) if is_known else None
            self._engine.backward(self._loss(part, sequences, output, old, entropy, sums, advantages))

    def _measure(self, count: int, sums: StepSums, advantages: Advantages) -> None:
        """Collect the statistics of a step that leaves the policy unchanged."""
        for part in self._padded(range(len(self._batch.completions)), count):
            with torch.no_grad():
                sequences, output, entropy = self._forward(part, self._reference)
            self._loss(part, sequences, output, None, entropy, sums, advantages)
        self._step.metrics.shared("train/learning_rate", 0.0)

    def _update_critic(self, critic: Critic, counts: list[int], sums: list[StepSums], advantages: Advantages) -> None:
        norms = []
        for number, group in enumerate(self._updates):
            for part in self._padded(group, counts[number]):
                sequences = self._collated(part)
                batch = self._micro_batch(part, sequences, advantages)
                self.totals.add(critic.backward(sequences, batch, sums[number]))
            norms.append(critic.step(self._step.number))
        self._step.metrics.shared("value/grad_norm", sum(norms) / len(norms))
        # If the policy stays unchanged, the gradient norms of the step are those of the value model.
        self._step.grad_norms = self._step.grad_norms or norms

    def _loss(
        self,
        part: Sequence[int],
        sequences: SequenceBatch,
        output: PolicyOutput,
        old_logprobs: Tensor | None,
        entropy: Tensor,
        sums: StepSums,
        advantages: Advantages,
    ) -> Tensor:
        """Compute the loss of one micro-batch and add its statistics to the totals."""
        batch = self._micro_batch(part, sequences, advantages, old_logprobs)
        assert batch.sampler_logprobs is not None
        loss, stats = self._objective.loss(output, batch, sums, self._algorithm)
        before = output.logprobs.detach() if old_logprobs is None else old_logprobs
        self.totals.add(stats)
        self.totals.add(
            {
                "entropy": masked_stat(entropy, sequences.target_mask),
                "train_gap": masked_stat((before - batch.sampler_logprobs).abs(), sequences.target_mask),
            }
        )
        return loss

    def _micro_batch(
        self,
        part: Sequence[int],
        sequences: SequenceBatch,
        advantages: Advantages,
        old_logprobs: Tensor | None = None,
    ) -> MicroBatch:
        where = _index(part)
        mask = self._batch.sampled.mask[where]
        sampler = [value for index in part for value in self._batch.completions[index].logprobs]
        return MicroBatch(
            sequences.place(self._batch.sampled.trained[where][mask]),
            advantages=sequences.place(advantages.tokens[where][mask]),
            returns=None if advantages.returns is None else sequences.place(advantages.returns[where][mask]),
            old_logprobs=old_logprobs,
            old_values=self._placed("values", part, sequences),
            sampler_logprobs=sequences.place(torch.tensor(sampler)),
        )

    def _collated(self, part: Sequence[int]) -> SequenceBatch:
        """Prompts and completions on this rank's device, of which only sampled tokens are predicted, after a heartbeat;
        a padding token with an empty completion for an empty micro-batch."""
        training = self._training
        training.beat(Phase.TRAIN)
        pad_id, completions = training.tokenizer.pad_token_id, [self._batch.completions[index] for index in part]
        return collate(
            [self._batch.prompts[index] for index in part] or [[pad_id]],
            [made.token_ids for made in completions] or [[]],
            pad_id,
            training.ranks.device,
            [made.sampled for made in completions],
        )

    def _forward(self, part: Sequence[int], reference: Scorer | None) -> tuple[SequenceBatch, PolicyOutput, Tensor]:
        """Run the forward passes of one micro-batch, at the temperature of sampling; also returns the entropy of the
        policy."""
        batch, temperature = self._collated(part), self._training.spec.rollout.temperature
        output, entropy = scored(
            self._engine,
            reference,
            batch.input_ids,
            batch.target_mask,
            temperature,
            entropy_gradient=self._algorithm.entropy_in_loss,
        )
        return batch, output, entropy

    def _keep(self, part: Sequence[int], sequences: SequenceBatch, **found: Tensor | None) -> None:
        """Keep the results of a pass for later, under their name in :class:`SampledBatch`."""
        where, mask = _index(part), self._batch.sampled.mask
        for name, values in found.items():
            if values is None:
                continue
            kept = self._kept.setdefault(name, torch.zeros(mask.shape, dtype=values.dtype))
            rows = kept[where]
            rows[mask[where]] = values.detach()[sequences.target_mask].cpu()
            kept[where] = rows

    def _placed(self, name: str, part: Sequence[int], sequences: SequenceBatch) -> Tensor | None:
        """Kept values of a name, laid out as a micro-batch."""
        kept = self._kept.get(name)
        where = _index(part)
        return None if kept is None else sequences.place(kept[where][self._batch.sampled.mask[where]])

    def _micro_batches(self, group: Sequence[int]) -> list[list[int]]:
        lengths = [len(self._batch.prompts[index]) + len(self._batch.completions[index].token_ids) for index in group]
        trainer = self._training.spec.native_trainer
        cut = micro_batches(lengths, trainer.micro_batch_size, trainer.micro_batch_tokens, packed=self._policy.packs)
        return [[group[index] for index in part] for part in cut]

    def _padded(self, group: Sequence[int], count: int) -> list[list[int]]:
        """Micro-batches of a group, padded with empty ones to the largest number on any rank."""
        return evened(self._micro_batches(group), count)


def _index(part: Sequence[int]) -> Tensor:
    return torch.tensor(list(part), dtype=torch.int64)


def divide(places: Sequence[int], num_minibatches: int, *words: object) -> list[list[int]]:
    """Divide a rank's completions into the minibatches of one pass, as lists of indices.

    Consecutive completions go to different minibatches, in an order redrawn for each round: every minibatch holds
    equally many completions of each group, and the division does not depend on which rank has which completion.

    Args:
        places: index of each of the rank's completions among those of the whole step, over all ranks.
        num_minibatches: minibatches per pass.
        words: seed of the run, step and pass, which determine the order.

    Returns:
        One list per minibatch; some are empty if the rank has fewer completions than minibatches.
    """
    parts: list[list[int]] = [[] for _ in range(num_minibatches)]
    for index, place in enumerate(places):
        turn, within = divmod(place, num_minibatches)
        parts[_order(num_minibatches, *words, turn)[within]].append(index)
    return parts


@lru_cache(maxsize=8)
def _order(num_minibatches: int, *words: object) -> list[int]:
    """Permutation of the minibatches that depends only on ``words``, on every machine and Python version."""
    text = "|".join(map(str, words))
    keys = [blake2b(f"{text}|{part}".encode(), digest_size=8).digest() for part in range(num_minibatches)]
    return sorted(range(num_minibatches), key=keys.__getitem__)
