"""Rollouts over the engines of the group: of prompts that become known meanwhile, and in parallel to training."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from functools import partial
from threading import Thread

from rlhf_core.errors import EnginesLost
from rlhf_core.schemas.rollouts import RolloutSpec
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.rollouts.base import PromptSource, require_version
from rlhf_core.training.rollouts.remote.client import EngineClient
from rlhf_core.training.rollouts.remote.dispatch import Dispatcher
from rlhf_core.training.rollouts.remote.registry import EngineRegistry
from rlhf_core.training.rollouts.remote.rollout import POLL_S, RemoteRollout, check_interval_s
from rlhf_core.training.rollouts.remote.weights import EngineWeights

MAX_RESTARTS = 3
"""Number of times that all engines may be restarted in one rollout of weights that are split."""
COUNTS = ("rollout/moved_prompts", "rollout/refused_completions")
"""Metrics of this rank's rollouts."""


class ContinuousRollouts:
    """Rollouts of prompts from a source; see :class:`rlhf_core.training.rollouts.base.ContinuousSampling`."""

    def __init__(self, spec: RolloutSpec, ranks: Ranks, registry: EngineRegistry, weights: EngineWeights) -> None:
        self._spec, self._ranks, self._registry, self._weights = spec, ranks, registry, weights
        self._begun: deque[BackgroundRollout] = deque()
        self._num_rollouts = 0
        self._counts = dict.fromkeys(COUNTS, 0.0)

    def take_counts(self) -> Mapping[str, float]:
        """Number of prompts sent again, and of completions refused, since the last call."""
        counts, self._counts = self._counts, dict.fromkeys(COUNTS, 0.0)
        return counts

    # -----------------------------------------------------------------------------------------------------------------
    # In the step

    def sample(self, source: PromptSource, version: int, beat: Callable[[], None]) -> None:
        """Sample until every prompt has its completions. Collective."""
        self._complete(self._dispatcher(source, version), beat)

    def _dispatcher(self, source: PromptSource, version: int) -> Dispatcher:
        require_version(self._weights.version, version)
        return Dispatcher(source, rank=self._ranks.rank)

    def _complete(self, dispatcher: Dispatcher, beat: Callable[[], None]) -> None:
        """Sample the unanswered prompts. Collective.

        Raises:
            EnginesLost: no engine serves requests, or all were restarted too often.
            ToolFailed: raised by the source of the prompts.
        """
        for _ in range(MAX_RESTARTS):
            asyncio.run(self._rollout_of_step(dispatcher, beat).run())
            # If the model is not split, an engine that comes back gets the weights while the rollout waits.
            if not self._weights.is_split or self._is_answered(dispatcher):
                dispatcher.end(beat)
                self._count(dispatcher)
                return
            with self.other_weights(beat):
                self._weights.load_again(beat)
        raise EnginesLost(
            f"{dispatcher.num_missing} prompts of rank {self._ranks.rank} were given up after all engines restarted "
            f"{MAX_RESTARTS} times in one rollout. See the logs of the group rollout"
        )

    def _rollout_of_step(self, dispatcher: Dispatcher, beat: Callable[[], None]) -> RemoteRollout:
        """Create a rollout with the current weights, which the model still holds."""
        self._num_rollouts += 1
        if self._weights.is_split:
            return self._rollout(dispatcher, beat)
        restore = partial(self._weights.restore, beat) if self._ranks.is_first else _leave_to_rank_0
        return self._rollout(dispatcher, beat, restore, self._exit_barrier())

    def _rollout(
        self,
        dispatcher: Dispatcher,
        beat: Callable[[], None],
        restore: Callable[[EngineClient], None] | None = None,
        may_leave: Callable[[], bool] = lambda: True,
        *,
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
            may_leave=may_leave,
            interval_s=check_interval_s(self._spec.engines * at_once, self._ranks.num_ranks * at_once),
            spans_weights=spans_weights,
        )

    def _is_answered(self, dispatcher: Dispatcher) -> bool:
        """True if no rank has prompts left. Collective."""
        return not any(self._ranks.sum([dispatcher.num_missing]))

    def _count(self, dispatcher: Dispatcher) -> None:
        for name, count in dispatcher.counts().items():
            self._counts[name] += count

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
    # In parallel to training

    def begin(self, source: PromptSource, version: int) -> None:
        """Begin to sample in parallel to the caller."""
        self._begun.append(BackgroundRollout(self._dispatcher(source, version), self._rollout_ahead))

    def _rollout_ahead(self, dispatcher: Dispatcher, beat: Callable[[], None]) -> RemoteRollout:
        """Create a rollout in parallel to training, which replaces the weights that the model holds now."""
        return self._rollout(dispatcher, beat, spans_weights=self._spec.spans_weights)

    def wait(self, beat: Callable[[], None]) -> None:
        """Wait until all rollouts have ended."""
        for begun in self._begun:
            begun.wait(beat)

    def stop(self) -> None:
        """Stop all rollouts soon, and wait for their end."""
        for begun in self._begun:
            begun.stop()

    def collect(self, beat: Callable[[], None]) -> None:
        """Wait for the first rollout, then sample the rest of it with the version now current. Collective."""
        self._begun[0].wait(beat)
        dispatcher = self._begun.popleft().dispatcher
        if self._is_answered(dispatcher):
            self._count(dispatcher)
        else:
            self._complete(dispatcher, beat)

    @contextlib.contextmanager
    def other_weights(self, beat: Callable[[], None]) -> Iterator[None]:
        """Prepare rollouts in progress for weights that are sent in the block. Collective.

        Those that span weights expect others, and go on, also those that had lost all engines with the ones before.
        Others are waited for. On all ranks: engines with the next version would be given up by a rank that does not
        expect it, or would refuse its prompts.
        """
        beat()  # its phase tells the agent that silence from here on may be a wait for engines
        spans_weights = self._spec.spans_weights
        if self._begun:
            if spans_weights:
                for begun in self._begun:
                    begun.rollout.begin_change()
            else:
                self.wait(beat)
            self._ranks.barrier()
        yield
        if spans_weights:
            for place, begun in enumerate(self._begun):
                begun.rollout.end_change(self._weights.id)
                if begun.is_stranded:
                    self._begun[place] = BackgroundRollout(begun.dispatcher, self._rollout_ahead)


