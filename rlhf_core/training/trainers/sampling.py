"""Prompts of each step, their completions and rewards; completions are optionally sampled ahead of training.

With ``rollout.max_staleness = 1``, the engines sample for step ``n + 1`` with the weights from the beginning of step
``n``, while step ``n`` trains, and tools answer meanwhile, too. With a bound ``k`` above 1, the prompts of up to ``k``
further steps are in flight, and unfinished completions continue with the weights of every step. Completions in flight
are part of a checkpoint: a run that resumes from it trains on those that were finished.
"""

import contextlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.errors import EnginesLost, ToolFailed
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.reports import Phase
from rlhf_core.training.algorithms.grpo import zero_std_groups
from rlhf_core.training.algorithms.objective import SampledBatch
from rlhf_core.training.rewards.scoring import Scores
from rlhf_core.training.rollouts.base import PromptSource, Sampling
from rlhf_core.training.rollouts.seeds import sample_seed
from rlhf_core.training.trainers.context import Loop, TrainingContext
from rlhf_core.training.trainers.in_flight import InFlight, kept_completions, stored_completions
from rlhf_core.training.trainers.step import TrainingStep
from rlhf_core.training.trainers.updates import StepBatch
from rlhf_core.training.types import Completion, Row


@dataclass(frozen=True)
class Prompt:
    """A prompt to sample completions of."""

    row: Row
    token_ids: list[int]
    seeds: list[int]
    """One per completion."""


@dataclass(frozen=True)
class PromptBatch:
    """This rank's prompts of one round of sampling."""

    step: int
    prompts: list[Prompt]
    position: int
    """Position of the first of their rows, of all ranks, in the order of the data."""
    kept: Mapping[str, list[Completion]] = field(default_factory=dict)
    """Completions from before a restart, by uid of their prompt."""

    @property
    def missing(self) -> list[Prompt]:
        """The other prompts."""
        return [prompt for prompt in self.prompts if prompt.row.uid not in self.kept]

    def made(self, sampled: Mapping[int, list[Completion]]) -> dict[str, list[Completion]]:
        """Completions by uid of their prompt.

        Args:
            sampled: completions of missing prompts, by index.
        """
        found = dict(sampled)  # at once: another thread may add to them meanwhile
        missing = self.missing
        return {**self.kept, **{missing[index].row.uid: group for index, group in found.items()}}

    def completed(self, sampled: Sequence[list[Completion]]) -> list[list[Completion]]:
        """Completions of all prompts, in order.

        Args:
            sampled: those of the missing ones, in order.
        """
        made = self.made(dict(enumerate(sampled)))
        return [made[prompt.row.uid] for prompt in self.prompts]


@dataclass(frozen=True)
class Rollout:
    """This rank's completions of one step, ``P`` prompts with ``G`` samples each."""

    prompts: list[Prompt]
    completions: list[list[Completion]]
    rewards: Tensor
    """``[P, G]`` float64 rewards, summed over the reward functions."""
    scores: Scores
    """Rewards by function, P*G values each, and failures."""

    @property
    def flat(self) -> list[Completion]:
        """All completions, group after group."""
        return [completion for group in self.completions for completion in group]

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(len(completion.sampled_ids) for completion in self.flat)

    def take(self, groups: Sequence[int]) -> "Rollout":
        """Return a rollout of only some of the groups."""
        size = self.rewards.shape[1]
        flat = [group * size + index for group in groups for index in range(size)]
        return Rollout(
            [self.prompts[group] for group in groups],
            [self.completions[group] for group in groups],
            self.rewards[list(groups)],
            self.scores.take(flat),
        )

    def batch(self, places: Sequence[int], *, mask_truncated: bool) -> StepBatch:
        """Convert the completions to the form that the updates need.

        Args:
            places: index of each group among those of the whole step, over all ranks.
        """
        size = self.rewards.shape[1]
        lengths = torch.tensor([len(completion.token_ids) for completion in self.flat], dtype=torch.int64)
        sampled = torch.tensor([len(completion.sampled_ids) for completion in self.flat], dtype=torch.int64)
        mask = torch.arange(max(sampled.tolist(), default=0)) < sampled[:, None]
        finished = torch.tensor([completion.finished for completion in self.flat], dtype=torch.bool)
        trained = mask & finished[:, None] if mask_truncated else mask
        prompts = [prompt.token_ids for prompt in self.prompts for _ in range(size)]
        return StepBatch(
            [
                prompt if made.episode is None else made.episode.prompt_ids
                for prompt, made in zip(prompts, self.flat, strict=True)
            ],
            self.flat,
            [place * size + index for place in places for index in range(size)],
            SampledBatch(self.rewards, mask, trained, lengths),
        )


