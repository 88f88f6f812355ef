"""Engines that live and fail: after the second failure in a row, an engine is left out, each time for longer."""

import time
from collections.abc import Iterable, Sequence

from rlhf_core.training.rollouts.remote.client import EngineClient


class EngineFailures:
    """Failures of engines in a row, by their starts. The first one may be due to a restart at that moment."""

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
