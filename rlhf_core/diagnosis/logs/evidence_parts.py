"""Parts that evidence can play in a failure."""

from enum import IntEnum


class EvidencePart(IntEnum):
    """Part of a piece of evidence in a failure. The lowest one decides."""

    ROOT = 0
    """It names the cause."""
    SYMPTOM = 1
    """It shows that something failed, whose cause may be named elsewhere."""
    CASCADE = 2
    """It follows from a failure elsewhere, or only says that there was one."""
    TEARDOWN = 3
    """It belongs to the shutdown, or only sounds like a failure: no evidence."""
