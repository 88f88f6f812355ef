"""What the tests of the view share: a story as the teller reads it, and looks as the watchdog gives them."""

from typing import Any

from control_fakes import NODE

from rlhf_core.scheduler.base import JobState, JobStatus
from rlhf_core.schemas.attempts import AttemptState
from rlhf_core.schemas.resources import Role
from rlhf_core.watchdog.watcher import AttemptSnapshot, AttemptVerdict


def look(step: int, **changes: Any) -> AttemptSnapshot:
    """A look at an attempt that trains."""
    facts: dict[str, Any] = {
        "attempt": 1,
        "verdict": AttemptVerdict(AttemptState.RUNNING, ""),
        "job": JobStatus(JobState.RUNNING, nodes=(NODE,)),
        "role": Role.TRAINER,
        "restart": 0,
        "restarts_made": 0,
        "step": step,
        "phase": "train",
        "loop": "grpo",
        "metrics": {"time/step_s": 2.0, "reward/mean": 0.25},
        "evaluating": False,
        "events": (),
        "outcome": None,
        "history_behind": "",
    }
    return AttemptSnapshot(**{**facts, **changes})
