"""Runs whose directory is gone: telling that apart from an unreachable file system, and closing the run in the history.

A run that only the history still knows is closed there, with the events that its journal would have held. If the
directory comes back (it was moved, or the file system was away for very long), its rows are rebuilt from its files.
"""

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from rlhf_core.diagnosis.failure import Failure, fingerprint
from rlhf_core.errors import RunDirError, RunDirGone
from rlhf_core.files.lookups import is_there
from rlhf_core.history import queries
from rlhf_core.history.batch import IngestBatch, JournalEntry
from rlhf_core.history.store import HistoryStore
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import ATTEMPT_ENDS, RUN_ENDS, AttemptState, RunState, StageState
from rlhf_core.schemas.failures import Action, DecidedBy, Decision, FailureKind
from rlhf_core.schemas.journal import (
    AttemptMoved,
    ControlEvent,
    DecisionMade,
    IncidentFound,
    JournalLine,
    RunMoved,
    StageEnded,
)
from rlhf_core.watchdog.ingest import GONE_MARK

GONE_S = 30.0
"""Absence after which a run directory counts as gone, while the folder of all runs is present."""
AWAY_S = 600.0
"""Longest time that a controller waits for an unreachable file system."""

_NOT_TRIED = "there is no directory to resume from"


def identity(folder: Path) -> tuple[int, int] | None:
    """Return device and inode of a folder; None if it is missing or does not answer. A mount point without its file
    system has a different identity."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


class Presence:
    """Monitor of a run directory: present, missing, or unreachable with its file system.

    Args:
        run_dir: the directory; it must exist now.
        clock: monotonic seconds.
    """

    def __init__(self, run_dir: RunDir, clock: Callable[[], float]) -> None:
        self._run_dir = run_dir
        self._clock = clock
        self._runs = identity(run_dir.root.parent)
        self._since: tuple[str, float] | None = None
        self.is_gone = False
        """True once it was found to be gone; never reset."""

    def problem(self, attempt: int = 0) -> str:
        """Current problem with the directory; empty if it is present.

        Args:
            attempt: newest attempt of the run, whose placement must exist too; 0 before the first.

        Raises:
            RunDirGone: it has been missing for ``GONE_S``, while the folder of all runs was present.
            RunDirError: its file system has been unreachable for ``AWAY_S``.
        """
        kind, problem = self._check(attempt)
        if not kind:
            self._since = None
            return ""
        now = self._clock()
        if self._since is None or self._since[0] != kind:
            self._since = (kind, now)
        passed_s = now - self._since[1]
        if kind == "missing" and passed_s > GONE_S:
            self.is_gone = True
            raise RunDirGone(f"{problem} for {passed_s:.0f} s, although {self._run_dir.root.parent} exists")
        if kind == "away" and passed_s > AWAY_S:
            raise self.unreadable(problem, passed_s)
        return problem

    def unreadable(self, problem: str, seconds: float) -> RunDirError:
        """The error that ends a controller whose file system has been unreachable for so many seconds."""
        return RunDirError(
            f"{problem} for {seconds:.0f} s. The run is unchanged: repair the file system, then `rlhf resume "
            f"{self._run_dir.run_id}`"
        )

    def _check(self, attempt: int) -> tuple[str, str]:
        run_dir = self._run_dir
        files = [run_dir.spec, run_dir.control, *([run_dir.attempt(attempt).placement] if attempt else [])]
        for path in files:
            try:
                if is_there(path):
                    continue
            except OSError as error:
                return "away", f"{path} could not be read ({error.strerror})"
            if identity(run_dir.root.parent) == self._runs:
                return "missing", f"{path if run_dir.root.is_dir() else run_dir.root} has been missing"
            return "away", f"the file system of {run_dir.root.parent} has been unavailable"
        return "", ""


def close_gone(run_id: str, store: HistoryStore, cause: str, now: datetime) -> bool:
    """Close a run whose directory is gone: failed, with the cause as its diagnosis. Idempotent.

    Returns: False, with nothing written, if it had already ended.

    Raises:
        HistoryError: the history does not answer, or does not know the run.
    """
    while True:
        state = store.ingest_state(run_id)
        known = queries.show_run(store, run_id)
        if known.run["state"] in RUN_ENDS:
            return False
        position = max(state.offsets.get("control.jsonl", 0), 1)
        lines = [
            JournalEntry(position + index, JournalLine(sequence=0, token=state.journal_token, time=now, event=event))
            for index, event in enumerate(_last_lines(known, cause, now))
        ]
        batch = IngestBatch(base=state, journal_token=state.journal_token, journal=lines, offsets={GONE_MARK: 1})
        if store.apply(run_id, batch):
            return True


def _last_lines(known: queries.RunDetails, cause: str, now: datetime) -> list[ControlEvent]:
    """The lines that the journal would contain, had it still been possible to write to it."""
    events: list[ControlEvent] = [
        StageEnded(stage_index=stage["stage_index"], state=StageState.FAILED, message=cause)
        for stage in known.stages
        if stage["state"] == StageState.RUNNING
    ]
    for attempt in known.attempts:
        number = attempt["number"]
        if attempt["state"] in ATTEMPT_ENDS:
            continue
        kind = FailureKind.FILE_SYSTEM
        incident = Failure(kind, cause, fingerprint(kind, GONE_MARK)).incident(number, 0, now)
        decision = Decision(
            attempt=number,
            restart=0,
            action=Action.STOP,
            reason=_NOT_TRIED,
            decided_by=DecidedBy.CONTROLLER,
            decided_at=now,
        )
        events += [IncidentFound(incident=incident), DecisionMade(decision=decision)]
        events.append(AttemptMoved(attempt=number, state=AttemptState.LOST, cause=cause, failure_kind=kind))
    return [*events, RunMoved(state=RunState.FAILED, cause=cause)]
