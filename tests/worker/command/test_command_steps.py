"""Steps of a program that resumes: other numbers that count something else, and a start from the beginning."""

from collections.abc import Sequence

import pytest

from rlhf_core.errors import TrainerIncomplete
from rlhf_core.schemas.command_trainer import CommandTrainer, ProgressSource
from rlhf_core.schemas.reports import Phase
from rlhf_core.worker.command.observation import Reading, StepFigures
from rlhf_core.worker.command.progress import STEADY_POLLS, TrainerProgress


def note(progress: TrainerProgress, *steps: int | None) -> int:
    """Record the steps of several sources, and return the program's step."""
    progress.note_steps([(ProgressSource.STDOUT, Reading(step=step)) for step in steps])
    return progress.step


@pytest.fixture
def resumed() -> TrainerProgress:
    trainer = CommandTrainer.model_validate({"argv": ["python", "train.py"], "num_steps": 5000})
    return TrainerProgress(trainer, first_step=4000, checkpoint="step-004000", read_step_of_job=lambda: 0)


def test_lower_numbers_around_a_resume_are_no_steps(resumed: TrainerProgress) -> None:
    """Step 0 of an evaluation before training resumes; later the epoch of a validation, or its bar (3/50)."""
    assert [note(resumed, *steps) for steps in [(None, 0), (3, 4001), (4002,), (3, None)]] == [4000, 4001, 4002, 4002]


def test_a_program_that_starts_over_is_found_by_its_first_step(resumed: TrainerProgress) -> None:
    with pytest.raises(TrainerIncomplete, match=r"found step 1 .* expected 4000 or later"):
        note(resumed, None, 1)


Scalars = Sequence[tuple[int, str]]


def note_scalars(progress: TrainerProgress, *polls: Scalars) -> list[int]:
    """Record what each poll found in TensorBoard's files, and return the program's steps."""
    noted = []
    for scalars in polls:
        figures = [StepFigures(step, {name: 0.5}) for step, name in scalars]
        newest = max((step for step, _ in scalars), default=None)
        progress.note_steps([(ProgressSource.TENSORBOARD, Reading(step=newest, metrics=figures))])
        noted.append(progress.step)
    return noted


@pytest.mark.parametrize(
    "polls",
    [
        [[(3, "epoch/lr")], [(4001, "loss")], [(4, "epoch/lr")]],
        [[(3, "epoch/lr"), (4001, "loss")], [(4, "epoch/lr"), (4050, "loss")]],
        [[(3, "epoch/lr"), (4, "epoch/lr"), (4001, "loss"), (4002, "loss")]],
        [[(0, "loss")], [(4001, "loss")]],
    ],
    ids=["one after the other", "both at once", "two epochs at once", "step 0"],
)
def test_a_scalar_by_epoch_after_a_resume_is_no_start_over(resumed: TrainerProgress, polls: Sequence[Scalars]) -> None:
    """`add_scalar("epoch/lr", rate, epoch)` may come first."""
    assert note_scalars(resumed, *polls)[-1] > 4000


@pytest.mark.parametrize(
    "polls",
    [
        [[(1, "loss")], [(2, "loss")]],
        [[(2500, "loss")], [], [(5000, "loss"), (5000, "eval/loss")]],
        [[(2500, "loss"), (5000, "loss")]],
    ],
    ids=["every step", "rarely", "rarely, both at once"],
)
def test_scalars_that_go_on_from_the_beginning_are_a_start_over(
    resumed: TrainerProgress, polls: Sequence[Scalars]
) -> None:
    """The second may already be past the checkpoint."""
    first = polls[0][0][0]
    with pytest.raises(TrainerIncomplete, match=rf"found step {first} \(tensorboard\), expected 4000 or later"):
        note_scalars(resumed, *polls)


