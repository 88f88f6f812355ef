"""Trainer warnings as incidents that do not stop the run; agent 0 reads them from the files of its ranks."""

import contextlib
import time
from pathlib import Path

from rlhf_core.diagnosis.failure import Failure, fingerprint
from rlhf_core.diagnosis.policy import Choice
from rlhf_core.files.appended import read_models
from rlhf_core.run_dir.attempt import RestartDir
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.failures import Action, FailureKind
from rlhf_core.schemas.reports import Phase, TrainerWarning
from rlhf_core.worker.agent.leader import Leader

POLL_INTERVAL_S = 1.0
"""Interval at which the file is read, in seconds."""
REASON = "a warning: training continues; please review it"


class TrainerWarnings:
    """Turns each warning, once, into an incident with the decision to continue."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._num_taken: dict[Path, int] = {}
        self._next_poll_s = 0.0

    def take(self, restart_dir: RestartDir, *, now: bool = False) -> None:
        """Record new warnings. While the file system does not respond, they wait: training does not depend on them.

        Args:
            restart_dir: The current restart of the attempt.
            now: Read immediately, because the trainer has exited.
        """
        now_s = time.monotonic()
        if now_s < self._next_poll_s and not now:
            return
        self._next_poll_s = now_s + POLL_INTERVAL_S
        with contextlib.suppress(OSError):
            for path in restart_dir.all_warnings():
                found = read_models(path, TrainerWarning)
                for warning in found[self._num_taken.get(path, 0) :]:
                    self._record(restart_dir, warning)
                self._num_taken[path] = len(found)

    def _record(self, restart_dir: RestartDir, warning: TrainerWarning) -> None:
        kind = warning.failure_kind
        failure = Failure(
            kind=kind,
            message=warning.message,
            fingerprint=fingerprint(kind, warning.message),
            phase=Phase.REWARD if kind is FailureKind.REWARD_FUNCTION else Phase.TRAIN,
            step=warning.step,
            health_rule=warning.health_rule,
        )
        number = self._leader.record_incident(restart_dir, failure, Role.TRAINER)
        self._leader.record_decision(restart_dir, Choice(Action.CONTINUE, REASON), number)
