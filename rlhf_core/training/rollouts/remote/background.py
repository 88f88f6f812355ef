"""Rollouts over the engines of the group: of prompts that become known meanwhile, and in parallel to training."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent import futures
from threading import Thread

from rlhf_core.schemas.engines import WeightsId
from rlhf_core.training.rollouts.base import PromptSource
from rlhf_core.training.rollouts.remote.dispatch import Dispatcher
from rlhf_core.training.rollouts.remote.rollout import POLL_S, RemoteRollout


class ContinuousRollouts:
    """Rollouts of prompts from a source; see :class:`rlhf_core.training.rollouts.base.ContinuousSampling`."""

    def __init__(
        self,
        dispatcher: Callable[[PromptSource, int], Dispatcher],
        rollout: Callable[[Dispatcher, Callable[[], None]], RemoteRollout],
        complete: Callable[[Dispatcher, Callable[[], None]], None],
        finish: Callable[[Dispatcher, Callable[[], None]], None],
    ) -> None:
        """Args:
        dispatcher: creates the bookkeeping of a rollout with one version of the weights, if it is the current one.
        rollout: runs a rollout with the current weights; its argument is called whenever it makes progress.
        complete: samples everything with the current weights; collective.
        finish: samples the rest with the current weights; collective.
        """
        self._dispatcher = dispatcher
        self._rollout = rollout
        self._complete = complete
        self._finish = finish
        self._begun: deque[BackgroundRollout] = deque()

    @property
    def is_begun(self) -> bool:
        """True if a rollout was begun and not collected."""
        return bool(self._begun)

    def sample(self, source: PromptSource, version: int, beat: Callable[[], None]) -> None:
        """Sample until every prompt has its completions. Collective."""
        self._complete(self._dispatcher(source, version), beat)

    def begin(self, source: PromptSource, version: int) -> None:
        """Begin to sample in parallel to the caller."""
        self._begun.append(BackgroundRollout(self._dispatcher(source, version), self._rollout))

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
        self._finish(self._begun.popleft().dispatcher, beat)

    def begin_change(self) -> None:
        """Have all rollouts expect other weights."""
        for begun in self._begun:
            begun.rollout.begin_change()

    def end_change(self, weights: WeightsId) -> None:
        """Continue with these weights, also the rollouts that had lost all engines with the ones before."""
        for place, begun in enumerate(self._begun):
            begun.rollout.end_change(weights)
            if begun.is_stranded:
                self._begun[place] = BackgroundRollout(begun.dispatcher, self._rollout)


class BackgroundRollout:
    """A rollout in its own thread, which mostly waits for the network and for tools."""

    def __init__(
        self, dispatcher: Dispatcher, rollout: Callable[[Dispatcher, Callable[[], None]], RemoteRollout]
    ) -> None:
        """Begin the rollout.

        Args:
            rollout: as for :class:`ContinuousRollouts`.
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