def _leave_to_rank_0(client: EngineClient) -> None:
    """Send nothing: rank 0 sends the weights to an engine that came back."""


class BackgroundRollout:
    """A rollout in its own thread, which mostly waits for the network and for tools."""

    def __init__(
        self, dispatcher: Dispatcher, rollout: Callable[[Dispatcher, Callable[[], None]], RemoteRollout]
    ) -> None:
        """Begin the rollout.

        Args:
            rollout: creates it; its argument is called whenever the rollout makes progress.
        """
        self.dispatcher = dispatcher
        self.rollout = rollout(dispatcher, self._advance)
        self._num_advances = 0
        loop = asyncio.new_event_loop()
        self._end = asyncio.run_coroutine_threadsafe(self._run(), loop)
        self._end.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
        # A daemon: a failing rank does not wait for the engines.
        Thread(target=_run, args=(loop,), name="rollout", daemon=True).start()

    @property
    def is_stranded(self) -> bool:
        """True if it has ended without error and has prompts left."""
        return self._end.done() and self._end.exception() is None and not self.dispatcher.is_done

    def wait(self, beat: Callable[[], None]) -> None:
        """Wait for its end, with a heartbeat from this thread whenever the rollout makes progress.

        Raises:
            EnginesLost, ToolFailed: raised by the rollout.
        """
        seen = self._num_advances
        while not self._end.done():
            futures.wait([self._end], POLL_S)
            if seen != self._num_advances:
                seen = self._num_advances
                beat()
        self._end.result()

    def stop(self) -> None:
        """Stop it soon, wait for its end, and ignore its error."""
        self.rollout.stop()
        futures.wait([self._end])

    async def _run(self) -> None:
        try:
            await self.rollout.run()
        finally:
            # What is left is begun anew, with other weights: engines that had these are lost.
            self.dispatcher.end(self._advance)

    def _advance(self) -> None:
        self._num_advances += 1


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.close()
