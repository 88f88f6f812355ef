"""Search of a log for the evidence that decides its classification.

Each line is split into process and text (:mod:`rlhf_core.diagnosis.logs.lines`); lines of a traceback are joined with
their frames (:mod:`rlhf_core.diagnosis.logs.tracebacks`) and classified
(:mod:`rlhf_core.diagnosis.logs.raised_errors`); all others are matched against phrases
(:mod:`rlhf_core.diagnosis.logs.signatures.table`). The result is a list of *events*, each with its kind and its part in
the failure. Their order decides: an event after which training continued has not ended it, events after a user's
cancellation are its consequences, and of several roots the first counts.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rlhf_core.diagnosis.logs import metric_lines
from rlhf_core.diagnosis.logs.events import EvidencePart, FailureEvent
from rlhf_core.diagnosis.logs.lines import LogLine, read_line
from rlhf_core.diagnosis.logs.raised_errors import continued, event_of
from rlhf_core.diagnosis.logs.signatures import table as signatures
from rlhf_core.diagnosis.logs.tracebacks import CONTINUED, Frame, Raised, TracebackReader
from rlhf_core.schemas.failures import FailureKind as Kind

GOING_ON = 3
"""Number of steps after an error that prove that training survived it. Fewer may come from a buffer flushed at exit."""
HEAD, TAIL = 1_000_000, 4_000_000
"""Characters read from the start and end of a long log, to limit the time."""
_BY_REQUEUE = "DUE TO JOB REQUEUE"
"""Part of Slurm's message about a requeued job, which is not a failure if the job requeued itself."""
_STARTS_OVER = re.compile(r"(?<!run)(?<!batch)(?<!alloc)(?<!stepd): error: ")
"""Part of a command's message about wrong arguments; the rest of the file belongs to another start. Slurm's programs
print all their errors so."""
_OF_THE_START = frozenset({Kind.RENDEZVOUS})
"""Kinds that prevent every step: the first step proves that they were survived."""
_OF_THE_MACHINE = frozenset({Kind.DISK_FULL, Kind.HOST_OOM, Kind.CUDA_OOM, Kind.GPU_HARDWARE, Kind.ILLEGAL_ACCESS})
"""Kinds that also count in an error that Python ignored: the machine failed, wherever the program noticed it."""
_ADDRESS = re.compile(r"\b0x[0-9a-f]{8,16}\b")
_REASONS = frozenset({Kind.PREEMPTION, Kind.TIME_LIMIT, Kind.NODE_LOST, Kind.USER_CANCEL})


def find(text: str, known: "KnownLines | None" = None) -> FailureEvent | None:
    """Find the event that decides the classification of a log; None if it shows no failure.

    Args:
        known: Lines of other logs, read before.
    """
    return decide(events(text, known))


def find_error(error_type: str, message: str, traceback: str) -> FailureEvent:
    """Classify an error that a worker recorded itself, by its full class, message and traceback.

    If it is not specific, the errors that it was raised from are considered.
    """
    reader = TracebackReader()
    lines = [LogLine(number, raw, "", False, raw) for number, raw in enumerate(traceback.splitlines())]
    chain = [raised for line in lines if isinstance(raised := reader.read(line), Raised)]
    frames = reader.last_frames or (chain[-1].frames if chain else ())
    name = error_type.removeprefix("builtins.")
    error_line = LogLine(len(lines), f"{name.rpartition('.')[2]}: {message}", "", False, message)
    own = event_of(Raised(name, "", message, frames, error_line, False))
    if own.kind is not Kind.UNKNOWN:
        return own
    return decide([*(event_of(raised) for raised in chain), own]) or own


def decide(found: Sequence[FailureEvent]) -> FailureEvent | None:
    """Choose the deciding event: roots before symptoms before cascades, then the first."""
    relevant = [event for event in found if event.part is not EvidencePart.TEARDOWN]
    of_this_start = [
        event for event in relevant if event.kind is not Kind.CONFIG or _STARTS_OVER.search(event.line) is None
    ]
    if any(event.part is not EvidencePart.CASCADE for event in of_this_start):
        relevant = of_this_start
    relevant = _around_cancellation(relevant)
    return min(relevant, key=lambda event: (event.part, event.is_end, event.number), default=None)


def _around_cancellation(relevant: list[FailureEvent]) -> list[FailureEvent]:
    """Drop the events caused by a cancellation, or the cancellation if it caused none.

    It counts only if nothing failed before it, because Slurm prints it for every step that it ends, including failed
    ones. Then everything after it is its consequence, except for the reason given by the scheduler.
    """
    cancelled = next((position for position, event in enumerate(relevant) if event.kind is Kind.USER_CANCEL), None)
    if cancelled is None:
        return relevant
    others = [event for event in relevant if event.kind is not Kind.USER_CANCEL]
    if relevant[:cancelled]:
        return others
    if relevant[cancelled].is_later:
        # Interrupted during the handling of an error that is not in the log before: later events count.
        return [event for event in others if event.part is not EvidencePart.CASCADE] or relevant
    return [event for event in relevant if event.kind in _REASONS or (event.kind is Kind.HOST_OOM and event.node)]


