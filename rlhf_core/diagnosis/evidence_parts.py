"""Parts that a piece of evidence can play in a failure."""

from enum import IntEnum


class EvidencePart(IntEnum):
    """Part that a piece of evidence plays in a failure. Lower decides over higher."""

    ROOT = 0
    """It says what failed."""
    SYMPTOM = 1
    """Something that failed shows itself here, and may say more elsewhere."""
    CASCADE = 2
    """It follows from a failure elsewhere, or says no more than that there was one."""
    TEARDOWN = 3
    """It belongs to the end of everything, or only sounds like a failure: says nothing."""
