"""Steps and metrics that another rank than the first prints, as the last one does with Megatron.

The worker of the first rank records the metrics of the job. While its own rank prints no steps, it reads them in the
output of one other rank: the first that is found to print any.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from rlhf_core.schemas.command_trainer import ProgressSource
from rlhf_core.worker.command.observation import Reading, Watched
from rlhf_core.worker.command.progress import Readings
from rlhf_core.worker.command.sources.stdout import Stdout

FIRST_WAIT_S, MAX_WAIT_S = 1.0, 60.0
"""First and longest wait between two searches through all logs, in seconds; it doubles each time."""


class PeerOutput:
    """The output of the other ranks, or of the one among them that prints the steps."""

    def __init__(self, watched: Watched, list_logs: Callable[[], Iterable[Path]]) -> None:
        """Args:
        watched: The program.
        list_logs: Lists the logs of the other ranks on all nodes; raises OSError if the file system fails.
        """
        self.step = watched.first_step
        """Newest step that was found."""
        self._watched = watched
        self._list_logs = list_logs
        self._searched: dict[Path, Stdout] = {}
        self._found: Stdout | None = None
        self._next_search_s = float("-inf")
        self._wait_s = FIRST_WAIT_S

    def poll(self, now_s: float) -> Readings:
        """Read what was printed since the last poll. It is no progress of the first rank.

        Args:
            now_s: Monotonic time in seconds.
        """
        reading = self._search(now_s) if self._found is None else self._found.poll(now_s)
        if reading.step is not None:
            self.step = max(self.step, reading.step)
        return [(ProgressSource.STDOUT, replace(reading, moved=False))]

    def _search(self, now_s: float) -> Reading:
        if now_s < self._next_search_s:
            return Reading()
        self._next_search_s, self._wait_s = now_s + self._wait_s, min(2 * self._wait_s, MAX_WAIT_S)
        try:
            logs = list(self._list_logs())
        except OSError as error:
            return Reading(problem=f"the output of other ranks cannot be searched for steps: {error}")
        for log in logs:
            source = self._searched.setdefault(log, self._source_of(log))
            reading = source.poll(now_s)
            if prints_steps(reading, self._watched.first_step):
                self._found = source
                return reading
        return Reading()

    def _source_of(self, log: Path) -> Stdout:
        return Stdout(replace(self._watched, logs=lambda: (log,)))


def prints_steps(reading: Reading, first_step: int) -> bool:
    """True if a rank has printed a step after the one that its program has started from."""
    return reading.step is not None and reading.step > first_step
