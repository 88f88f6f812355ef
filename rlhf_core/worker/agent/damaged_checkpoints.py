"""Damaged checkpoints: agent 0 falls back to the previous checkpoint and moves the damaged one aside."""

from dataclasses import dataclass, field, replace

from rlhf_core.diagnosis.failure import Failure
from rlhf_core.diagnosis.policy import Choice
from rlhf_core.run_dir.attempt import RestartDir
from rlhf_core.run_dir.checkpoint import CheckpointDir
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.failures import Action
from rlhf_core.worker.event_log import EventLog


@dataclass
class DamagedCheckpoints:
    """Checkpoints that an attempt found damaged. None is deleted: the user may want to inspect or restore it."""

    run_dir: RunDir
    names: list[str] = field(default_factory=list)
    """Checkpoints that workers must not resume from, even if their file system still shows them."""
    replacement: str = ""
    """Checkpoint used instead of one whose checksums were right but that an external trainer could not load; empty
    without one."""

    def remedy(self, failure: Failure) -> str:
        """A phrase naming the checkpoint the workers resume from next; empty if none is damaged or none is left."""
        older = self._before(failure.damaged_checkpoint)
        return f"{failure.damaged_checkpoint} is set aside; resuming from {older.root.name}" if older else ""

    def explained(self, failure: Failure, restart_dir: RestartDir) -> Failure:
        """The failure, with the fate of the checkpoint added to its message for the user."""
        name = failure.damaged_checkpoint
        if not name:
            return failure
        older = self._before(name)
        if name == self.replacement and failure.is_undecided:
            # No other is tried, and none needs to be: the controller must not do so in a new attempt either.
            failure = replace(failure, damaged_checkpoint="")
            what = (
                f"Nor could it load {self.names[-1]}, which is set aside, so the cause is probably not in the "
                f"checkpoints. Find it in the log, and move {self.names[-1]} back into {self.run_dir.checkpoints_dir} "
                "to resume from it"
            )
        elif older is not None:
            what = f"It is kept as {self._aside(name, restart_dir)}; {older.root.name} is used instead"
        else:
            folder = self.run_dir.checkpoints_dir / name
            what = (
                f"No earlier complete checkpoint is left. Restore its files from a copy, or move {folder} away to "
                "train from the beginning; then resume the run"
            )
        return replace(failure, message=f"{failure.message}. {what}")

    def choice_for(self, role: Role, failure: Failure, choice: Choice) -> Choice:
        """The decision; always a new attempt for an evaluator, whose checkpoint is the result of training."""
        older = self._before(failure.damaged_checkpoint)
        if role is not Role.EVALUATOR or older is None or choice.action is not Action.RESTART_IN_PLACE:
            return choice
        reason = f"{choice.reason}: the later steps must be trained again before the model is evaluated"
        return Choice(Action.NEW_ATTEMPT, reason)

    def put_aside(self, failure: Failure, restart_dir: RestartDir, events: EventLog) -> None:
        """Move the damaged checkpoint aside. If that fails, the workers are instructed to skip it."""
        name, older = failure.damaged_checkpoint, self._before(failure.damaged_checkpoint)
        self.replacement = older.root.name if older is not None and failure.is_undecided else ""
        self.names.append(name)
        try:
            self.run_dir.put_damaged_aside(name, restart_dir.attempt, restart_dir.restart)
        except OSError as error:
            events.add("checkpoint", f"{name} is damaged and could not be moved: {error.strerror}; it is skipped")
            return
        events.add("checkpoint", f"{name} is damaged and was moved to {self._aside(name, restart_dir)}")

    def _aside(self, name: str, restart_dir: RestartDir) -> str:
        folder = self.run_dir.damaged(restart_dir.attempt, restart_dir.restart)
        return str((folder / name).relative_to(self.run_dir.root))

    def _before(self, name: str) -> CheckpointDir | None:
        """The newest complete checkpoint before the named one that was not itself found damaged."""
        older = self.run_dir.checkpoint_before(name) if name not in self.names else None
        while older is not None and older.root.name in self.names:
            older = self.run_dir.checkpoint_before(older.root.name)
        return older
