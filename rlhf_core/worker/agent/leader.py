"""Duties of agent 0 alone: own the attempt, take control-plane orders, decide on restarts, write the outcome."""

import contextlib
import json
import os
import socket
import time
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel

from rlhf_core.diagnosis.failure import Failure
from rlhf_core.diagnosis.policy import Choice, decide_in_place
from rlhf_core.files.appended import parse_lines, read_blocks
from rlhf_core.files.lookups import is_there, paths_in
from rlhf_core.files.whole import Reserve, create_once, is_disk_full, read_model, read_object, write_model
from rlhf_core.run_dir.attempt import AttemptDir, RestartDir
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.failures import Action, DecidedBy, Decision, FailureKind
from rlhf_core.schemas.reports import AgentCommand, AttemptOutcome, MetricsLine
from rlhf_core.schemas.supervision import SuperviseSpec
from rlhf_core.worker.event_log import EventLog

OUTCOME_TIMEOUT_S = 30.0
"""Time during which a failed write of the outcome is retried, in seconds."""


RESERVED_FILES = 7
"""Files of the reserve besides its blocks: incident, decision, their folder and the outcome take four."""


class Leader:
    """Agent 0 of one attempt."""

    def __init__(self, run_dir: RunDir, attempt: int, events: EventLog) -> None:
        self._run_dir = run_dir
        self.events = events
        """Events of this node."""
        self._dir: AttemptDir = run_dir.attempt(attempt)
        self.reserve = Reserve(self._dir.reserve, RESERVED_FILES)
        """Space reserved for the outcome, and the incident before it, in case the disk fills up."""
        self._obeyed: set[int] = set()
        self._num_incidents = 0

    # -----------------------------------------------------------------------------------------------------------------
    # Owning the attempt

    def claim(self) -> str:
        """Claim the attempt; returns an empty string on success, otherwise a sentence naming its owner."""
        content = {"pid": os.getpid(), "host": socket.gethostname(), "time": utc_now().isoformat()}
        path = self._dir.claim
        path.parent.mkdir(parents=True, exist_ok=True)
        if create_once(path, json.dumps(content)):
            return ""
        owner = read_object(path)  # empty if the file is damaged: the attempt is owned all the same
        who = f"the agent with pid {owner['pid']} on {owner['host']}" if owner else f"another agent, unnamed in {path}"
        return f"attempt {self._dir.number} belongs to {who}"

    def write(self, path: Path, model: BaseModel) -> bool:
        """Write an essential file, releasing the reserve if the disk is full. False if the file cannot be written.

        Writes nothing if the run has moved on to another attempt while this agent was suspended.
        """
        for _ in range(2):
            try:
                if self._run_dir.is_superseded(self._dir.number):
                    return False
                write_model(path, model)
                return True
            except OSError as error:
                if not is_disk_full(error):
                    return False
                # What an incident leaves would be taken by the restart after it.
                self.reserve.free(keep=0 if path == self._dir.outcome else 1)
        return False

    # -----------------------------------------------------------------------------------------------------------------
    # Orders from the control plane

    def new_commands(self) -> list[AgentCommand]:
        """Orders that were not returned before, in order of their number."""
        try:
            paths = paths_in(self._dir.commands, "*.json")
        except OSError:
            return []
        found = []
        for number in sorted(int(path.stem) for path in paths if path.stem.isdecimal()):
            if number not in self._obeyed:
                command = read_model(self._dir.commands / f"{number}.json", AgentCommand)
                if command is not None:
                    self._obeyed.add(number)
                    found.append(command)
        return found

    # -----------------------------------------------------------------------------------------------------------------
    # Failures

    def record_incident(
        self,
        restart_dir: RestartDir,
        failure: Failure,
        role: Role | None = None,
        evidence_dir: Path | None = None,
    ) -> int:
        """Record an incident; call this before deciding anything about it.

        Args:
            restart_dir: The restart in which it happened.
            failure: The diagnosed failure.
            role: Role of the group it happened in; None if it concerns a node.
            evidence_dir: Folder of its evidence. Default: the restart's.

        Returns:
            Its number in the attempt.
        """
        self._num_incidents += 1
        number = self._num_incidents
        incident = failure.incident(
            restart_dir.attempt,
            restart_dir.restart,
            utc_now(),
            number=number,
            role=role,
            evidence_dir=str((evidence_dir or restart_dir.evidence_dir).relative_to(self._run_dir.root)),
        )
        self.write(restart_dir.incident(number), incident)
        message = f"incident ({failure.kind}): {failure.message}"
        self.events.add("incident", message, role, failure_kind=failure.kind, number=number)
        return number

    def record_decision(self, restart_dir: RestartDir, choice: Choice, number: int) -> None:
        """Record the decision about an incident; call this before acting on it."""
        decision = Decision(
            attempt=restart_dir.attempt,
            restart=restart_dir.restart,
            number=number,
            action=choice.action,
            reason=choice.reason,
            decided_by=DecidedBy.AGENT,
            decided_at=utc_now(),
            delay_s=choice.delay_s,
        )
        self.write(restart_dir.decision(number), decision)
        self.events.add("decision", f"decision: {choice.reason}", action=choice.action, number=number)

    # -----------------------------------------------------------------------------------------------------------------
    # The end

    def finish(self, outcome: AttemptOutcome) -> bool:
        """Write the outcome, once and last; False if that fails."""
        deadline = time.monotonic() + OUTCOME_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError):  # the file system may not respond for a while
                if is_there(self._dir.outcome):
                    break
                if self._run_dir.is_superseded(self._dir.number):
                    return False
            if self.write(self._dir.outcome, outcome):
                break
            if time.monotonic() > deadline:
                return False
            time.sleep(0.5)
        self.reserve.free()
        return True

    def last_step(self) -> int:
        """Last step in any ``metrics.jsonl`` of this attempt; 0 if there is none, or if none can be read."""
        with contextlib.suppress(OSError):
            for restart_dir in reversed(self._dir.restarts()):
                last = 0
                for lines, _ in read_blocks(restart_dir.metrics):
                    last = max([last, *(line.step for line in parse_lines(lines[-50:], MetricsLine))])
                if last:
                    return last
        return 0


