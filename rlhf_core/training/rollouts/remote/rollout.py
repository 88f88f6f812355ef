"""One rollout of a rank over the engines of the group: sends requests, monitors engines, and re-routes after a loss."""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass

import httpx

from rlhf_core.errors import EnginesLost
from rlhf_core.schemas.engines import (
    EngineHealth,
    PromptRequest,
    SampledCompletion,
    SampledPrompt,
    SampleRequest,
    WeightsId,
)
from rlhf_core.schemas.rollouts import RemoteSettings
from rlhf_core.training.rollouts.base import PromptTask
from rlhf_core.training.rollouts.http_clients import async_engine_http
from rlhf_core.training.rollouts.remote.client import EngineClient, EngineUnusable
from rlhf_core.training.rollouts.remote.dispatch import Dispatcher
from rlhf_core.training.rollouts.remote.registry import EngineFailures
from rlhf_core.training.types import Completion

POLL_S = 0.2
"""Shortest interval of the health checks of an engine, in seconds."""
CHECKS_PER_S = 100
"""Most health checks that a rank makes per second: one takes 2 ms of its CPU."""
ANSWERS_PER_S = 400
"""Most health checks that an engine answers per second: one takes 0.5 ms of its CPU."""
FIRST_CHECKS_S = 1.0
"""Longest time for which a rollout waits to hear from every engine before it sends its first prompts, in seconds."""
MAX_MOVES = 8
"""Number of engines that may fail on one prompt before the rollout gives up."""


def check_interval_s(num_engines: int, num_ranks: int) -> float:
    """Interval at which a rank checks each engine, in seconds: at most a fifth of a core is spent on it, in the rank
    and in the engine. Hundreds of ranks would otherwise keep an engine from sampling, and time out."""
    return max(POLL_S, num_engines / CHECKS_PER_S, num_ranks / ANSWERS_PER_S)


@dataclass
class _Progress:
    """Last observed progress of an engine."""

    count: int
    at_s: float
    is_stalled: bool = False


