"""What a preflight check found."""

from enum import StrEnum

from rlhf_core.schemas.base import Finite, Label, Message, Schema


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

    id: Label
    """Stable dotted name of the check, for instance ``batch.divides_ranks``."""
    status: CheckStatus
    """How it ended."""
    found: Message
    """What is there."""
    expected: Message = ""
    """What should be there; empty when the check passed."""
    advice: Message = ""
    """What to do about it; empty when the check passed."""
    node: Label = ""
    """The node it was made on; empty for checks of the control plane."""
    seconds: Finite = 0.0
    """How long the check took, in seconds."""
