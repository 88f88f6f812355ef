"""Time series of the node's metrics: ``telemetry-<node>.jsonl``, one line per period with the mean of its readings."""

import contextlib
import math
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


class TelemetrySeries:
    """Averages readings and appends the means. Nothing depends on it: a line that cannot be written is lost."""

    def __init__(self, node: str, log: Callable[[str], None]) -> None:
        self._node = node
        self._log = log
        self._place: RestartDir | None = None
        self._entered_at_s = 0.0
        self._began_at_s = 0.0
        self._sums: dict[str, tuple[float, int]] = {}
        self._writer: LineWriter | None = None
        self._problems = ConditionLog(log)

    def add(self, place: RestartDir, figures: Mapping[str, float], now_s: float) -> None:
        """Add a reading.

        Args:
            place: The restart it belongs to.
            figures: The metrics read.
            now_s: This agent's monotonic clock, in seconds.
        """
        if place != self._place:
            self.stop(now_s)
            self._place, self._entered_at_s, self._began_at_s = place, now_s, now_s
        for name, value in figures.items():
            if math.isfinite(value) and not name.endswith(UNCHANGING):
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = (total + value, count + 1)
        if now_s - self._began_at_s >= _period_s(now_s - self._entered_at_s):
            self._end_period(now_s)

    def stop(self, now_s: float) -> None:
        """Write what is pending and close the file."""
        self._end_period(now_s)
        self._close()

    def _end_period(self, now_s: float) -> None:
        if self._place is not None and self._sums:
            means = {name: _short(total / count) for name, (total, count) in self._sums.items()}
            line = TelemetryLine(time=utc_now(), seconds=round(now_s - self._began_at_s, 3), figures=means)
            try:
                if self._writer is None:
                    self._writer = LineWriter(self._place.telemetry(self._node), self._log)
                self._writer.write(line)
                self._problems.end()
            except OSError as error:
                self._close()  # reopened for the next line, which terminates a torn one
                self._problems.log_change(f"failed to write telemetry: {error}")
        self._sums = {}
        self._began_at_s = now_s

    def _close(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()
            self._writer = None


def _period_s(age_s: float) -> float:
    """Seconds that a line spans in a restart of this age."""
    return FINE_PERIOD_S if age_s < FINE_FOR_S else PERIOD_S


def _short(value: float) -> float:
    """Round to four significant digits, more than such a mean is accurate to."""
    return float(f"{value:.4g}")