@pytest.mark.parametrize(
    ("settings", "step_of_job", "phase"),
    [
        ({"stdout_patterns": [r"step (?P<step>\d+)"]}, 0, Phase.SETUP),
        ({"progress": ["tensorboard", "collectives", "activity"]}, 0, Phase.SETUP),
        ({"framework": "transformers"}, 0, Phase.SETUP),
        ({"stdout_patterns": [r"rank \d+ at \d+"]}, 0, Phase.TRAIN),
        ({}, 0, Phase.TRAIN),
        ({"stdout_patterns": [r"step (?P<step>\d+)"]}, 7, Phase.TRAIN),
        ({"framework": "transformers"}, 7, Phase.TRAIN),
    ],
    ids=[
        *("no step was printed", "no step was logged", "no step of transformers"),
        *("no pattern of steps", "nothing is known", "another rank prints", "another rank of transformers"),
    ],
)
def test_a_long_set_up_is_training_only_where_no_step_can_tell(
    settings: dict[str, object], step_of_job: int, phase: Phase
) -> None:
    """Broadcasts of a set-up, then minutes in which a server compiles: signs of life count until the first step."""
    trainer = CommandTrainer.model_validate({"argv": ["python", "train.py"], "num_steps": 5000, **settings})
    progress = TrainerProgress(trainer, first_step=0, checkpoint="", read_step_of_job=lambda: step_of_job)
    for _ in range(STEADY_POLLS + 1):
        progress.advance([(ProgressSource.COLLECTIVES, Reading(moved=True))], is_between_collectives=True)
    assert progress.phase is phase
    is_alive = progress.advance([(ProgressSource.ACTIVITY, Reading(moved=True))], is_between_collectives=True)
    assert is_alive is (phase is Phase.SETUP)


COLLECTIVE = [(ProgressSource.COLLECTIVES, Reading(moved=True))]
ACTIVITY = [(ProgressSource.ACTIVITY, Reading(moved=True))]


def follow_the_job_at_once(self: TrainerProgress, *, has_progress: bool) -> None:
    """Take a step of any rank for one of this rank."""
    self._is_in_step = self._read_step_of_job() > self.first_step


@pytest.mark.parametrize("waits", [True, False], ids=["", "control: the step of another rank is enough"])
def test_a_rank_that_compiles_while_another_one_prints_is_still_set_up(
    monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """The ranks have met in a barrier; in the set-up, work counts as a sign of life, for as long as it takes."""
    if not waits:
        monkeypatch.setattr(TrainerProgress, "_follow_job", follow_the_job_at_once)
    step_of_job = 0
    trainer = CommandTrainer.model_validate({"argv": ["train"], "num_steps": 9, "stdout_patterns": [r"(?P<step>\d+)"]})
    progress = TrainerProgress(trainer, first_step=0, checkpoint="", read_step_of_job=lambda: step_of_job)
    progress.advance(COLLECTIVE, is_between_collectives=True)
    step_of_job = 1
    progress.advance(COLLECTIVE, is_between_collectives=True)  # it may have moved before that step
    beats = [progress.advance(ACTIVITY, is_between_collectives=True) for _ in range(3)]
    assert (beats, progress.phase) == (([True] * 3, Phase.SETUP) if waits else ([False] * 3, Phase.TRAIN))


def test_a_rank_that_sees_no_steps_is_at_the_step_of_the_job() -> None:
    """One that sees steps is at its own: another rank may print a number that counts something else."""
    step_of_job = 4001
    trainer = CommandTrainer.model_validate({"argv": ["python", "train.py"], "num_steps": 5000})
    progress = TrainerProgress(trainer, 4000, "step-004000", read_step_of_job=lambda: step_of_job)
    progress.advance(COLLECTIVE, is_between_collectives=True)
    assert progress.step == 4000, "it has not moved since the job made a step"
    progress.advance(COLLECTIVE, is_between_collectives=True)
    step_of_job = 4003
    assert (progress.step, progress.phase) == (4003, Phase.TRAIN)
    step_of_job = 4900
    assert note(progress, 4004) == 4004
