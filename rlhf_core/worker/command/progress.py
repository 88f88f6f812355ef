"""Progress of an external trainer: its step and phase, from the readings of its sources of progress."""

from collections.abc import Callable, Sequence

from rlhf_core.errors import TrainerIncomplete
from rlhf_core.schemas.command_trainer import SIGHTS, CommandTrainer, ProgressSource
from rlhf_core.schemas.reports import Phase
from rlhf_core.worker.command.observation import Reading, StepFigures

STEADY_POLLS = 16
"""Polls with progress after which a rank counts as training if nothing tells where its program reports steps."""

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
            read_step_of_job: Reads the newest step of all ranks, 0 if it is unknown.
        """
        self.first_step = first_step
        self.phase = Phase.SETUP
        self._trainer = trainer
        self._checkpoint = checkpoint
        self._read_step_of_job = read_step_of_job
        self._own_step = first_step
        self._has_job_begun = False
        self._is_in_step = False
        self._has_resumed = first_step == 0
        self._low_scalars: dict[str, int] = {}
        self._num_strong = 0

    @property
    def step(self) -> int:
        """Newest step: of this rank or, if it sees none, of the ranks that it trains with."""
        if self._own_step > self.first_step or not self._is_in_step:
            return self._own_step
        return max(self.first_step, self._read_step_of_job())

    def note_steps(self, readings: Readings) -> None:
        """Record the current step of this rank.

        Raises:
            TrainerIncomplete: the program was to resume but has started from scratch.
        """
        steps = [(kind, one.step) for kind, one in readings if one.step is not None]
        if not self._has_resumed:
            scalars = [found for kind, one in readings if kind is ProgressSource.TENSORBOARD for found in one.metrics]
            self._judge_start(steps, scalars)
        self._own_step = max([self._own_step, *(step for _, step in steps)])

    def _judge_start(self, steps: Sequence[tuple[ProgressSource, int]], scalars: Sequence[StepFigures]) -> None:
        high = {kind for kind, step in steps if step >= self.first_step}
        # A program that resumes may still log at step 0: an evaluation before training, or a scalar without a step.
        by_step = [(kind, step) for kind, step in steps if kind is not ProgressSource.TENSORBOARD]
        low = [(kind, step) for kind, step in by_step if 0 < step < self.first_step]
        repeated = self._repeated_scalar(scalars)
        if repeated is not None and high <= {ProgressSource.TENSORBOARD}:
            first, last = repeated
            if last >= self.first_step or not high:
                raise self._started_over(ProgressSource.TENSORBOARD, first)
        if low and not high:
            raise self._started_over(*low[0])
        # Once it has resumed, lower numbers count something else, such as epochs or the batches of an evaluation.
        self._has_resumed = bool(high)

    def _repeated_scalar(self, scalars: Sequence[StepFigures]) -> tuple[int, int] | None:
        """First and last step of a scalar that was logged before the step of the checkpoint and again later.

        One alone may be by epoch: it is followed by another one, of a step. Those of a start from the beginning go on.
        """
        found = []
        for one in sorted(scalars, key=lambda one: one.step):
            if 0 < one.step < self.first_step:
                for name in one.values:
                    self._low_scalars.setdefault(name, one.step)
            firsts = (self._low_scalars.get(name, one.step) for name in one.values)
            found += [(first, one.step) for first in firsts if first < one.step]
        return max(found, key=lambda span: span[1], default=None)

    def _started_over(self, kind: ProgressSource, step: int) -> TrainerIncomplete:
        return TrainerIncomplete(
            f"found step {step} ({kind}), expected {self.first_step} or later: the trainer was to resume "
            f"from {self._checkpoint} but started over. Check trainer.resume and "
            "trainer.resume_argv; the checkpoint is unchanged"
        )

    def advance(self, readings: Readings, *, is_between_collectives: bool) -> bool:
        """Update the phase if the rank has moved.

        Args:
            is_between_collectives: False while the rank waits in a collective.

        Returns:
            True if it has moved: made progress or, before its first progress and in its set-up, shown a sign of life.
        """
        has_progress = any(one.moved and SIGHTS[kind].is_strong for kind, one in readings)
        self._num_strong += has_progress
        self._follow_job(has_progress=has_progress)
        # A set-up has collectives as well, and between them a rank may prepare data for long while the others wait.
        life_counts = self._num_strong == 0 or (self.phase is Phase.SETUP and is_between_collectives)
        has_moved = has_progress or (life_counts and any(one.moved for _, one in readings))
        if has_moved:
            self.phase = self._present_phase(readings)
        return has_moved

    def _follow_job(self, *, has_progress: bool) -> None:
        """Notice that this rank moves with the job: often one rank alone prints the steps, the first or the last.

        Only progress after the job's first step counts: a rank may prepare, load or compile for long while another one
        is ahead of it.
        """
        self._is_in_step = self._is_in_step or (has_progress and self._has_job_begun)
        self._has_job_begun = self._read_step_of_job() > self.first_step

    def _present_phase(self, readings: Readings) -> Phase:
        reported = next((one.phase for _, one in readings if one.phase is not None), None)
        step = self.step
        if step >= self._trainer.num_steps and reported in (None, Phase.TRAIN):
            # The program may now write, merge or upload its model for minutes, without a further step.
            return Phase.CHECKPOINT
        if reported is not None:
            return reported
        if step > self.first_step or self.phase is Phase.TRAIN:
            return Phase.TRAIN
        # Arbitrary programs may report no steps at all; continued progress is then the only evidence. Others may have
        # as many collectives in their set-up.
        may_report_steps = self._trainer.framework != "script" or self._trainer.reports_steps
        return Phase.SETUP if may_report_steps or self._num_strong <= STEADY_POLLS else Phase.TRAIN
