"""A background rollout over the engines of the group, in parallel to training."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from threading import Thread
from typing import NamedTuple

from rlhf_core.training.rollouts.base import Sampling
from rlhf_core.training.rollouts.remote.dispatch import Dispatcher
from rlhf_core.training.rollouts.remote.rollout import POLL_S, RemoteRollout
from rlhf_core.training.types import Completion


class _Begun(NamedTuple):
    """A rollout in progress, or finished and not yet collected."""

    dispatcher: Dispatcher
    sampling: Sampling
    rollout: "BackgroundRollout"


class RolloutAhead:
    """Rollouts in parallel to training, one at a time; see :class:`rlhf_core.training.rollouts.base.Ahead`."""

    def __init__(
        self,
        dispatcher: Callable[[Sequence[Sequence[int]], Sequence[Sequence[int]], Sampling, int], Dispatcher],
        rollout: Callable[[Dispatcher, Sampling, Callable[[], None]], RemoteRollout],
        finish: Callable[[Dispatcher, Sampling, Callable[[], None]], list[list[Completion]]],
    ) -> None:
        """Args:
        dispatcher: validates a request and creates its bookkeeping.
        rollout: runs a rollout with the current weights; its argument is called whenever an engine makes progress.
        finish: samples the rest with the current weights and returns all completions; collective.
        """
        self._dispatcher = dispatcher
        self._rollout = rollout
        self._finish = finish
        self._begun: _Begun | None = None

    @property
    def is_begun(self) -> bool:
        """True between :meth:`begin` and :meth:`collect`."""
        return self._begun is not None

    def begin(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[Sequence[int]], sampling: Sampling, version: int
    ) -> None:
        """Begin to sample; see ``base.Ahead``."""
        dispatcher = self._dispatcher(prompts, seeds, sampling, version)
        background = BackgroundRollout(lambda advance: self._rollout(dispatcher, sampling, advance))
        self._begun = _Begun(dispatcher, sampling, background)

    def wait(self, beat: Callable[[], None]) -> None:
        """Wait until every prompt that can be answered has been; see ``base.Ahead``."""
        if self._begun is not None:
            self._begun.rollout.wait(beat)

    def stop(self) -> None:
        """Stop the rollout soon, and wait for its end."""
        if self._begun is not None:
            self._begun.rollout.stop()

    def peek(self) -> Mapping[int, list[Completion]]:
        """Completions available once the rollout has ended, by index of the prompt."""
        return {} if self._begun is None else self._begun.dispatcher.made

    def collect(self, beat: Callable[[], None]) -> list[list[Completion]]:
        """Wait, then sample the rest with the version now current. Collective."""
        assert self._begun is not None  # begun before
        self.wait(beat)
        begun, self._begun = self._begun, None
        return self._finish(begun.dispatcher, begun.sampling, beat)


class BackgroundRollout:
    """A rollout in its own thread, which mostly waits for the network and computes nothing."""

    def __init__(self, rollout: Callable[[Callable[[], None]], RemoteRollout]) -> None:
        """Begin the rollout.

        Args:
            rollout: runs the rollout; its argument is called whenever an engine makes progress.
        """
        self._rollout = rollout(self._advance)
        self._num_advances = 0
        loop = asyncio.new_event_loop()
        self._end = asyncio.run_coroutine_threadsafe(self._rollout.run(), loop)
        self._end.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
        # A daemon: a failing rank does not wait for the engines.
        Thread(target=_run, args=(loop,), name="rollout", daemon=True).start()

    def wait(self, beat: Callable[[], None]) -> None:
        """Wait for its end, with a heartbeat from this thread whenever the rollout makes progress.

        Raises:
            EnginesLost: raised by the rollout.
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

    def _advance(self) -> None:
        self._num_advances += 1


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.close()
