"""A trainer rank's view of the rollout engines, which form their own group (``rollout.engines``).

Rank 0 sends the weights of every version to all live engines, alone or together with other ranks that send a share
each; every rank sends its own prompts to all engines. When an engine fails, its prompts go to the others, its agent
restarts it, and it serves again once rank 0 has sent it the weights.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from transformers import PreTrainedModel

from rlhf_core.errors import EnginesLost
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.rollouts.base import PromptSource, Sampling, WeightTransfer, require_version
from rlhf_core.training.rollouts.prompts import PromptList
from rlhf_core.training.rollouts.remote.background import ContinuousRollouts
from rlhf_core.training.rollouts.remote.client import EngineClient
from rlhf_core.training.rollouts.remote.dispatch import Dispatcher
from rlhf_core.training.rollouts.remote.registry import EngineRegistry
from rlhf_core.training.rollouts.remote.rollout import RemoteRollout, check_interval_s
from rlhf_core.training.rollouts.remote.weights import EngineWeights
from rlhf_core.training.types import Completion, WorkerContext

MAX_RESTARTS = 3
"""Number of times that all engines may be restarted in one rollout of weights that are split."""
COUNTS = ("rollout/moved_prompts", "rollout/refused_completions")
"""Metrics of this rank's rollouts."""


