"""Callback for trainers around ``transformers.Trainer`` (TRL, ms-swift ...): each rank reports its own progress.

One line in the trainer's script::

    trainer.add_callback(rlhf_core.callback.SupervisionCallback())

Outside a run of rlhf-flows it does nothing. It imports nothing else of this package, so that it can also be imported in
an environment without rlhf-flows, provided that the run starts the program. With it, a hang is attributed to the rank
that stands still, with its phase, and ``rlhf cancel --save`` and the end of the time limit save a checkpoint first.
"""

from typing import Any

from transformers import TrainerCallback

try:
    import rlhf_rank_file as _words  # on the path of programs that a run has started
except ImportError:
    _words = None

PHASES = ("setup", "rollout", "reward", "train", "weight_sync", "checkpoint", "evaluate")
"""Phases in the order of their numbers, as in ``rlhf_core.schemas.reports.Phase``."""
LEAD_STEPS = 2
"""Steps from the announcement of a save to the save. No rank completes the gradients of the next step without rank 0,
which announces first; one more, since a rank may be a step ahead of its GPU."""
SAVE_AT = "rlhf-flows/save"
"""Key in the store of the ranks that holds the step of the save."""


class SupervisionCallback(TrainerCallback):  # type: ignore[misc]  # mypy does not read transformers
    """Updates the heartbeat at every event of the trainer, and saves and stops when the run requests it."""

    def __init__(self) -> None:
        self._file = _words.own_file() if _words is not None else None
        self._store: Any = None
        self._leads = False
        self._has_announced = False
        self._save_at: int | None = None

    def beat(self, phase: str, step: int) -> None:
        """Update the heartbeat of this rank. Call it from your own code that takes long, such as a reward function.

        Args:
            phase: One of :data:`PHASES`.
            step: Optimizer steps done.

        Raises:
            ValueError: the phase is unknown.
        """
        number = PHASES.index(phase)
        if self._file is not None:
            self._file.set(_words.STEP, step)
            self._file.set(_words.PHASE, number)
            self._file.set(_words.BEATS, self._file.get(_words.BEATS) + 1)

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Send a heartbeat: the training loop or an optimizer step begins, a part of a step is done, or metrics were
        logged."""
        self.beat("train", state.global_step)

    on_train_begin = on_substep_end = on_log = on_step_begin

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> Any:
        """Send a heartbeat after an optimizer step; here all ranks agree on the step at which they save and stop.

        Raises:
            RuntimeError: the other ranks have saved at an earlier step, without this one.
        """
        step = state.global_step
        self.beat("train", step)
        if self._file is None:
            return control
        if self._store is None:
            self._store, self._leads = _shared_store()
        if self._leads and not self._has_announced and self._file.get(_words.STOP):
            self._store.set(SAVE_AT, str(step + LEAD_STEPS))
            self._has_announced = True
        if self._save_at is None and self._store.check([SAVE_AT]):
            self._save_at = int(self._store.get(SAVE_AT))
            if self._save_at < step:
                raise RuntimeError(
                    f"at step {step}, this rank was told to save at step {self._save_at}, expected to be told before: "
                    "the other ranks wait for it. Ranks must take their steps together"
                )
        if step == self._save_at:
            control.should_save = control.should_training_stop = True
        return control

    def on_evaluate(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Send a heartbeat: an evaluation, or a batch of it, is done."""
        self.beat("evaluate", state.global_step)

    on_prediction_step = on_evaluate

    def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Send a heartbeat: a checkpoint was written."""
        self.beat("checkpoint", state.global_step)


def _shared_store() -> Any:
    """Return the store of the ranks' process group, or a new one for a process without a group; and True on rank 0.

    Through the store, an announcement reaches every rank before rank 0 continues; a network file system may hide a new
    file for a minute.
    """
    import torch.distributed as dist
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    if dist.is_initialized():
        # torch has no public function for this.
        return dist.distributed_c10d._get_default_store(), dist.get_rank() == 0
    return HashStore(), True
