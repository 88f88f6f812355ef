"""Steps of a program that resumes: other numbers that count something else, and a start from the beginning."""

from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.errors import TrainerIncomplete
from rlhf_core.schemas.command_trainer import ProgressSource
from rlhf_core.worker.command.follower import Follower
from rlhf_core.worker.command.observation import Reading


def note(follower: Any, *steps: int | None) -> int:
    """Record the steps of several sources, and return the program's step."""
    Follower._note_steps(follower, [(ProgressSource.STDOUT, Reading(step=step)) for step in steps])
    return int(follower._step)


def follower_from(step: int) -> Any:
    order = SimpleNamespace(checkpoint=f"step-{step:06}")
    return SimpleNamespace(
        _first_step=step,
        _step=step,
        _has_resumed=False,
        _place=SimpleNamespace(order=order),
        _require_together=lambda: None,
    )


def test_lower_numbers_around_a_resume_are_no_steps() -> None:
    """Step 0 of an evaluation before training resumes; later the epoch of a validation, or its bar (3/50)."""
    follower = follower_from(4000)
    assert [note(follower, *steps) for steps in [(None, 0), (3, 4001), (4002,), (3, None)]] == [4000, 4001, 4002, 4002]


def test_a_program_that_starts_over_is_found_by_its_first_step() -> None:
    follower = follower_from(4000)
    with pytest.raises(TrainerIncomplete, match=r"found step 1 .* expected 4000 or later"):
        note(follower, None, 1)