class RemoteRollout:
    """Runs until every prompt of the dispatcher is answered, or no engine can answer the rest."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        weights: WeightsId,
        settings: RemoteSettings,
        clients: Callable[[Collection[int]], Collection[EngineClient]],
        *,
        beat: Callable[[], None],
        restore: Callable[[EngineClient], None] | None = None,
        may_leave: Callable[[], bool] = lambda: True,
        interval_s: float = POLL_S,
        spans_weights: bool = False,
    ) -> None:
        """Args:
        weights: weights of the engines.
        clients: returns the currently registered engines, without those of the given ranks.
        beat: called whenever an engine makes progress or begins to serve, and at every look at tools that are at work
            or, once all prompts are answered, at the other ranks: neither wait is one for this rank.
        restore: sends the weights to an engine that came back, or leaves it to another rank that does; None if no rank
            can during the rollout.
        may_leave: called once all prompts are answered; False while other ranks may need this one.
        interval_s: interval of the health checks of an engine, from :func:`check_interval_s`.
        spans_weights: True if engines may load others meanwhile (:meth:`begin_change`), and continue with those.
        """
        self._dispatcher = dispatcher
        self._weights = self._oldest = weights
        self._spans_weights = spans_weights
        self._is_changing = False
        self._changed_at_s = -math.inf
        self._settings = settings
        self._clients = clients
        self._beat = beat
        self._restore = restore
        self._may_leave = may_leave
        self._interval_s = interval_s
        self._ready: dict[int, EngineClient] = {}
        self._requests: dict[int, set[asyncio.Task[None]]] = {}
        self._progress: dict[tuple[int, int], _Progress] = {}
        self._moves: dict[int, int] = {}
        self._failures = EngineFailures(settings.stall_timeout_s)
        self._last_loss = "no engine has registered"
        self._none_since_s = time.monotonic()
        self._others: set[tuple[int, int]] = set()
        self._checked: set[tuple[int, int]] = set()
        self._unresponsive_since_s: dict[tuple[int, int], float] = {}
        self._is_stopped = False
        self._wake = asyncio.Event()

    def stop(self) -> None:
        """Stop the rollout soon, from another thread; prompts answered by then stay with their source."""
        self._is_stopped = True

    def begin_change(self) -> None:
        """Expect engines to load other weights from now on. Called from another thread, as :meth:`end_change` is."""
        self._is_changing = True

    def end_change(self, weights: WeightsId) -> None:
        """Continue with engines that have these weights."""
        self._weights, self._changed_at_s, self._others = weights, time.monotonic(), set()
        self._is_changing = False

    async def run(self) -> None:
        """Run until every prompt is answered. Some are left over if the rollout is stopped, or if all engines came back
        with other weights and the right ones cannot be sent to them.

        Raises:
            EnginesLost: no engine served requests for too long, or several failed on one prompt.
            ToolFailed: raised by the source of the prompts.
        """
        watchers: dict[int, asyncio.Task[None]] = {}
        clients: Collection[EngineClient] = ()
        read_at_s, begun_s = -math.inf, time.monotonic()
        async with async_engine_http() as http:
            try:
                while not self._is_over():
                    lost = [rank for rank, watcher in watchers.items() if watcher.done()]
                    for rank in lost:
                        del watchers[rank]
                    if lost or time.monotonic() - read_at_s >= self._interval_s:
                        # Not those of engines that respond: all ranks read them from the shared file system.
                        known = [one for one in clients if one.address.rank in watchers]
                        clients, read_at_s = [*known, *self._clients(watchers)], time.monotonic()
                    if self._is_stopped or self._is_stranded(clients):
                        break
                    for client in clients:
                        if client.address.rank not in watchers:
                            watchers[client.address.rank] = asyncio.create_task(self._watch(http, client))
                    # Else the first engine to respond gets the longest prompts, and all of them if its window has room.
                    if self._checked >= {one.start for one in clients} or time.monotonic() - begun_s > FIRST_CHECKS_S:
                        self._deal(http)
                    self._require_an_engine()
                    with self._woken_by_tools(), contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._wake.wait(), POLL_S)
                    self._wake.clear()
                    _finished(watchers.values())
                    for requests in self._requests.values():
                        requests.difference_update(_finished(requests))
            finally:
                await _cancel_all([*watchers.values(), *(task for tasks in self._requests.values() for task in tasks)])
                self._dispatcher.recall()

    def _is_over(self) -> bool:
        """Take the tasks that have become known; True if none will follow and this rank may leave."""
        self._dispatcher.refill(self._beat)
        is_done = self._dispatcher.is_done
        if is_done and self._may_leave():
            return True
        if is_done or self._dispatcher.source.is_waiting:
            self._beat()
        return False

    @contextlib.contextmanager
    def _woken_by_tools(self) -> Iterator[None]:
        """Wake the loop during the block once the source has more tasks."""
        loop, descriptor = asyncio.get_running_loop(), self._dispatcher.source.descriptor
        if descriptor is None:
            yield
            return
        loop.add_reader(descriptor, self._wake.set)
        try:
            yield
        finally:
            loop.remove_reader(descriptor)

    def _is_stranded(self, clients: Collection[EngineClient]) -> bool:
        """True if engines have other weights and will keep them, and all others have not responded for long."""
        if self._restore is not None:
            return False
        limit_s = time.monotonic() - self._settings.stall_timeout_s
        unresponsive = {start for start, since_s in self._unresponsive_since_s.items() if since_s < limit_s}
        starts = {client.start for client in clients}
        return bool(starts & self._others) and starts <= self._others | unresponsive

    # -----------------------------------------------------------------------------------------------------------------
    # Watching

    async def _watch(self, http: httpx.AsyncClient, client: EngineClient) -> None:
        """Monitor one start of an engine as long as it responds."""
        rank = client.address.rank
        while True:
            asked_s = time.monotonic()
            try:
                health = await client.health(http)
            except EngineUnusable as error:
                self._unresponsive_since_s.setdefault(client.start, time.monotonic())
                self._lose(rank, str(error))
                self._checked.add(client.start)
                self._wake.set()
                await asyncio.sleep(self._interval_s)
                return
            self._unresponsive_since_s.pop(client.start, None)
            self._judge(client, health, asked_s)
            self._checked.add(client.start)
            await asyncio.sleep(self._interval_s)

    def _judge(self, client: EngineClient, health: EngineHealth, now_s: float) -> None:
        """Judge the state of an engine at ``now_s``, when it was asked: an answer is not read while weights are sent to
        another engine."""
        rank = client.address.rank
        if self._is_changing or now_s < self._changed_at_s:
            return
        if health.weights != self._weights:
            self._lose(rank, f"{client.name} has other weights active")
            if self._restore is not None:
                self._restore(client)
            else:
                self._others.add(client.start)
            return
        start = client.start
        seen, busy = self._progress.get(start), bool(self._dispatcher.outstanding(rank))
        if seen is None or health.progress != seen.count:
            self._progress[start] = _Progress(health.progress, now_s)
            # A rank that waited for an engine begins another wait once the engine has its weights.
            if busy or rank not in self._ready:
                self._beat()
        elif not busy and not (seen.is_stalled and health.num_waiting):
            seen.at_s, seen.is_stalled = now_s, False
        elif (silent_s := now_s - max(seen.at_s, self._changed_at_s)) > self._settings.stall_timeout_s:
            seen.is_stalled = True  # until it makes progress again, or has dropped all requests
            self._lose(rank, f"{client.name} has made no progress for {silent_s:.0f} s")
            return
        if rank not in self._ready:
            self._ready[rank] = client
            self._wake.set()

    def _lose(self, rank: int, why: str) -> None:
        """Mark an engine as lost: its prompts wait for another one."""
        self._last_loss = why
        lost = self._dispatcher.outstanding(rank)
        for task in self._requests.pop(rank, ()):
            task.cancel()
        if self._ready.pop(rank, None) is None and not lost:
            return
        print(f"{why}; {len(lost)} of its prompts go to the others", flush=True)
        self._requeue(rank, lost)

    def _requeue(self, rank: int, prompts: Collection[int]) -> None:
        for index in prompts:
            self._moves[index] = self._moves.get(index, 0) + 1
            if self._moves[index] > MAX_MOVES:
                raise EnginesLost(
                    f"prompt {index} of this rank was given up after {MAX_MOVES} engines failed on it; the last "
                    f"failure: {self._last_loss}. See the logs of the group rollout"
                )
        self._dispatcher.requeue(rank, prompts)
        self._wake.set()

    def _require_an_engine(self) -> None:
        now_s = time.monotonic()
        if self._ready or self._dispatcher.is_done:
            self._none_since_s = now_s
        elif now_s - self._none_since_s > self._settings.start_timeout_s:
            raise EnginesLost(
                f"no rollout engine has served for {now_s - self._none_since_s:.0f} s (rollout.remote.start_timeout_s "
                f"= {self._settings.start_timeout_s:g}); the last loss: {self._last_loss}"
            )

    # -----------------------------------------------------------------------------------------------------------------
    # Requests

    def _deal(self, http: httpx.AsyncClient) -> None:
        # One that fails at once always has the least load, and would be assigned the same prompts again and again.
        engines = [one.address.rank for one in self._failures.usable(list(self._ready.values()))]
        for rank, tasks in self._dispatcher.assign(engines).items():
            request = asyncio.create_task(self._request(http, self._ready[rank], tasks))
            self._requests.setdefault(rank, set()).add(request)

    async def _request(self, http: httpx.AsyncClient, client: EngineClient, tasks: Collection[PromptTask]) -> None:
        rank = client.address.rank
        prompts = tuple(PromptRequest(index=t.index, prompt=tuple(t.prompt), seeds=tuple(t.seeds)) for t in tasks)
        request = SampleRequest(
            weights=self._weights,
            spans_weights=self._spans_weights,
            prompts=prompts,
            **asdict(self._dispatcher.source.sampling),
        )
        unanswered = {task.index: len(task.seeds) for task in tasks}
        try:
            async for made in client.sample(http, request):
                self._accept(client, made, unanswered.get(made.index, 0))
                unanswered.pop(made.index, None)
            if unanswered:
                raise EngineUnusable(f"{client.name} left {len(unanswered)} prompts unanswered")
            self._failures.forget(client)
        except EngineUnusable as error:
            self._last_loss = str(error)
            print(f"{error}; {len(unanswered)} of its prompts go to the others", flush=True)
            self._failures.add([client])
            self._ready.pop(rank, None)
            self._requeue(rank, unanswered.keys() & self._dispatcher.outstanding(rank))
        finally:
            self._wake.set()

    def _accept(self, client: EngineClient, made: SampledPrompt, num_wanted: int) -> None:
        """Accept completions made with the right weights, all of a prompt at once, once per prompt.

        Raises:
            EngineUnusable: they are others.
        """
        num_other = sum(not self._are_right(one) for one in made.completions)
        if num_other or len(made.completions) != num_wanted:
            self._dispatcher.num_refused += len(made.completions)
            raise EngineUnusable(
                f"{client.name} sent {len(made.completions)} completions of prompt {made.index}, {num_other} of them "
                f"with other weights; expected {num_wanted} with weights of step {self._weights.version}"
            )
        self._dispatcher.answer(client.address.rank, made.index, [_completion(one) for one in made.completions])
        self._wake.set()

    def _are_right(self, made: SampledCompletion) -> bool:
        """True if a completion was sampled with the weights of the rollout; of one that spans weights, if it was begun
        with none before those that the rollout began with."""
        if not self._spans_weights:
            return made.begun_with == made.weights == self._weights
        return (
            made.weights.start == made.begun_with.start == self._oldest.start
            and self._oldest.version <= made.begun_with.version <= made.weights.version
        )


def _completion(made: SampledCompletion) -> Completion:
    return Completion(
        list(made.token_ids), made.text, made.finished, list(made.logprobs), weight_version=made.begun_with.version
    )


def _finished(tasks: Collection["asyncio.Task[None]"]) -> set["asyncio.Task[None]"]:
    """Return the tasks that are done; an exception of one of them is raised."""
    done = {task for task in tasks if task.done()}
    for task in done:
        if not task.cancelled():
            task.result()
    return done


async def _cancel_all(tasks: Collection["asyncio.Task[None]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
