"""Callback for trainers around ``transformers.Trainer`` (TRL, ms-swift ...): each rank tells of its own progress.

One line in the trainer's script::

    trainer.add_callback(rlhf_core.callback.SupervisionCallback())

Without a run of rlhf-flows around it does nothing. It imports nothing else of this package: in an environment that
does not have rlhf-flows it is found all the same, as long as the run starts the program. With it a hang is blamed on
the rank that stands still, with its phase, and ``rlhf cancel --save`` and the end of the time limit save a checkpoint
first.
"""

from typing import Any

from transformers import TrainerCallback

try:
    import rlhf_rank_file as _words  # on the path of programs that a run has started
except ImportError:
    _words = None

PHASES = ("setup", "rollout", "reward", "train", "weight_sync", "checkpoint", "evaluate")
"""Phases in the order of their numbers, as ``rlhf_core.schemas.reports.Phase`` has them."""


class SupervisionCallback(TrainerCallback):  # type: ignore[misc]  # mypy does not read transformers
    """Beats at every event of the trainer, and saves when the run asks for it."""

    def __init__(self) -> None:
        self._file = _words.own_file() if _words is not None else None
        self._saved = 0

    def beat(self, phase: str, step: int) -> None:
        """Tell that this rank is alive. For code of your own that takes long, such as a reward function.

        Args:
            phase: One of :data:`PHASES`.
            step: Optimizer steps done.

        Raises:
            ValueError: there is no such phase.
        """
        number = PHASES.index(phase)
        if self._file is not None:
            self._file.set(_words.STEP, step)
            self._file.set(_words.PHASE, number)
            self._file.set(_words.BEAT_NS, _words.now_ns())
            self._file.set(_words.BEATS, self._file.get(_words.BEATS) + 1)

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """The loop begins."""
        self.beat("train", state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """An optimizer step begins."""
        self.beat("train", state.global_step)

    def on_substep_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """One part of an accumulated step is done."""
        self.beat("train", state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> Any:
        """An optimizer step is done: the place where all ranks agree on a save."""
        self.beat("train", state.global_step)
        if self._file is None:
            return control
        wanted, stop = self._file.get(_words.SAVE), self._file.get(_words.STOP)
        # Asked for at a step number, so that all ranks save at the same one.
        if wanted and state.global_step == wanted > self._saved:
            self._saved = wanted
            control.should_save = True
            control.should_training_stop = control.should_training_stop or bool(stop)
        return control

    def on_evaluate(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """An evaluation is done."""
        self.beat("evaluate", state.global_step)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """A batch of an evaluation is done."""
        self.beat("evaluate", state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """A checkpoint was written."""
        self.beat("checkpoint", state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Metrics were logged."""
        self.beat("train", state.global_step)
