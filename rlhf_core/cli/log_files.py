"""``rlhf logs``: finds the logs of workers and agents, prints their last lines, and follows them."""

import codecs
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.cli import output
from rlhf_core.errors import BadInput
from rlhf_core.files.reading import open_regular
from rlhf_core.files.whole import read_all
from rlhf_core.launch.journal import read_record
from rlhf_core.run_dir.attempt import AttemptDir, RestartDir
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.reports import AgentStatus
from rlhf_core.text.escaping import terminal

POLL_INTERVAL_S = 0.5
TAIL_BYTES_PER_LINE = 400
"""Bytes read from the end of a file for each requested line; more if its lines are longer."""


@dataclass(frozen=True)
class LogChoice:
    """Selection of logs: None or empty selects all roles and ranks, and the newest attempt and restart."""

    role: str = ""
    rank: int | None = None
    attempt: int | None = None
    restart: int | None = None


@dataclass(frozen=True)
class LogFile:
    """One log, with a title that names its source."""

    path: Path
    title: str


def find_logs(run_dir: RunDir, choice: LogChoice) -> list[LogFile]:
    """Find the selected logs, in a fixed order.

    Raises:
        BadInput: the attempt, restart, role or rank does not exist.
    """
    attempt = _attempt(run_dir, choice.attempt)
    restart = _restart(attempt, choice)
    found = [] if choice.role == "agent" or restart is None else list(_worker_logs(restart, choice))
    if choice.restart is None:
        found += _group_logs(attempt, choice)
    if choice.role in ("", "agent") and choice.rank is None:
        found += _agent_logs(attempt)
    if not found:
        raise BadInput(_nothing(run_dir, attempt, restart, choice))
    return found


def print_logs(run_dir: RunDir, choice: LogChoice, num_lines: int) -> None:
    """Print the last lines of each selected log."""
    printer = _Printer()
    for log in find_logs(run_dir, choice):
        printer.print(log, last_lines(log.path, num_lines))
    if others := _other_roles(run_dir, choice):
        printer.end_line()
        output.note(f"Also here: {', '.join(f'--role {role}' for role in others)}")


def follow_logs(run_dir: RunDir, choice: LogChoice, num_lines: int) -> None:
    """Print the last lines of each log, then new lines until the run ends. New restarts and attempts are followed as
    they begin."""
    positions: dict[Path, int] = {}
    printer = _Printer()
    logs: list[LogFile] = []
    while True:
        ended = read_record(run_dir).ended
        try:
            logs = find_logs(run_dir, choice)
        except BadInput:
            if not logs:  # otherwise a new attempt waits for nodes, and has no logs yet
                raise
        for log in logs:
            size = log.path.stat().st_size
            if log.path not in positions:
                text, positions[log.path] = _tail(log.path, num_lines, size)
            else:
                text, positions[log.path] = _read(log.path, positions[log.path], size)
            if text:
                printer.print(log, text)
        if ended:
            return
        time.sleep(POLL_INTERVAL_S)


def last_lines(path: Path, num_lines: int) -> str:
    """Read the last lines of a log; 0 for all lines."""
    return _tail(path, num_lines, path.stat().st_size)[0]


