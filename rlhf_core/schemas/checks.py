"""What a preflight check found."""

from enum import StrEnum

from rlhf_core.schemas.base import Schema


class CheckStatus(StrEnum):
    """How a check ended."""

    PASSED = "passed"
    WARNING = "warning"
    """Worth reading; does not stop the run."""
    BLOCKED = "blocked"
    """The run cannot work; nothing is submitted."""
    SKIPPED = "skipped"
    """Not made; ``found`` says why."""


class CheckResult(Schema):
    """One finding. ``found``, ``expected`` and ``advice`` are sentences for a person."""

    id: str
    """Stable dotted name of the check, for instance ``batch.divides_ranks``."""
    status: CheckStatus
    """How it ended."""
    found: str
    """What is there."""
    expected: str = ""
    """What should be there; empty when the check passed."""
    advice: str = ""
    """What to do about it; empty when the check passed."""
    node: str = ""
    """The node it was made on; empty for checks of the control plane."""
    seconds: float = 0.0
    """How long the check took, in seconds."""