class StepSampler:
    """Rollouts of one loop, step by step."""

    def __init__(
        self,
        training: TrainingContext,
        loop: Loop,
        model: PreTrainedModel,
        saved: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        """Create a sampler for the remaining steps of ``loop``.

        Args:
            model: policy whose weights are sent to the engines.
            saved: completions in flight for the first of these steps, as returned by :meth:`in_flight` of each rank.
        """
        self._training = training
        self._loop = loop
        self._model = model
        self._max_staleness = training.spec.rollout.max_staleness
        self._ahead = training.rollouts.continuous if self._max_staleness else None
        self._spans_weights = training.spec.rollout.spans_weights
        self._begun: deque[tuple[PromptBatch, PromptSource]] = deque()
        """Prompts that are being sampled ahead, and the missing ones as the engines take them."""
        self._last_taken = 0
        self._saved = kept_completions(saved)

    def sample(self, step: TrainingStep) -> tuple["Rollout", list[int], list[int]]:
        """Sample and reward completions of this rank's prompts of the step. Collective.

        If the algorithm uses only groups with differing rewards, sampling repeats with the next prompts until there are
        enough groups for a step or the limit of rounds is reached (dynamic sampling, DAPO, arXiv 2503.14476, sec. 3.2).

        Returns:
            Everything sampled, the groups to train on, and the index of each of these among those of all ranks.
        """
        ranks, algorithm = self._training.ranks, self._loop.algorithm
        rounds: list[Rollout] = []
        flags: list[list[list[float]]] = []
        for number in range(algorithm.sampling_rounds):
            rounds.append(self._round(step, number))
            if algorithm.sampling_rounds == 1:
                own = len(rounds[0].prompts)
                return rounds[0], list(range(own)), list(range(ranks.rank * own, (ranks.rank + 1) * own))
            flags.append(ranks.gather_numbers((~zero_std_groups(rounds[-1].rewards)).double().tolist()))
            if sum(sum(map(sum, flags_of_round)) for flags_of_round in flags) >= algorithm.rows_per_step:
                break
        self._begin_until(step.number + self._max_staleness, step.number - 1)
        groups, places = select_groups(flags, algorithm.rows_per_step, ranks.rank)
        return _joined(rounds), groups, places

    # -----------------------------------------------------------------------------------------------------------------
    # In-flight completions

    @property
    def position(self) -> int:
        """Position in the data of the first row taken for a later step, or of the next one to be taken."""
        return self._begun[0][0].position if self._begun else self._training.position

    def in_flight(self, is_last: bool) -> list[dict[str, Any]]:
        """This rank's completions for later steps, for a checkpoint.

        If the engines are lost, or a tool fails, these are the completions so far: the next step fails, after the
        checkpoint.

        Args:
            is_last: the process ends after this checkpoint, so unfinished completions are not waited for. Otherwise
                they are, unless they span weights.
        """
        if self._ahead is None:
            return []
        if is_last:
            self._ahead.stop()
        elif not self._spans_weights:
            self._training.beat(Phase.ROLLOUT)
            with contextlib.suppress(EnginesLost, ToolFailed):
                self._ahead.wait(self._training.beating(Phase.ROLLOUT))
        return [
            stored_completions(batch.step, InFlight(batch.position, batch.made(source.made)))
            for batch, source in self._begun
        ]

    def _begin_until(self, last: int, version: int) -> None:
        """Have the engines sample for the next steps up to step ``last``, beginning with the current weights."""
        if self._ahead is None:
            return
        for number in range(max(self._last_taken, version) + 1, min(last, self._loop.last_step) + 1):
            batch = self._next_prompts(number, 0)
            source = self._training.evaluator.source(*_parts(batch.missing), self._sampling())
            self._ahead.begin(source, version)
            self._begun.append((batch, source))

    # -----------------------------------------------------------------------------------------------------------------
    # One round

    def _round(self, step: TrainingStep, number: int) -> "Rollout":
        """Sample and reward completions of the next prompts; ``number`` counts the rounds of the step from 0."""
        training = self._training
        if number == 0:
            request, completions = self._first_completions(step)
        else:
            with step.timed("rollout"):
                request = self._next_prompts(step.number, number)
                completions = self._complete(request)
        if self._loop.algorithm.sampling_rounds == 1:
            self._begin_until(step.number + self._max_staleness, step.number - 1)
        num_samples = self._loop.algorithm.group
        with step.timed("reward"):
            row_of_each = [prompt.row for prompt in request.prompts for _ in range(num_samples)]
            made = [completion for group in completions for completion in group]
            scores = training.scorer.score(row_of_each, made, step.number, training.beating(Phase.REWARD), number)
            training.warn(FailureKind.REWARD_FUNCTION, scores.warnings)
        rewards = torch.tensor(scores.total, dtype=torch.float64).view(len(request.prompts), num_samples)
        return Rollout(request.prompts, completions, rewards, scores)

    def _first_completions(self, step: TrainingStep) -> tuple[PromptBatch, list[list[Completion]]]:
        """The prompts of a step and their completions: begun in the previous step, or sampled now."""
        training, version = self._training, step.number - 1
        beat = training.beating(Phase.ROLLOUT)
        if self._ahead is not None and not self._spans_weights:
            with step.timed("rollout"):
                training.beat(Phase.ROLLOUT)
                self._ahead.wait(beat)
        with step.timed("weight_sync"):
            training.beat(Phase.WEIGHT_SYNC)
            training.rollouts.load(self._model, version, training.beating(Phase.WEIGHT_SYNC))
        with step.timed("rollout"):
            training.beat(Phase.ROLLOUT)
            if self._spans_weights:
                # With further rounds, the rows of the last step come after theirs: a resumed run goes on after it.
                has_rounds = self._loop.algorithm.sampling_rounds > 1
                self._begin_until(step.number + self._max_staleness - has_rounds, version)
            if self._begun and self._ahead is not None:
                self._ahead.collect(beat)
                request, source = self._begun.popleft()
                completions = request.completed(source.results())
                self._warn()
                return request, completions
            request = self._next_prompts(step.number, 0)
            return request, self._complete(request)

    def _next_prompts(self, step: int, number: int) -> PromptBatch:
        num_samples = self._loop.algorithm.group
        if number == 0:
            self._last_taken = step
            if step in self._saved:  # in between, rows may have been taken for further rounds of an earlier step
                self._training.position = self._saved[step].position
        position = self._training.position
        rows, token_ids_of_rows = self._training.take_rows(self._loop.algorithm.rows_per_step)
        # A prompt that recurs in a later round of the step gets different samples.
        indices = range(number * num_samples, (number + 1) * num_samples)
        prompts = []
        for row, token_ids in zip(rows, token_ids_of_rows, strict=True):
            seeds = [sample_seed(self._training.spec.seed, step, row.uid, index) for index in indices]
            prompts.append(Prompt(row, token_ids, seeds))
        return PromptBatch(step, prompts, position, self._kept(step, prompts))

    def _kept(self, step: int, prompts: Sequence[Prompt]) -> dict[str, list[Completion]]:
        """Completions of a step that are left from before a restart, by uid of their prompt, as far as they are usable:
        as many as needed, and none from weights older than the bound."""
        saved = self._saved.pop(step, None)
        if saved is None:
            return {}
        oldest = step - 1 - self._max_staleness
        kept = {
            prompt.row.uid: group
            for prompt in prompts
            if len(group := saved.made.get(prompt.row.uid, [])) == len(prompt.seeds)
            and all(made.weight_version >= oldest for made in group)
        }
        self._training.ranks.log(
            f"{len(kept)} of {len(prompts)} prompts of step {step} were completed before the restart"
        )
        return kept

    def _complete(self, request: PromptBatch) -> list[list[Completion]]:
        """Sample with the current weights for the missing prompts. Collective."""
        beat, evaluator = self._training.beating(Phase.ROLLOUT), self._training.evaluator
        sampled = evaluator.sample(*_parts(request.missing), self._sampling(), request.step - 1, beat)
        self._warn()
        return request.completed(sampled)

    def _warn(self) -> None:
        """Report tools and environments that were lost."""
        if self._training.evaluator.conversations is not None:
            warnings = self._training.evaluator.conversations.take_warnings()
            self._training.warn(FailureKind.REWARD_FUNCTION, warnings)

    def _sampling(self) -> Sampling:
        rollout = self._training.spec.rollout
        return Sampling(
            rollout.max_new_tokens,
            rollout.temperature,
            rollout.batch_size,
            self._training.end_ids,
            stop=rollout.stop_strings,
        )


def _parts(prompts: Sequence[Prompt]) -> tuple[list[Row], list[list[int]], list[list[int]]]:
    """Rows, tokens and seeds of prompts."""
    return (
        [prompt.row for prompt in prompts],
        [prompt.token_ids for prompt in prompts],
        [prompt.seeds for prompt in prompts],
    )


def select_groups(flags: Sequence[Sequence[Sequence[float]]], wanted: int, rank: int) -> tuple[list[int], list[int]]:
    """Select the groups of a step: the first ones with differing rewards, topped up with others if there are too few.

    The choice follows the order in which prompts were taken, so it is the same on any number of ranks. Ranks may end up
    with different numbers of groups.

    Args:
        flags: 1 for each group with different rewards, by round, rank and group.
        wanted: number of groups in the step, over all ranks.

    Returns:
        This rank's groups, counted over its rounds, and their positions among all selected groups.
    """
    found = [
        (number, owner, index, flag)
        for number, flags_of_round in enumerate(flags)
        for owner, own in enumerate(flags_of_round)
        for index, flag in enumerate(own)
    ]
    preferred = sorted(range(len(found)), key=lambda place: (not found[place][3], place))
    chosen = [found[place] for place in sorted(preferred[:wanted])]
    mine = [
        (number * len(flags[0][rank]) + index, place)
        for place, (number, owner, index, _) in enumerate(chosen)
        if owner == rank
    ]
    return [group for group, _ in mine], [place for _, place in mine]


def _joined(rounds: Sequence[Rollout]) -> Rollout:
    """Concatenate the rounds of a step."""
    return Rollout(
        [prompt for one in rounds for prompt in one.prompts],
        [group for one in rounds for group in one.completions],
        torch.cat([one.rewards for one in rounds]),
        Scores.joined([one.scores for one in rounds]),
    )
