"""Result of a preflight check."""

from enum import StrEnum

from rlhf_core.schemas.base import Finite, Label, Message, Schema


class CheckStatus(StrEnum):
    """Result of a check."""

    PASSED = "passed"
    WARNING = "warning"
    """A problem that does not stop the run."""
    BLOCKED = "blocked"
    """A problem that prevents the run; nothing is submitted."""
    SKIPPED = "skipped"
    """Not run; ``found`` has the reason."""


class CheckResult(Schema):
    """Finding of a check. ``found``, ``expected`` and ``advice`` are sentences for the user."""

    id: Label
    """Stable dotted name of the check, for instance ``batch.prompts_divide_ranks``."""
    status: CheckStatus
    """Result of the check."""
    found: Message
    """Actual value."""
    expected: Message = ""
    """Expected value; empty if the check passed."""
    advice: Message = ""
    """Advice for the user; empty if the check passed."""
    node: Label = ""
    """Node of the check; empty for checks of the control plane."""
    seconds: Finite = 0.0
    """Duration of the check, in seconds."""
