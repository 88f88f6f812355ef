"""Events of a log: lines that tell of a failure, each with its part in it."""

from dataclasses import dataclass
from enum import IntEnum

from rlhf_core.schemas.failures import FailureKind


class EvidencePart(IntEnum):
    """Role of a piece of evidence in a failure. The lowest decides."""

    ROOT = 0
    """It names the cause."""
    SYMPTOM = 1
    """It shows a failure, but the cause may be named elsewhere."""
    CASCADE = 2
    """It follows from a failure elsewhere, or only reports one."""
    TEARDOWN = 3
    """It belongs to the shutdown, or only sounds like a failure: not evidence."""


@dataclass(frozen=True, slots=True)
class FailureEvent:
    """Line of a log, or error printed in it, as a row of the tables explains it: a phrase, a class of errors, an error
    number, or a place in the code. Of all events of a log, one decides."""

    kind: FailureKind
    part: EvidencePart
    rule: str
    """Row that matched: its pattern, class, number or place."""
    line: str = ""
    """Line as printed."""
    number: int = 0
    """Number of the line, from 0."""
    node: str = ""
    """Node named as the cause in the line; empty if there is none."""
    is_end: bool = False
    """True if it only reports that something ended."""
    is_later: bool = False
    """True if it was raised during the handling of another error."""
    is_local: bool = False
    """True if it is about a device of the node whose process printed it."""
