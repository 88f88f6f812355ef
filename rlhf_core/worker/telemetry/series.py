"""Time series of the node's metrics: ``telemetry-<node>.jsonl``, one line per period with the mean of its readings."""

import contextlib
import math
import queue
import threading
from collections.abc import Callable, Mapping

from rlhf_core.condition_log import ConditionLog
from rlhf_core.files.appended import LineWriter
from rlhf_core.run_dir.attempt import RestartDir
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.reports import TelemetryLine

FINE_PERIOD_S = 10.0
"""Period of a line in the first hour of a restart, when most failures happen, in seconds."""

PERIOD_S = 60.0
"""Period of a line after that, in seconds: about 10,000 lines a week, 5 MB without GPUs and 25 MB with eight."""

FINE_FOR_S = 3600.0

UNCHANGING = ("cpu_cores", "_total_gb", "_limit_w", "_slowdown_c")
"""Name suffixes of metrics that do not change; they are in ``agents/<node>.json``."""

_MOST_WAITING = 100
"""Maximum number of lines queued while the file system is hung; more are dropped."""


class TelemetrySeries:
    """Averages readings and appends the means. Used only by the supervising thread, which never blocks on it: a
    separate thread writes."""

    def __init__(self, node: str, log: Callable[[str], None]) -> None:
        self._node = node
        self._log = log
        self._place: RestartDir | None = None
        self._entered_at_s = 0.0
        self._began_at_s = 0.0
        self._sums: dict[str, tuple[float, int]] = {}
        self._lines: queue.Queue[tuple[RestartDir, TelemetryLine] | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="telemetry-series", daemon=True)
        self._thread.start()

    def add(self, place: RestartDir, figures: Mapping[str, float], now_s: float) -> None:
        """Add a reading.

        Args:
            place: The restart it belongs to.
            figures: The metrics read.
            now_s: This agent's monotonic clock, in seconds.
        """
        if place != self._place:
            self._end_period(now_s)
            self._place, self._entered_at_s, self._began_at_s = place, now_s, now_s
        for name, value in figures.items():
            if math.isfinite(value) and not name.endswith(UNCHANGING):
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = (total + value, count + 1)
        if now_s - self._began_at_s >= _period_s(now_s - self._entered_at_s):
            self._end_period(now_s)

    def stop(self, now_s: float) -> None:
        """Write what is pending and stop the thread; a stuck thread does not keep the process alive."""
        self._end_period(now_s)
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        self._thread.join(timeout=1.0)

    def _end_period(self, now_s: float) -> None:
        if self._place is not None and self._sums:
            means = {name: _short(total / count) for name, (total, count) in self._sums.items()}
            line = TelemetryLine(time=utc_now(), seconds=round(now_s - self._began_at_s, 3), figures=means)
            with contextlib.suppress(queue.Full):
                self._lines.put_nowait((self._place, line))
        self._sums = {}
        self._began_at_s = now_s

    def _run(self) -> None:
        place: RestartDir | None = None
        writer: LineWriter | None = None
        problems = ConditionLog(self._log)
        while (item := self._lines.get()) is not None:
            try:
                if writer is None or item[0] != place:
                    _close(writer)
                    place, writer = item[0], None
                    writer = LineWriter(place.telemetry(self._node), self._log)
                writer.write(item[1])
                problems.end()
            except OSError as error:
                # Nothing depends on it. The file is reopened for the next line, which terminates a torn one.
                _close(writer)
                writer = None
                problems.log_change(f"failed to write telemetry: {error}")
        _close(writer)


def _period_s(age_s: float) -> float:
    """Seconds that a line spans in a restart of this age."""
    return FINE_PERIOD_S if age_s < FINE_FOR_S else PERIOD_S


def _short(value: float) -> float:
    """Round to four significant digits, more than such a mean is accurate to."""
    return float(f"{value:.4g}")


def _close(writer: LineWriter | None) -> None:
    if writer is not None:
        with contextlib.suppress(OSError):
            writer.close()
