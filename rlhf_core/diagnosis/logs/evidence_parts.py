"""Roles of evidence in a failure."""

from enum import IntEnum


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
