"""Parts that a piece of evidence can play in a failure."""

from enum import IntEnum


class Part(IntEnum):
    """Which part a line plays in a failure. Lower decides over higher."""

    ROOT = 0
    """It says what failed."""
    SYMPTOM = 1
    """Something that failed shows itself here, and may say more elsewhere."""
    CASCADE = 2
    """What follows from a failure elsewhere, or says no more than that there was one."""
    TEARDOWN = 3
    """How everything is ended: says nothing."""