class _Printer:
    """Prints parts of logs below the title of their log, which begins a line even if the text before does not end one:
    a worker may have been killed in the middle of a line."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._at_line_start = True

    def print(self, log: LogFile, text: str) -> None:
        """Print a part of a log; its title is printed if the last part was of another log."""
        if log.path != self._path:
            self.end_line()
            self._write(f"==> {log.title} ({log.path})\n")
            self._path = log.path
        self._write(text)
        sys.stdout.flush()

    def end_line(self) -> None:
        """End an unfinished line."""
        if not self._at_line_start:
            self._write("\n")
            sys.stdout.flush()

    def _write(self, text: str) -> None:
        if text:
            shown = terminal(text)
            sys.stdout.write(shown)
            self._at_line_start = shown.endswith("\n")


def _attempt(run_dir: RunDir, number: int | None) -> AttemptDir:
    attempts = run_dir.attempts()
    if not attempts:
        raise BadInput(f"run {run_dir.run_id} has no attempt yet, so it has no logs")
    if number is None:
        return attempts[-1]
    for attempt in attempts:
        if attempt.number == number:
            return attempt
    raise BadInput(f"run {run_dir.run_id} has attempts {', '.join(str(one.number) for one in attempts)}, not {number}")


def _restart(attempt: AttemptDir, choice: LogChoice) -> RestartDir | None:
    """Find the requested restart; by default the newest with such logs, as the evaluator's follows the trainer's."""
    restarts = attempt.restarts()
    if choice.restart is None:
        fitting = [restart for restart in restarts if any(_worker_logs(restart, choice))]
        return next(reversed(fitting or restarts), None)
    for restart in restarts:
        if restart.restart == choice.restart:
            return restart
    known = ", ".join(str(one.restart) for one in restarts) or "none"
    raise BadInput(f"attempt {attempt.number} has restarts {known}, not {choice.restart}")


def _other_roles(run_dir: RunDir, choice: LogChoice) -> list[str]:
    """Roles of which only earlier restarts of the attempt have logs; empty if a role or a restart was asked for."""
    if choice.role or choice.restart is not None:
        return []
    attempt = _attempt(run_dir, choice.attempt)
    newest = _restart(attempt, choice)
    roles = {
        restart.restart: {path.stem.partition("-")[0] for path in restart.logs.glob("*.log")}
        for restart in attempt.restarts()
    }
    shown = roles[newest.restart] if newest is not None else set()
    return sorted(set().union(*roles.values()) - shown)


def _worker_logs(restart: RestartDir, choice: LogChoice) -> Iterator[LogFile]:
    return _logs_in(restart, _ranks(restart), choice, f"attempt {restart.attempt} restart {restart.restart}")


def _group_logs(attempt: AttemptDir, choice: LogChoice) -> Iterator[LogFile]:
    """Find the logs of all starts of the groups other than the one with counted restarts."""
    groups = attempt.groups()
    restarts = attempt.restarts() if groups else []
    ranks = {worker: rank for restart in restarts for worker, rank in _ranks(restart).items()}
    for group in groups:
        yield from _logs_in(group, ranks, choice, f"attempt {group.attempt} generation {group.restart}")


def _logs_in(
    restart: RestartDir, ranks: Mapping[tuple[str, str, int], int], choice: LogChoice, start: str
) -> Iterator[LogFile]:
    for path in sorted(restart.logs.glob("*.log")):
        role, _, rest = path.stem.partition("-")
        node, _, local = rest.rpartition("-")
        if not local.isdigit() or (choice.role and role != choice.role):
            continue
        # Before the agents have published the ranks, assume a single node, where the local rank is the rank.
        rank = ranks.get((role, node, int(local)), int(local))
        if choice.rank is None or rank == choice.rank:
            yield LogFile(path, f"{role} rank {rank} on {node}, {start}")


def _ranks(restart: RestartDir) -> dict[tuple[str, str, int], int]:
    return {
        (rank.role.value, status.node, rank.local_rank): rank.rank
        for status in read_all(restart.agent_statuses(), AgentStatus)
        for rank in status.ranks
        if rank.rank >= 0
    }


def _agent_logs(attempt: AttemptDir) -> list[LogFile]:
    folder = attempt.scheduler_dir
    files = sorted(
        path for suffix in ("out", "err", "log") for path in folder.glob(f"*.{suffix}") if path.stat().st_size
    )
    return [LogFile(path, f"agents of attempt {attempt.number}: {path.name}") for path in files]


def _nothing(run_dir: RunDir, attempt: AttemptDir, restart: RestartDir | None, choice: LogChoice) -> str:
    names = sorted(path.name for path in restart.logs.glob("*.log")) if restart else []
    requested = (
        " ".join(filter(None, [choice.role, f"rank {choice.rank}" if choice.rank is not None else ""])) or "anything"
    )
    available = ", ".join(names) or "no worker's log yet"
    return f"no log of {requested} in attempt {attempt.number} of {run_dir.run_id}; available: {available}"


def _tail(path: Path, num_lines: int, end: int) -> tuple[str, int]:
    """Read the last lines of a file before a position, 0 for all; see :func:`_read`."""
    length = num_lines * TAIL_BYTES_PER_LINE or end
    while True:
        text, read_to = _read(path, max(0, end - length), end)
        lines = text.splitlines(keepends=True)
        # More lines than asked for: the first one may begin in the middle.
        if length >= end or len(lines) > num_lines:
            return "".join(lines[-num_lines:]), read_to
        length *= 4


def _read(path: Path, start: int, end: int) -> tuple[str, int]:
    """Read a part of a file, up to its last whole character: the rest of another one may not be written yet.

    Returns:
        The text, and the position at which it ends.
    """
    if end <= start:  # nothing new, or truncated
        return "", end
    try:
        with open_regular(path) as file:
            file.seek(start)
            content = file.read(end - start)
    except OSError:
        return "", end
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(content)
    return text, end - len(decoder.getstate()[0])