class RemoteEngines:
    """All engines of the group behind the interface of a single one; see ``base.RolloutEngine``."""

    def __init__(self, context: WorkerContext, ranks: Ranks) -> None:
        """Connect the ranks that send weights. Collective."""
        self._spec = context.spec.rollout
        self._ranks = ranks
        self._registry = EngineRegistry(context)
        self._weights = EngineWeights(context, ranks, self._registry)
        self._num_rollouts = 0
        self._counts = dict.fromkeys(COUNTS, 0.0)
        self.continuous = ContinuousRollouts(self._dispatcher, self._begun_rollout, self._complete, self._finish)

    @property
    def version(self) -> int | None:
        """Version that the engines have; None before the first, and after one that failed."""
        return self._weights.version

    def load(self, model: PreTrainedModel, version: int, beat: Callable[[], None]) -> WeightTransfer | None:
        """Load a version into all live engines. Collective.

        Returns:
            The transfer by rank 0; None on other ranks, and if the version is already current.

        Raises:
            EnginesLost: there is no engine, and none started in time.
            StaleWeights: with these weights, every engine's outputs differ from the trainer's.
        """
        if self.version == version:
            return None
        with self._other_weights(beat):
            return self._weights.load(model, version, beat)

    @contextlib.contextmanager
    def _other_weights(self, beat: Callable[[], None]) -> Iterator[None]:
        """Prepare rollouts in progress for weights that are sent in the block. Collective.

        Those that span weights expect others, and go on. Others are waited for. On all ranks: engines with the next
        version would be given up by a rank that does not expect it, or would refuse its prompts.
        """
        beat()  # its phase tells the agent that silence from here on may be a wait for engines
        spans_weights = self._spec.spans_weights
        if self.continuous.is_begun:
            if spans_weights:
                self.continuous.begin_change()
            else:
                self.continuous.wait(beat)
            self._ranks.barrier()
        yield
        if spans_weights:
            self.continuous.end_change(self._weights.id)

    # -----------------------------------------------------------------------------------------------------------------
    # Sampling

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[Sequence[int]],
        sampling: Sampling,
        version: int,
        beat: Callable[[], None],
    ) -> list[list[Completion]]:
        """Sample completions; see :class:`rlhf_core.training.rollouts.base.RolloutEngine`.

        Raises:
            EnginesLost: no engine serves requests, and none recovered in time.
        """
        source = PromptList(prompts, seeds, sampling)
        self.continuous.sample(source, version, beat)
        return source.results()

    def _dispatcher(self, source: PromptSource, version: int) -> Dispatcher:
        require_version(self.version, version)
        return Dispatcher(source, rank=self._ranks.rank)

    def _run(self, dispatcher: Dispatcher, beat: Callable[[], None]) -> None:
        """Sample the unanswered prompts with the current weights, which the model still holds."""
        self._num_rollouts += 1
        if self._weights.is_split:
            rollout = self._rollout(dispatcher, beat)
        else:
            restore = partial(self._weights.restore, beat) if self._ranks.is_first else None
            rollout = self._rollout(dispatcher, beat, restore, are_restored=True, may_leave=self._exit_barrier())
        asyncio.run(rollout.run())

    def _rollout(
        self,
        dispatcher: Dispatcher,
        beat: Callable[[], None],
        restore: Callable[[EngineClient], None] | None = None,
        *,
        are_restored: bool = False,
        may_leave: Callable[[], bool] = lambda: True,
        spans_weights: bool = False,
    ) -> RemoteRollout:
        """Create a rollout, by default one during which weights cannot be sent to any engine."""
        at_once = self._spec.max_staleness or 1  # rollouts that check engines
        return RemoteRollout(
            dispatcher,
            self._weights.id,
            self._spec.remote,
            self._registry.clients,
            beat=beat,
            restore=restore,
            are_restored=are_restored,
            may_leave=may_leave,
            interval_s=check_interval_s(self._spec.engines * at_once, self._ranks.num_ranks * at_once),
            spans_weights=spans_weights,
        )

    def _begun_rollout(self, dispatcher: Dispatcher, beat: Callable[[], None]) -> RemoteRollout:
        """Create a rollout in parallel to training, which replaces the weights that the model holds now."""
        return self._rollout(dispatcher, beat, spans_weights=self._spec.spans_weights)

    def _finish(self, dispatcher: Dispatcher, beat: Callable[[], None]) -> None:
        """Sample what a finished background rollout has left over. Collective."""
        if self._is_answered(dispatcher):
            self._count(dispatcher)
        else:
            self._complete(dispatcher, beat)

    def _complete(self, dispatcher: Dispatcher, beat: Callable[[], None]) -> None:
        """Sample the unanswered prompts. Collective.

        Raises:
            EnginesLost: no engine serves requests, or all were restarted too often.
            ToolFailed: raised by the source of the prompts.
        """
        for _ in range(MAX_RESTARTS):
            self._run(dispatcher, beat)
            # If the model is not split, an engine that comes back gets the weights while the rollout waits.
            if not self._weights.is_split or self._is_answered(dispatcher):
                dispatcher.end(beat)
                self._count(dispatcher)
                return
            with self._other_weights(beat):
                self._weights.load_again(beat)
        raise EnginesLost(
            f"{dispatcher.num_missing} prompts of rank {self._ranks.rank} were given up after all engines restarted "
            f"{MAX_RESTARTS} times in one rollout. See the logs of the group rollout"
        )

    def _count(self, dispatcher: Dispatcher) -> None:
        for name, count in dispatcher.counts().items():
            self._counts[name] += count

    def _is_answered(self, dispatcher: Dispatcher) -> bool:
        """True if no rank has prompts left. Collective."""
        return not any(self._ranks.sum([dispatcher.num_missing]))

    def take_counts(self) -> Mapping[str, float]:
        """Number of prompts sent again, number of completions refused, and metrics of syncs, since the last call."""
        counts, self._counts = self._counts, dict.fromkeys(COUNTS, 0.0)
        return {**counts, **self._weights.take_counts()}

    def _exit_barrier(self) -> Callable[[], bool]:
        """Hold rank 0 until all ranks have their completions: only it can send weights to an engine that comes back."""
        key, store, num_ranks = f"rollout-{self._num_rollouts}", self._ranks.store, self._ranks.num_ranks
        is_counted = False

        def may_leave() -> bool:
            nonlocal is_counted
            if num_ranks == 1:
                return True
            done = store.add(key, 0 if is_counted else 1)
            is_counted = True
            return not self._ranks.is_first or done >= num_ranks

        return may_leave

    # -----------------------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Do nothing: the engines have their own memory."""

    def close(self) -> None:
        """Release the resources of the weight sync; the engines end with their group."""
        self.continuous.stop()
        self._weights.close()