def events(text: str, known: "KnownLines | None" = None) -> list[FailureEvent]:
    """List the events of failures in a log that were not survived, in order."""
    if len(text) > HEAD + TAIL:
        text = f"{text[:HEAD]}\n{text[-TAIL:]}"
    lines = text.splitlines()
    reading = _Reading(KnownLines() if known is None else known)
    for number, raw in enumerate(lines):
        reading.take(number, raw, lines)
    found = reading.found
    if not found and reading.tracebacks.is_cut_off:
        line, at = "a traceback that is cut off", len(lines) - 1
        found.append(FailureEvent(Kind.UNKNOWN, EvidencePart.CASCADE, "a traceback", line, at, is_end=True))
    diverged = metric_lines.divergence(reading.metrics)
    if diverged is not None:
        at = lines.index(diverged)
        found.append(FailureEvent(Kind.NON_FINITE, EvidencePart.ROOT, "metrics", diverged.strip(), at))
    return found


@dataclass
class KnownLines:
    """Lines and errors that were matched before. Hundreds of ranks print the same ones, each into its own log."""

    matched: dict[tuple[str, bool], FailureEvent | None] = field(default_factory=dict)
    weighed: dict[tuple[str, tuple[Frame, ...], tuple[str, ...], str], FailureEvent] = field(default_factory=dict)


def _is_progress_with_prefix(raw: str) -> bool:
    """True for a completed step whose form is known by the start of its line, after the prefix of a launcher."""
    return "loss" in raw and metric_lines.is_progress(read_line(raw).text)


def _is_chatter(raw: str) -> bool:
    """True for a line of NCCL that is neither a warning nor torn by an error. With ``NCCL_DEBUG=INFO``, hundreds of
    ranks print hundreds each, no two of them equal."""
    return "NCCL INFO" in raw and "Error" not in raw and "Traceback" not in raw


class _Reading:
    """State of the reader of one log."""

    def __init__(self, known: KnownLines) -> None:
        """Start without events."""
        self.found: list[FailureEvent] = []
        self.metrics: list[str] = []
        self.tracebacks = TracebackReader()
        self._known = known
        self._steps = 0
        self._bars: dict[int, int] = {}
        self._moved = 0
        self._requeued = False
        self._in_table = False

    def take(self, number: int, raw: str, lines: Sequence[str]) -> None:
        """Read one line."""
        if _is_chatter(raw) or self._is_in_table(raw):
            return
        if metric_lines.is_requeued(raw):
            self._requeued = True
            self._keep_roots()
            return
        if self._is_progress(raw) or not (self.tracebacks.is_open or signatures.may_match(raw)):
            return
        line = read_line(raw, number)
        read = self.tracebacks.read(line)
        if isinstance(read, Raised):
            if line.is_quiet and not read.frames:
                return
            following = [read_line(later).text for later in lines[number + 1 : number + 1 + CONTINUED]]
            event: FailureEvent | None = self._of_error(read, tuple(continued(following)))
        else:
            event = None if read else self._of_phrase(line)
        if event is None or (self._requeued and _BY_REQUEUE in event.line):
            return
        if isinstance(read, Raised) and read.is_ignored and event.kind not in _OF_THE_MACHINE:
            return
        self._steps = 0 if event.part is EvidencePart.ROOT else self._steps
        self._moved = 0
        self.found.append(event)

    def _is_in_table(self, raw: str) -> bool:
        """Return True for a row of a table that Rich has drawn, as TRL does for completions: these contain any errors.
        A box around a traceback has neither the edge nor the rules of a table."""
        if "┏" in raw or "├" in raw:
            self._in_table = True
        elif "└" in raw or "╭" in raw or "╰" in raw:
            self._in_table = False
        return self._in_table and "│" in raw

    def _of_error(self, raised: Raised, following: tuple[str, ...]) -> FailureEvent:
        # All ranks print the same error: it is classified once.
        key = (raised.line.text, raised.frames, following, raised.line.process)
        weighed = self._known.weighed
        if key not in weighed:
            weighed[key] = event_of(raised, following)
        at = raised.line
        return replace(weighed[key], line=at.raw.strip(), number=at.number, is_later=raised.is_later)

    def _of_phrase(self, line: LogLine) -> FailureEvent | None:
        # Every rank prints the same line, often repeatedly: it is matched once.
        # Addresses differ from process to process, and no phrase contains one.
        line = replace(line, text=_ADDRESS.sub("0x0", line.text)) if "0x" in line.text else line
        key = (line.text, line.is_quiet)
        if key not in self._known.matched:
            self._known.matched[key] = signatures.match_line(line)
        matched = self._known.matched[key]
        return None if matched is None else replace(matched, line=line.raw.strip(), number=line.number)

    def _is_progress(self, raw: str) -> bool:
        """Record a completed step: events before it have not ended the training."""
        if metric_lines.is_metric(raw):
            self.metrics.append(raw)
        bar = metric_lines.bar(raw)
        if bar is not None:
            self._advance(*bar)
            return False
        if not (metric_lines.is_progress(raw) or _is_progress_with_prefix(raw)):
            return False
        self._steps += 1
        if self._steps >= GOING_ON or metric_lines.is_end(raw):
            self.found.clear()
        else:
            self._keep_roots()
            self.found = [event for event in self.found if event.kind not in _OF_THE_START]
        return True

    def _advance(self, done: int, total: int) -> None:
        """Record a progress bar: one that was shown before an error and advances after it proves that it was
        survived."""
        if total in self._bars or not self.found:
            self._moved += done > self._bars.get(total, done)
            self._bars[total] = done
        if self._moved >= GOING_ON:
            self._keep_roots()

    def _keep_roots(self) -> None:
        self.found = [event for event in self.found if event.part is EvidencePart.ROOT]
