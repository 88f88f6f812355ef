"""Progress shown by output lines that match ``trainer.stdout_patterns``.

Detects a job that no longer prints progress. Cannot tell which rank is to blame if all write to one log, and cannot see
output that the program buffers, as Python does unless PYTHONUNBUFFERED is set.
"""

import re
from pathlib import Path

from rlhf_core.diagnosis.logs.lines import ANSI
from rlhf_core.files.reading import UnfitFile, open_regular
from rlhf_core.schemas.command_trainer import ProgressSource
from rlhf_core.worker.command.following import by_step, is_of_this_start, numbers_of
from rlhf_core.worker.command.observation import Reading, StepFigures, Watched, is_step

MAX_BYTES_PER_POLL = 1 << 20
"""Maximum read from a log per poll; the rest follows at the next poll."""
MAX_LINE_CHARACTERS = 1 << 15
"""Length of the prefix of a line that patterns are matched against. The line that verl prints after a validation may
have 20,000 characters, the metrics of the validation first."""
PART_CHARACTERS = 4_000
"""Length of the parts in which a longer line is searched."""
OVERLAP_CHARACTERS = 400
"""Length that two parts have in common: what is matched across their border is at most that long."""
_LINE_END = re.compile(rb"[\r\n]+")
STEP_GROUP = "step"


class Stdout:
    """Output lines that show progress. A line with a step counts only if its pattern last matched another step."""

    kind = ProgressSource.STDOUT

    def __init__(self, watched: Watched) -> None:
        self._patterns = [re.compile(pattern) for pattern in watched.trainer.stdout_patterns]
        self._steps: dict[re.Pattern[str], int] = {}
        self._step: int | None = None
        self._watched = watched
        self._logs = {path: _Log(path, watched) for path in watched.logs()}

    def poll(self, now_s: float) -> Reading:
        """Read what was written since the last poll."""
        moved, problem = False, ""
        figures: list[StepFigures] = []
        for path in self._watched.logs():
            if path not in self._logs:
                self._logs[path] = _Log(path, self._watched)
            try:
                lines = self._logs[path].new_lines()
            except OSError as error:
                problem = f"the program's output cannot be read: {error}; expected a log that the job can read"
                continue
            for line in lines:
                moved |= self._take(line[:MAX_LINE_CHARACTERS], figures)
        return Reading(moved, self._step, metrics=by_step(figures), problem=problem)

    def _take(self, line: str, figures: list[StepFigures]) -> bool:
        moved = False
        line = ANSI.sub("", line)
        for pattern in self._patterns:
            found = _search(pattern, line)
            if found is None:
                continue
            values = numbers_of({name: text for name, text in found.groupdict().items() if text is not None})
            step = values.pop(STEP_GROUP, None)
            if step is not None and is_step(step):
                self._step = int(step)
                moved |= self._steps.get(pattern) != self._step
                self._steps[pattern] = self._step
            else:
                moved = True
            if values and self._step is not None:
                figures.append(StepFigures(self._step, values))
        return moved


def _search(pattern: re.Pattern[str], line: str) -> re.Match[str] | None:
    """First match in a line. A long line is searched in parts: the time of some patterns, such as ``.*loss=(.+)``,
    grows with the square of the length."""
    for start in range(0, max(1, len(line)), PART_CHARACTERS - OVERLAP_CHARACTERS):
        end = start + PART_CHARACTERS
        found = pattern.search(line, start, end)
        # A value that ends with its part may go on in the next one.
        if found is not None and (
            end >= len(line) or all(found.end(one) < end for one in range(1, pattern.groups + 1))
        ):
            return found
        if end >= len(line):
            break
    return None


class _Log:
    """One growing log; a carriage return ends a line as a newline does.

    A progress bar starts its line with a carriage return and leaves the line unterminated. An unterminated line
    therefore counts as complete once it is unchanged between two polls; if it grows later, it is read again as a whole.
    """

    def __init__(self, path: Path, watched: Watched) -> None:
        self._path = path
        self._offset = 0
        self._changed_ns = 0
        self._rest = b""
        self._is_rest_taken = False
        try:
            if not is_of_this_start(path, watched):
                self._offset = path.stat().st_size
        except OSError:
            pass  # does not exist yet, or was reported at the first poll

    def new_lines(self) -> list[str]:
        try:
            found = self._path.stat()
            if found.st_size < self._offset and found.st_mtime_ns > self._changed_ns:
                self._offset, self._rest, self._is_rest_taken = 0, b"", False
            self._changed_ns = found.st_mtime_ns
            with open_regular(self._path, follow_link=True) as file:
                file.seek(self._offset)
                block = file.read(MAX_BYTES_PER_POLL)
        except (FileNotFoundError, NotADirectoryError, UnfitFile):
            return []
        *lines, rest = _LINE_END.split(block)
        if not lines and len(rest) == MAX_BYTES_PER_POLL:
            lines, rest = [rest], b""  # one endless line: match its beginning and treat the rest as the next line
        self._offset += len(block) - len(rest)
        is_same = rest == self._rest and not lines
        if is_same and rest and not self._is_rest_taken:
            self._is_rest_taken = True
            lines = [rest]
        elif not is_same:
            self._is_rest_taken = False
        self._rest = rest
        return [line.decode("utf-8", errors="replace") for line in lines if line]
