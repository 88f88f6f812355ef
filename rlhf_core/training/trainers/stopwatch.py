"""Timing of a step by its parts."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator


class Stopwatch:
    """Seconds of a step, in total and by part."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self.parts: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time of a block to ``name``."""
        started = time.monotonic()
        yield
        self.parts[name] += time.monotonic() - started

    def seconds(self) -> float:
        """Seconds since the stopwatch was created."""
        return time.monotonic() - self._started
