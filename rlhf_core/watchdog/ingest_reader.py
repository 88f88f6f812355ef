"""Reader of the new content of a run directory since the history was last updated.

There are two kinds of files. Appended files are read from the last offset to the last newline: a torn last line is left
for its writer to finish, and a torn line in the middle comes from a killed writer. If the bytes before the offset have
changed, the file was truncated or replaced and is read from the beginning. Whole files are read when their fingerprint
changes, and replace their row. A line that cannot be read, is too long, or exceeds a column is skipped, counted, and
recorded as an event of the run. The controller's journal is the exception, because no line of it may be skipped: at an
unreadable line the state of the run stays unchanged, everything else is read, and every read raises an error.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from rlhf_core.errors import JournalDamaged, RunDirError
from rlhf_core.files.appended import FilePosition, is_as_read, read_lines, read_on, tail_mark
from rlhf_core.files.lookups import is_there, paths_in, status_of
from rlhf_core.files.reading import MAX_LINE_BYTES, MAX_SKIP_BYTES, FileLine
from rlhf_core.files.whole import read_model
from rlhf_core.history.batch import (
    EventEntry,
    IngestBatch,
    IngestState,
    JournalEntry,
    MetricsEntry,
    SetAside,
    TelemetryEntry,
    WeightSyncEntry,
)
from rlhf_core.run_dir.attempt import AttemptDir, RestartDir
from rlhf_core.run_dir.journal import read_journal, scan_journal
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.base import LABEL_CHARACTERS, MESSAGE_CHARACTERS, storable_text, utc_now
from rlhf_core.schemas.checkpoint_files import CheckpointManifest
from rlhf_core.schemas.evaluation import EvaluationReport
from rlhf_core.schemas.failures import Decision, Incident
from rlhf_core.schemas.probe import ProbeReport
from rlhf_core.schemas.reports import AgentEvent, AgentStatus, AttemptOutcome, MetricsLine, ReconcileNote, TelemetryLine
from rlhf_core.schemas.weight_sync import WeightSyncLine

BLOCK_BYTES = 2 << 20
"""Bytes of one appended file per batch."""

BATCH_BYTES = 4 << 20
"""Approximate bytes per transaction: limits memory use and the time that other writers wait."""

_MAX_PROBLEMS = 20
"""Problems of a line above which only their number is reported: to name the first, pydantic lists them all."""

_TAIL = "#tail"
_HEAD = "#head"
_TIMES = "#times"
"""Suffixes of the marks stored with the offset of an appended file: its fingerprints, the number of replacements."""
_FAR = 1 << 44

_CHECKPOINT_MARK = re.compile(r"^checkpoints/step-(\d+)/COMPLETE$")

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class SkippedLine:
    """A line or whole file that does not parse."""

    path: str
    """Relative to the run directory."""
    position: int
    """Byte offset of its start; 0 for a whole file."""
    why: str = field(default="", compare=False)
    """Reason, in words."""


@dataclass
class SyncReport:
    """Result of a synchronisation."""

    batches: int = 0
    """Number of transactions."""
    num_skipped: int = 0
    """Number of lines that could not be read or stored: torn by a kill, written by another version, or hostile."""
    skipped: list[SkippedLine] = field(default_factory=list)
    """First skipped line of each file and batch."""

    def add(self, other: "SyncReport") -> None:
        """Add the result of another synchronisation."""
        self.batches += other.batches
        self.num_skipped += other.num_skipped
        self.skipped += other.skipped


class IngestReader:
    """Reader of the lines and files of a run directory that are new since ``state``, up to about ``BATCH_BYTES``,
    without attempts before ``first_attempt``."""

    def __init__(self, run_dir: RunDir, state: IngestState, first_attempt: int = 1) -> None:
        self.report = SyncReport(batches=1)
        self.left_some = False
        """True if the batch does not contain everything new."""
        self.damage: JournalDamaged | None = None
        """Reason why the journal was not read to its end."""
        self._run_dir = run_dir
        self._state = state
        self._first_attempt = first_attempt
        self._batch = IngestBatch(base=state, journal_token=state.journal_token)
        self._bytes = 0

    def read(self) -> IngestBatch:
        """Read everything new, starting with the journal: its events precede the agents' reports on them."""
        if not self._state.stamp and not read_lines(self._run_dir.control, 0, BLOCK_BYTES).lines:
            return self._batch
        self._read_spec()
        self._read_journal()
        self._batch.notes += self._new_lines(self._run_dir.housekeeping, ReconcileNote)
        for attempt in self._run_dir.attempts():
            if attempt.number >= self._first_attempt:
                self._read_attempt(attempt)
        self._read_checkpoints()
        self._read_evaluations()
        self._batch.is_last = not self.left_some
        return self._batch

    def _read_spec(self) -> None:
        mark = self._changed(self._run_dir.spec)
        if mark is None and self._state.stamp:
            return
        stored = self._run_dir.read_spec()
        if stored.run_id != self._run_dir.run_id:
            raise RunDirError(
                f"{self._run_dir.spec} belongs to run {stored.run_id}: the folder was copied or renamed. Restore its "
                f"name, or move it out of {self._run_dir.root.parent}"
            )
        self._batch.stored = stored
        self._batch.run_dir = str(self._run_dir.root.absolute())
        self._batch.offsets[self._relative(self._run_dir.spec)] = mark or 0

    def _read_journal(self) -> None:
        path = self._run_dir.control
        name = self._relative(path)
        position = begin = self._state.offsets.get(name, 0)
        if not is_as_read(path, begin, self._state.offsets.get(f"{name}{_TAIL}", 0)):
            self.damage = _damage(path)
            return
        try:
            for found in scan_journal(path, begin):
                if position - begin >= BLOCK_BYTES:
                    self.left_some = True
                    break
                position = found.end
                # Lines of a writer that had lost its lease do not count.
                if found.line.token >= self._batch.journal_token:
                    self._batch.journal_token = found.line.token
                    self._batch.journal.append(JournalEntry(found.begin, found.line))
        except JournalDamaged as damage:
            self.damage = damage if begin == 0 else _damage(path)
        if position > begin:
            self._batch.offsets |= {name: position, f"{name}{_TAIL}": tail_mark(path, position)}
            self._bytes += position - begin

    def _read_attempt(self, attempt: AttemptDir) -> None:
        touched = len(self._batch.offsets)
        for restart in attempt.restarts():
            self._read_restart(restart)
        self._document(attempt.probe_report, ProbeReport, self._batch.probes, attempt.number)
        self._document(attempt.outcome, AttemptOutcome, self._batch.outcomes, attempt.number)
        if len(self._batch.offsets) > touched:
            self._batch.attempts.add(attempt.number)

    def _read_restart(self, restart: RestartDir) -> None:
        touched = len(self._batch.offsets)
        identity = (restart.attempt, restart.restart)
        for _, line in self._new_lines(restart.metrics, MetricsLine):
            self._batch.metrics.append(MetricsEntry(*identity, line))
        for _, sync in self._new_lines(restart.weight_syncs, WeightSyncLine):
            self._batch.weight_syncs.append(WeightSyncEntry(*identity, sync))
        for path in restart.event_files():
            source = self._relative(path)
            for position, event in self._new_lines(path, AgentEvent):
                self._batch.events.append(EventEntry(source, position, *identity, event))
        for path in restart.telemetry_files():
            node = storable_text(path.stem.removeprefix("telemetry-"), LABEL_CHARACTERS)
            for position, reading in self._new_lines(path, TelemetryLine):
                self._batch.telemetry.append(TelemetryEntry(*identity, node, position, reading))
        for path in restart.agent_statuses():
            self._document(path, AgentStatus, self._batch.nodes, restart.attempt)
        for path in restart.incident_files():
            self._document(path, Incident, self._batch.incidents, restart.attempt)
        for path in restart.decision_files():
            self._document(path, Decision, self._batch.decisions, restart.attempt)
        if len(self._batch.offsets) > touched:
            self._batch.restarts.add(identity)

    def _read_checkpoints(self) -> None:
        folder = self._run_dir.checkpoints_dir
        present = set()
        for path in filter(is_there, (checkpoint / "COMPLETE" for checkpoint in paths_in(folder, "step-*"))):
            manifests: list[CheckpointManifest] = []
            self._document(path, CheckpointManifest, manifests)
            self._batch.checkpoints += [(self._relative(path.parent), manifest) for manifest in manifests]
            present.add(self._relative(path))
        if not is_there(folder):
            return  # missing or unreachable right now: no conclusion about single checkpoints
        now = utc_now()
        for name in self._state.offsets.keys() - present:
            match = _CHECKPOINT_MARK.match(name)
            if match:
                self._batch.removed_checkpoints[int(match[1])] = now
                self._batch.forgotten.add(name)

    def _read_evaluations(self) -> None:
        for path in self._run_dir.evaluations():
            self._document(path, EvaluationReport, self._batch.evaluations)

    def _new_lines(self, path: Path, schema: type[Model]) -> Iterator[tuple[int, Model]]:
        """Yield the new lines, parsed, each with its offset, which identifies it permanently."""
        name = self._relative(path)
        known = self._state.offsets
        before = FilePosition(*(known.get(f"{name}{mark}", 0) for mark in ("", _TAIL, _HEAD)))
        times = known.get(f"{name}{_TIMES}", 0)
        if self._is_full():
            return
        lines, after, is_other = read_on(path, before, BLOCK_BYTES)
        if after.offset == before.offset and not is_other:
            return
        self._batch.offsets |= {name: after.offset, f"{name}{_TAIL}": after.tail, f"{name}{_HEAD}": after.head}
        position = before.offset
        if is_other:
            # Lines of the replaced file keep their positions, so the new ones start beyond any offset of a file.
            times, position = times + 1, 0
            self._batch.offsets[f"{name}{_TIMES}"] = times
        # Only the parsed part of an overlong line counts.
        self._bytes += sum(len(line.text or b"") for line in lines)
        if after.offset - position < MAX_SKIP_BYTES:  # the rest of a longer line waits for the next synchronisation
            self.left_some |= path.stat().st_size - position > BLOCK_BYTES  # a smaller remainder is a torn last line
        yield from self._parsed(name, lines, schema, times * _FAR)

    def _parsed(
        self, name: str, lines: Sequence[FileLine], schema: type[Model], beyond: int
    ) -> Iterator[tuple[int, Model]]:
        first: SkippedLine | None = None
        num_skipped = 0
        for begin, text in lines:
            try:
                if text is None:
                    raise ValueError(f"longer than {MAX_LINE_BYTES} bytes")
                parsed = schema.model_validate_json(text)
            except ValueError as error:
                num_skipped += 1
                first = first or SkippedLine(name, begin, _reason(error))
            else:
                yield begin + beyond, parsed
        if first is not None:
            lines_text = "a line was" if num_skipped == 1 else f"{num_skipped} lines were"
            message = f"{lines_text} left out, the first at byte {first.position}: {first.why}"
            self._set_aside(first, num_skipped, beyond, message)

    def _set_aside(self, first: SkippedLine, num_skipped: int, beyond: int, message: str) -> None:
        """Count skipped lines, and record them as one event per file and batch, as there may be millions."""
        self.report.skipped.append(first)
        self.report.num_skipped += num_skipped
        named = storable_text(f"{first.path}: {message}", MESSAGE_CHARACTERS)
        self._batch.set_aside.append(SetAside(first.path, first.position + beyond, utc_now(), named))

    def _document(self, path: Path, schema: type[Model], found: list[Model], attempt: int | None = None) -> None:
        """Read a whole file if it changed since the last read.

        Args:
            attempt: attempt whose folder holds the file; the file must name the same attempt.
        """
        mark = self._changed(path)
        if mark is None or self._is_full():
            return
        name = self._relative(path)
        self._batch.offsets[name] = mark
        content = read_model(path, schema)
        if content is None or attempt not in (None, getattr(content, "attempt", None)):
            problem = f"it is no {schema.__name__}" if content is None else f"it is not about attempt {attempt}"
            self._set_aside(SkippedLine(name, 0, problem), 1, 0, f"it was skipped: {problem}")
            return
        found.append(content)
        self._bytes += path.stat().st_size

    def _is_full(self) -> bool:
        full = self._bytes >= BATCH_BYTES
        self.left_some |= full
        return full

    def _changed(self, path: Path) -> int | None:
        """Fingerprint of a whole file, if it differs from the last read. It is taken before reading, so a file that is
        replaced in between is read once more."""
        status = status_of(path)
        if status is None:
            return None
        text = f"{status.st_ino}:{status.st_size}:{status.st_mtime_ns}".encode()
        mark = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
        return None if self._state.offsets.get(self._relative(path)) == mark else mark

    def _relative(self, path: Path) -> str:
        # A poll asks for dozens, for which pathlib takes as long as for the reading of the files.
        return storable_text(str(path)[len(str(self._run_dir.root)) + 1 :])


def _reason(error: ValueError) -> str:
    """Reason why a line does not match its schema, without quoting its content."""
    if not isinstance(error, ValidationError):
        return str(error)
    if error.error_count() > _MAX_PROBLEMS:
        return f"{error.error_count()} problems"
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where[:LABEL_CHARACTERS]}: {first['msg']}" if where else first["msg"]


def _damage(path: Path) -> JournalDamaged:
    """Build the error for a journal that cannot be read beyond the history's position."""
    try:
        read_journal(path)
    except JournalDamaged as first:
        return first
    return JournalDamaged(
        f"{path} changed before the position up to which the history has read it: `rlhf db rebuild` reads it again "
        "from the beginning"
    )
