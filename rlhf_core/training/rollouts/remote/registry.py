"""The engines that have registered in the run directory, and those that are left out because they fail."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from rlhf_core.errors import EnginesLost
from rlhf_core.files.whole import read_all, shared_secret
from rlhf_core.schemas.engines import EngineAddress
from rlhf_core.training.rollouts.http_clients import async_engine_http
from rlhf_core.training.rollouts.remote.client import EngineClient, EngineUnusable
from rlhf_core.training.types import WorkerContext

POLL_S = 0.2


class EngineRegistry:
    """The engines of a group by their files: each start of an engine registers its address."""

    def __init__(self, context: WorkerContext) -> None:
        spec = context.spec
        self._num_engines = spec.rollout.engines
        self._settings = spec.rollout.remote
        # While engines start. Longer silences would raise the limit of this phase; more beats would soon make it warm,
        # and the first sync, which opens links and compiles, would get only the time of later ones.
        self._beat_every_s = spec.supervise.weight_sync_floor_s / spec.supervise.gap_factor
        self._attempt = context.run_dir.attempt(context.attempt)
        self._token = shared_secret(self._attempt.engine_key)
        self._was_complete = False

    def clients(self, without: Collection[int] = ()) -> list[EngineClient]:
        """The currently registered engines, without those of the given ranks."""
        ranks = (rank for rank in range(self._num_engines) if rank not in without)
        found = read_all(map(self._attempt.engine, ranks), EngineAddress)
        return [EngineClient(address, self._token, self._settings.answer_timeout_s) for address in found]

    async def live(self, beat: Callable[[], None]) -> list[EngineClient]:
        """Wait for engines that respond: for all of them the first time, later for at least one.

        Raises:
            EnginesLost: no engine responds in time.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._settings.start_timeout_s
        beat_at_s = loop.time() + self._beat_every_s
        wanted = 1 if self._was_complete else self._num_engines
        async with async_engine_http() as http:
            while True:
                clients = self.clients()
                answers = await asyncio.gather(*(client.health(http) for client in clients), return_exceptions=True)
                responding = [one for one, answer in zip(clients, answers, strict=True) if not _is_unusable(answer)]
                if len(responding) >= wanted or (responding and loop.time() > deadline_s):
                    self._was_complete = True
                    beat()
                    return responding
                if loop.time() > deadline_s:
                    problems = "; ".join(str(one) for one in answers) or "no engine has registered"
                    raise EnginesLost(
                        "no rollout engine responded within rollout.remote.start_timeout_s = "
                        f"{self._settings.start_timeout_s:g} ({problems}). See the logs of the group rollout"
                    )
                if loop.time() >= beat_at_s:  # the wait has a limit of its own, which is longer than a silence may be
                    beat()
                    beat_at_s = loop.time() + self._beat_every_s
                await asyncio.sleep(POLL_S)


def _is_unusable(answer: object) -> bool:
    if isinstance(answer, BaseException) and not isinstance(answer, EngineUnusable):
        raise answer
    return isinstance(answer, EngineUnusable)


class EngineFailures:
    """Failures of engines in a row, by their starts. The first one may be due to a restart at that moment; after the
    second, an engine is left out, each time for longer."""

    def __init__(self, timeout_s: float) -> None:
        """Args:
        timeout_s: time for which an engine is left out after its second failure.
        """
        self._timeout_s = timeout_s
        self._of_start: dict[tuple[int, int], tuple[int, float]] = {}

    def usable(self, engines: Sequence[EngineClient]) -> Sequence[EngineClient]:
        """The engines that are not left out now; all of them if there are no others."""
        now_s = time.monotonic()
        return [one for one in engines if self._of_start.get(one.start, (0, 0.0))[1] <= now_s] or engines

    def add(self, engines: Iterable[EngineClient]) -> None:
        """Count a failure of each of these engines."""
        for engine in engines:
            count, _ = self._of_start.get(engine.start, (0, 0.0))
            self._of_start[engine.start] = count + 1, time.monotonic() + count * self._timeout_s

    def forget(self, engine: EngineClient) -> None:
        """Forget the failures of an engine that has succeeded."""
        self._of_start.pop(engine.start, None)
