"""Rollouts over the engines of the group: of prompts that become known meanwhile, and in parallel to training."""

import asyncio
from collections.abc import Callable
from concurrent import futures
from threading import Thread

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
        self._begun: BackgroundRollout | None = None

    @property
    def is_begun(self) -> bool:
        """True between :meth:`begin` and :meth:`collect`."""
        return self._begun is not None

    def sample(self, source: PromptSource, version: int, beat: Callable[[], None]) -> None:
        """Sample until every prompt has its completions. Collective."""
        self._complete(self._dispatcher(source, version), beat)

    def begin(self, source: PromptSource, version: int) -> None:
        """Begin to sample in parallel to the caller."""
        self._begun = BackgroundRollout(self._dispatcher(source, version), self._rollout)

    def wait(self, beat: Callable[[], None]) -> None:
        """Wait until the rollout has ended."""
        if self._begun is not None:
            self._begun.wait(beat)

    def stop(self) -> None:
        """Stop the rollout soon, and wait for its end."""
        if self._begun is not None:
            self._begun.stop()

    def collect(self, beat: Callable[[], None]) -> None:
        """Wait, then sample the rest with the version now current. Collective."""
        assert self._begun is not None  # begun before
        self._begun.wait(beat)
        begun, self._begun = self._begun, None
        self._finish(begun.dispatcher, beat)


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
        self._rollout = rollout(dispatcher, self._advance)
        self._num_advances = 0
        loop = asyncio.new_event_loop()
        self._end = asyncio.run_coroutine_threadsafe(self._run(), loop)
        self._end.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
        # A daemon: a failing rank does not wait for the engines.
        Thread(target=_run, args=(loop,), name="rollout", daemon=True).start()

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
        self._rollout.stop()
        futures.wait([self._end])

    async def _run(self) -> None:
        try:
            await self._rollout.run()
        finally:
            # What is left is sampled with other weights, and all turns of a completion have the same.
            self.dispatcher.end(self._advance)

    def _advance(self) -> None:
        self._num_advances += 1


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.close()
