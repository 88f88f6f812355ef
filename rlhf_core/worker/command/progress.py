"""Progress of an external trainer: its step and phase, from the readings of its sources of progress."""

from collections.abc import Callable, Sequence

from rlhf_core.errors import TrainerIncomplete
from rlhf_core.schemas.command_trainer import SIGHTS, CommandTrainer, ProgressSource
from rlhf_core.schemas.reports import Phase
from rlhf_core.worker.command.observation import Reading

STEADY_POLLS = 16
"""Polls with progress after which a rank that sees no steps may count as training."""

Readings = Sequence[tuple[ProgressSource, Reading]]
"""One reading of each source."""


class TrainerProgress:
    """Progress of the program since its start, as seen from one of its ranks."""

    def __init__(
        self, trainer: CommandTrainer, first_step: int, checkpoint: str, read_step_of_job: Callable[[], int]
    ) -> None:
        """Begin in the set-up.

        Args:
            first_step: Step of the checkpoint that it resumes from; 0 if it starts from the beginning.
            checkpoint: Name of that checkpoint.
            read_step_of_job: Reads the newest step that the worker of rank 0 has recorded, 0 if there is none.
        """
        self.first_step = first_step
        self.step = first_step
        """Newest step."""
        self.phase = Phase.SETUP
        self._trainer = trainer
        self._checkpoint = checkpoint
        self._read_step_of_job = read_step_of_job
        self._has_resumed = first_step == 0
        self._low_scalar = 0
        self._num_strong = 0

    def note_steps(self, readings: Readings) -> None:
        """Record the current step.

        Raises:
            TrainerIncomplete: the program was to resume but has started from scratch.
        """
        steps = [(kind, one.step) for kind, one in readings if one.step is not None]
        # Once it has resumed, lower numbers count something else, such as epochs or the batches of an evaluation.
        self._has_resumed = self._has_resumed or any(step >= self.first_step for _, step in steps)
        for kind, step in steps:
            if self._has_started_over(kind, step):
                raise TrainerIncomplete(
                    f"found step {step} ({kind}), expected {self.first_step} or later: the trainer was to resume "
                    f"from {self._checkpoint} but started over. Check trainer.resume and "
                    "trainer.resume_argv; the checkpoint is unchanged"
                )
            self.step = max(self.step, step)

    def _has_started_over(self, kind: ProgressSource, step: int) -> bool:
        # A program that resumes may still log at step 0: an evaluation before training, or a scalar without a step.
        if self._has_resumed or step <= 0:
            return False
        if kind is not ProgressSource.TENSORBOARD:
            return True
        # Its scalars may be by epoch. One such scalar is followed by one of a step; steps from the beginning go on.
        self._low_scalar = self._low_scalar or step
        return step > self._low_scalar

    def advance(self, readings: Readings, *, is_between_collectives: bool) -> bool:
        """Update the phase if the rank has moved.

        Args:
            is_between_collectives: False while the rank waits in a collective.

        Returns:
            True if it has moved: made progress or, before its first progress and in its set-up, shown a sign of life.
        """
        has_progress = any(one.moved and SIGHTS[kind].is_strong for kind, one in readings)
        self._num_strong += has_progress
        # A set-up has collectives as well, and between them a rank may prepare data for long while the others wait.
        life_counts = self._num_strong == 0 or (self.phase is Phase.SETUP and is_between_collectives)
        has_moved = has_progress or (life_counts and any(one.moved for _, one in readings))
        if has_moved:
            self.phase = self._present_phase(readings)
        return has_moved

    def _present_phase(self, readings: Readings) -> Phase:
        reported = next((one.phase for _, one in readings if one.phase is not None), None)
        if self.step >= self._trainer.num_steps and reported in (None, Phase.TRAIN):
            # The program may now write, merge or upload its model for minutes, without a further step.
            return Phase.CHECKPOINT
        if reported is not None:
            return reported
        if self.step > self.first_step or self.phase is Phase.TRAIN:
            return Phase.TRAIN
        if self._trainer.framework != "script" or self._num_strong <= STEADY_POLLS:
            return Phase.SETUP
        # Arbitrary programs may report no steps at all; continued progress is then the only evidence. Others may have
        # as many collectives in their set-up, and often one rank alone prints the steps.
        is_training = not self._trainer.reports_steps or self._read_step_of_job() > self.first_step
        return Phase.TRAIN if is_training else Phase.SETUP
