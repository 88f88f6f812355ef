"""Classification of a printed error by its message, its class, its number and its location.

In this order: a message that names a cause (a full disk, a missing symbol) takes precedence over the class, because
libraries raise the same causes with their own classes; the class takes precedence over the location. An error raised in
a reward function is attributed to it, unless the machine failed. An error of a service outside the job is ``unknown``:
it is not one of the kinds, and a retry may succeed.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rlhf_core.diagnosis.logs import code_locations, exceptions
from rlhf_core.diagnosis.logs.code_locations import CodeLocation
from rlhf_core.diagnosis.logs.events import EvidencePart, FailureEvent
from rlhf_core.diagnosis.logs.lines import LogLine
from rlhf_core.diagnosis.logs.signatures import table as signatures
from rlhf_core.diagnosis.logs.tracebacks import Raised
from rlhf_core.schemas.failures import FailureKind as Kind

_CONNECTIONS = frozenset({Kind.NETWORK, Kind.RENDEZVOUS, Kind.UNKNOWN, Kind.COLLECTIVE_HANG})
"""Kinds that depend on the other end of a connection."""
_OF_THE_CODE = frozenset({Kind.DATA, Kind.CONFIG, Kind.SHAPE, Kind.UNKNOWN})
"""Kinds whose phrases a reward function may print itself; they then count as its failure."""
_WRITES = re.compile(
    r"mkdir|makedirs|open|_?acquire|touch|replace|_?rename|symlink|unlink|copy(?:file)?|move|rmtree|__enter__|chmod|write_\w+|_replace_file"
)
_LABEL = re.compile(r"[\w.-]{1,60}[:=(]")
"""Name of a program before its output, or of a value before the value."""
_FORKS = re.compile(r"_execute_child|\bfork\(")
"""Function or line of code that makes a process."""
_PARENT_DIED = "multiprocessing/spawn.py"


def event_of(raised: Raised, following: Sequence[str] = ()) -> FailureEvent:
    """Classify an error.

    Args:
        raised: The error.
        following: Texts of the lines after it, because a long message may be wrapped.
    """
    by_phrase = _by_phrase(raised.line)
    if (by_phrase is None or by_phrase.kind is Kind.UNKNOWN) and following:
        whole = replace(raised.line, text=" ".join([raised.line.text, *following]))
        wrapped = _by_phrase(whole)
        by_phrase = wrapped if wrapped is not None and wrapped.part is not EvidencePart.TEARDOWN else by_phrase
    event = _decide(raised, by_phrase)
    return replace(event, is_later=raised.is_later, line=raised.line.raw.strip(), number=raised.line.number)


def _by_phrase(line: LogLine) -> FailureEvent | None:
    loud = replace(line, is_quiet=False) if line.is_quiet else line
    event = signatures.match_line(loud)
    # Unlike a line of NCCL, a raised error may come from another node: Ray, for one, raises errors again where the
    # result is awaited. So it does not show that the device is on the node of the process that printed it.
    return replace(event, is_local=False) if event is not None else None


def _decide(raised: Raised, by_phrase: FailureEvent | None) -> FailureEvent:
    if by_phrase is not None and by_phrase.part is EvidencePart.TEARDOWN:
        return by_phrase
    if raised.error == "UnpicklingError" and any(_PARENT_DIED in frame.path for frame in raised.frames):
        return FailureEvent(Kind.UNKNOWN, EvidencePart.CASCADE, "a child whose parent had died", is_end=True)
    if raised.error in exceptions.WRAPPERS and (by_phrase is None or by_phrase.is_end):
        return _of_wrapper(raised)
    place = code_locations.location_of(raised)
    if (
        place is not None
        and place.kind is Kind.REWARD_FUNCTION
        # A call that does not fit the function is the function's fault here, not that of a library's version.
        and (by_phrase is None or by_phrase.kind in _OF_THE_CODE or raised.error == "TypeError")
    ):
        return FailureEvent(place.kind, EvidencePart.SYMPTOM, place.example)
    known = by_phrase or _of_class(raised)
    if (known is None or known.kind in _CONNECTIONS) and _is_service(raised):
        refused = exceptions.of_status(raised.message)
        if refused is not None:
            return refused
        if any(code_locations.ENGINE_CLIENTS.search(frame.path) is not None for frame in raised.frames):
            return FailureEvent(Kind.ENGINE, EvidencePart.CASCADE, "a request to an engine of the job")
        return FailureEvent(Kind.UNKNOWN, EvidencePart.SYMPTOM, "a service outside the job")
    if known is not None and known.kind is Kind.CONFIG and known.part is EvidencePart.SYMPTOM:
        return _of_files(raised, known)
    return known or exceptions.of_number(raised.message) or _of_place(place, raised.line.process)


def _of_class(raised: Raised) -> FailureEvent | None:
    innermost = " ".join(f"{frame.function} {frame.code}" for frame in raised.frames[-1:])
    if raised.error == "BlockingIOError" and _FORKS.search(innermost) is not None:
        return FailureEvent(Kind.UNKNOWN, EvidencePart.SYMPTOM, "a limit of processes")
    return exceptions.of_class(raised.name)


def _of_place(place: CodeLocation | None, process: str) -> FailureEvent:
    if place is not None:
        return FailureEvent(place.kind, EvidencePart.SYMPTOM, place.example)
    if code_locations.ENGINE_PROCESSES.search(process) is not None:
        return FailureEvent(Kind.ENGINE, EvidencePart.SYMPTOM, "an error of an engine's process")
    return FailureEvent(Kind.UNKNOWN, EvidencePart.CASCADE, "an error")


def _of_wrapper(raised: Raised) -> FailureEvent:
    inner = exceptions.of_class(raised.inner) if raised.inner else None
    if inner is None:
        return FailureEvent(Kind.UNKNOWN, EvidencePart.CASCADE, "a wrapper", is_end=True)
    # The class without its module: the error itself is also printed elsewhere, with more detail.
    return replace(inner, part=EvidencePart.CASCADE, is_end=True)


def _of_files(raised: Raised, known: FailureEvent) -> FailureEvent:
    """Classify a missing or forbidden file by its origin: the user's settings, a data library, or a shared folder."""
    package = code_locations.raised_in(raised)
    if raised.error == "FileNotFoundError" and package == "datasets":
        return replace(known, kind=Kind.DATA, rule="a file of the library of data sets")
    writes = any(_WRITES.fullmatch(frame.function) for frame in raised.frames[-3:])
    if raised.error == "PermissionError" and package in code_locations.CACHES and writes:
        return replace(known, kind=Kind.FILE_SYSTEM, rule="a folder that a library keeps")
    return known


def _is_service(raised: Raised) -> bool:
    if exceptions.SERVICE_ERRORS.search(raised.name) is not None:
        return True
    return code_locations.raised_in(raised) in code_locations.SERVICES


def continued(texts: Sequence[str]) -> Iterator[str]:
    """Yield the lines that continue a message: they start in lower case."""
    for text in texts:
        if not text[:1].islower() or _LABEL.match(text) is not None:
            return
        yield text