class RestartBudget:
    """Counts restarts in place; a new checkpoint restores the full budget."""

    def __init__(self, run_dir: RunDir, spec: SuperviseSpec) -> None:
        self._run_dir = run_dir
        self._spec = spec
        self._checkpoint_step = self._newest_step()
        self._spent = 0
        self._fingerprints: set[str] = set()
        self._to_confirm: set[FailureKind] = set()

    def renew(self) -> None:
        """Restore the budget after a role has succeeded, which is progress too."""
        self._spent = 0
        self._fingerprints.clear()
        self._to_confirm.clear()

    def confirmed(self, failure: Failure) -> Failure:
        """The failure; made definite if its kind was restarted once, without progress, and has recurred."""
        self._update_progress()
        return replace(failure, is_undecided=failure.is_undecided and failure.kind not in self._to_confirm)

    def choose(self, failure: Failure, remedy: str = "") -> Choice:
        """Decide about a failure; a restart in place is counted unless a remedy makes it a different one.

        Args:
            remedy: Change made for the next start; see :func:`decide_in_place`.
        """
        self._update_progress()
        seen = failure.fingerprint in self._fingerprints
        choice = decide_in_place(
            failure.kind,
            self._spent,
            self._spec,
            same_fingerprint_before=seen,
            remedy=remedy,
            undecided=failure.is_undecided,
        )
        self._fingerprints.add(failure.fingerprint)
        if failure.is_undecided and choice.action is Action.RESTART_IN_PLACE:
            self._to_confirm.add(failure.kind)
        if choice.action is Action.RESTART_IN_PLACE:
            self._spent += not remedy
        return choice

    def _update_progress(self) -> None:
        step = self._newest_step()
        if step > self._checkpoint_step:
            self._checkpoint_step = step
            self.renew()

    def _newest_step(self) -> int:
        newest = self._run_dir.newest_checkpoint()
        return newest.step if newest else -1
