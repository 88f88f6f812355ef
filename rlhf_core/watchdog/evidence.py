"""Evidence about an attempt: its files in the run directory, and the output of its job."""

import itertools
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from pydantic_core import from_json

from rlhf_core.files.appended import FilePosition, parse_lines, read_on
from rlhf_core.files.reading import FileLine, read_document
from rlhf_core.files.whole import read_all, read_model
from rlhf_core.run_dir.attempt import AttemptDir, RestartDir
from rlhf_core.run_dir.journal import read_journal
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.base import LONGEST_S
from rlhf_core.schemas.evaluation import EvaluationReport
from rlhf_core.schemas.failures import NODE_FAILURES, Action, Decision, FailureKind, Incident
from rlhf_core.schemas.journal import IncidentFound
from rlhf_core.schemas.regression import Regression, regressions
from rlhf_core.schemas.reports import AgentEvent, AgentStatus, AttemptOutcome, MetricsLine
from rlhf_core.schemas.resources import Placement


def regressed(run_dir: RunDir) -> tuple[Regression, ...]:
    """Held-out scores of a run that became worse, from its evaluation reports."""
    reports = read_all(run_dir.evaluations(), EvaluationReport)
    return regressions(map(dict, reports))


@dataclass(frozen=True)
class MissedRendezvous:
    """Report of an agent that waited in vain for agent 0."""

    time: datetime
    message: str
    nodes: tuple[str, ...]
    """Nodes to blame."""

    @classmethod
    def of(cls, event: AgentEvent) -> "MissedRendezvous | None":
        """The report in an event, if it is one."""
        message, nodes = event.data.get("not_met"), event.data.get("blamed")
        if not isinstance(message, str) or not isinstance(nodes, list):
            return None
        return cls(event.time, message, tuple(map(str, nodes)))


@dataclass(frozen=True)
class AttemptProgress:
    """Progress of an attempt at one moment."""

    restart: int = -1
    """Number of the newest restart folder; -1 before the first. Every start of a role has one, including the first."""
    restarts_made: int = 0
    """Restarts in place after a failure."""
    role: Role | None = None
    """Role whose workers are running, or ran last."""
    evaluating: bool = False
    """True once the evaluator has started: training is done."""
    phase: str = ""
    """Phase of the first rank."""
    step: int = 0
    """Last completed optimizer step."""
    loop: str = ""
    """Loop that made it; empty before the first step of the attempt."""
    restart_of_step: int = -1
    """Restart in which it was made."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Latest value of every metric."""
    longest_step_s: float = 0.0
    """Longest of the last ten steps, in seconds; 0 if unknown."""

    @property
    def is_restarting(self) -> bool:
        """True if the workers were started again and have not made a step since."""
        return bool(self.loop) and not self.evaluating and self.restart_of_step < self.restart


class AttemptReader:
    """Reads the files of an attempt repeatedly.

    Appended files are read from where the last call stopped, so a call costs only as much as there are new lines.

    Args:
        step: step from which the attempt resumed.
    """

    def __init__(self, attempt: AttemptDir, step: int = 0) -> None:
        self.progress = AttemptProgress(step=step)
        self.events: list[AgentEvent] = []
        """Events of the agents since the last call."""
        self.leader_lost_at: dict[str, datetime] = {}
        """Time at which each agent reported that it had lost agent 0, by node."""
        self.given_up: dict[str, str] = {}
        """The node that an agent gave up on, by the node of the reporting agent."""
        self.not_met: MissedRendezvous | None = None
        """Earliest report that the agents have not met."""
        self.published: dict[str, tuple[int, int]] = {}
        """Restart and sequence number of each agent's latest status, by node: its sign of life."""
        self._attempt = attempt
        self._metrics: dict[str, float] = {}
        self._steps_s: deque[float] = deque(maxlen=10)
        self._places: dict[Path, FilePosition] = {}

    def update(self) -> None:
        """Read the new lines and statuses."""
        self.events = []
        known, restarts = self.progress.restart, self._attempt.restarts()
        for restart in restarts:
            # Read all on the first call; later only those that may have grown: the newest two known, and new ones.
            if restart.restart >= known - 1:
                self._read_events(restart)
                self._read_metrics(restart)
        if restarts:
            if restarts[-1].restart != known:
                made = num_restarts(self._attempt)
                self.progress = replace(self.progress, restart=restarts[-1].restart, restarts_made=made)
            self._read_statuses(restarts[-1])

    def _read_metrics(self, restart: RestartDir) -> None:
        line: MetricsLine | None = None
        for line in parse_lines(self._new_lines(restart.metrics), MetricsLine):
            self._metrics.update(line.metrics)
            if 0 <= (seconds := line.metrics.get("time/step_s", -1.0)) <= LONGEST_S:  # external trainers may log NaN
                self._steps_s.append(seconds)
        if line is not None:
            self.progress = replace(
                self.progress,
                step=line.step,
                loop=line.loop,
                restart_of_step=restart.restart,
                metrics=dict(self._metrics),
                longest_step_s=max(self._steps_s, default=0.0),
            )

    def _read_events(self, restart: RestartDir) -> None:
        for path in restart.event_files():
            for event in parse_lines(self._new_lines(path), AgentEvent):
                self.events.append(event)
                if event.data.get("leader_lost"):
                    self.leader_lost_at.setdefault(event.node, event.time)
                if event.kind == "peer" and event.data.get("node_lost"):
                    self.given_up.setdefault(event.node, str(event.data["node_lost"]))
                not_met = MissedRendezvous.of(event)
                if not_met is not None and (self.not_met is None or not_met.time < self.not_met.time):
                    self.not_met = not_met
                if event.kind == "role_started" and event.role is not None:
                    self._enter(event.role)

    def _read_statuses(self, restart: RestartDir) -> None:
        for status in read_all(restart.agent_statuses(), AgentStatus):
            self.published[status.node] = (status.restart, status.sequence)
            self._enter(status.role)
            ranks = [rank for rank in status.ranks if rank.role is status.role]
            first = min(ranks, key=lambda rank: rank.rank, default=None)
            if first is not None:
                self.progress = replace(self.progress, phase=first.phase.value)

    def _enter(self, role: Role) -> None:
        evaluating = self.progress.evaluating or role is Role.EVALUATOR
        self.progress = replace(self.progress, role=role, evaluating=evaluating)

    def _new_lines(self, path: Path) -> list[FileLine]:
        found: list[FileLine] = []
        while True:
            lines, self._places[path], _ = read_on(path, self._places.get(path, FilePosition()))
            if not lines:
                return found
            found.extend(lines)


def incidents(attempt: AttemptDir) -> list[Incident]:
    """Incidents recorded by the agents of an attempt, oldest first."""
    return read_all((path for restart in attempt.restarts() for path in restart.incident_files()), Incident)


def final_incident(attempt: AttemptDir) -> Incident | None:
    """The incident that ended an attempt, if its agents recorded it; the attempt survived all others."""
    ends = (Action.NEW_ATTEMPT, Action.STOP)
    survived = {one.number for one in agent_decisions(attempt) if one.action not in ends}
    return next((one for one in reversed(incidents(attempt)) if one.number not in survived), None)


def agent_decisions(attempt: AttemptDir) -> list[Decision]:
    """Decisions that agent 0 made inside an attempt, oldest first."""
    return read_all((path for restart in attempt.restarts() for path in restart.decision_files()), Decision)


def num_restarts(attempt: AttemptDir) -> int:
    """Count the restarts in place after a failure."""
    return sum(decision.action is Action.RESTART_IN_PLACE for decision in agent_decisions(attempt))


def scheduler_log(attempt: AttemptDir) -> Path | None:
    """The newest scheduler log of the attempt's agents that is not empty, if any."""
    if not attempt.scheduler_dir.is_dir():
        return None
    files = [
        path
        for path in attempt.scheduler_dir.iterdir()
        if path.suffix in (".out", ".err", ".log") and path.stat().st_size
    ]
    return max(files, key=lambda path: path.stat().st_mtime, default=None)


def strikes(run_dir: RunDir, own: Incident | None) -> Mapping[str, int]:
    """Count the suspicions against each node in this run, by its agents and by the controller.

    Failures that the code, the config or the user causes do not count: their nodes are only where they happened.

    Args:
        own: the controller's finding about the attempt that just ended, which may not be in the journal yet.
    """
    lines = read_journal(run_dir.control)
    # One per attempt: a controller that was killed may already have recorded the finding passed here.
    here = {line.event.incident.attempt: line.event.incident for line in lines if isinstance(line.event, IncidentFound)}
    if own is not None:
        here[own.attempt] = own
    # Both may have found the same incident; the controller also sees the agents of other nodes, so its finding wins.
    reported = {(incident.attempt, incident.restart) for incident in here.values()}
    by_agents = [incident for attempt in run_dir.attempts() for incident in incidents(attempt)]
    found = [incident for incident in by_agents if (incident.attempt, incident.restart) not in reported]
    against_nodes = (one for one in [*found, *here.values()] if one.failure_kind in NODE_FAILURES)
    return Counter(node for incident in against_nodes for node in incident.suspect_nodes)


def allocated_s(attempt: AttemptDir, until: datetime) -> float:
    """Time that an attempt held its allocation, in seconds: from its agent's first record to its last.

    Args:
        until: the time at which it was seen to have ended, or the present; used as its end if its agent left no
            outcome.
    """
    try:
        begun = datetime.fromisoformat(from_json(read_document(attempt.claim))["time"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0  # it never got an allocation
    if begun.tzinfo is None:
        return 0.0  # not written by an agent
    outcome = read_model(attempt.outcome, AttemptOutcome)
    return max(0.0, ((outcome.time if outcome is not None else until) - begun).total_seconds())


def can_be_written(attempt: AttemptDir) -> bool:
    """Check that agents could write a sign of life: a full disk silences an agent without killing it."""
    probe = attempt.root / ".can-be-written"
    try:
        probe.write_bytes(bytes(4096))
        probe.unlink()
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class EarlierAttempts:
    """Evidence from earlier attempts for or against a retry."""

    attempts_without_progress: int
    """Consecutive attempts, including the one that just ended, without a newer checkpoint; those whose nodes did not
    start are not counted."""
    attempts_without_nodes: int
    """Consecutive attempts, including the one that just ended, whose nodes did not start."""
    same_fingerprint_before: bool
    """True if an earlier one of these ended with the same fingerprint, or the agents stopped the last for it."""


def without_nodes_since(run_dir: RunDir, number: int) -> datetime | None:
    """Time since when the consecutive attempts before attempt ``number`` have got no nodes; None if the last one of
    them had nodes."""
    seen = _without_nodes(run_dir)
    before = itertools.takewhile(seen.__contains__, range(number - 1, 0, -1))
    return min((seen[earlier] for earlier in before), default=None)


def _without_nodes(run_dir: RunDir) -> dict[int, datetime]:
    """The attempts whose nodes did not start, and the time at which each was found."""
    found = (line.event.incident for line in read_journal(run_dir.control) if isinstance(line.event, IncidentFound))
    return {one.attempt: one.seen_at for one in found if one.failure_kind is FailureKind.NO_NODES}


def read_earlier_attempts(
    run_dir: RunDir, ended: int, first_attempt: int, fingerprint: str, own: Incident | None = None
) -> EarlierAttempts:
    """Summarise the attempts from ``first_attempt`` to ``ended`` for the policy.

    An attempt made progress if there is a checkpoint newer than the one it started from.

    Args:
        own: the controller's finding about the last of them, which may not be in the journal yet.
    """
    without_nodes = {*_without_nodes(run_dir)}
    if own is not None and own.failure_kind is FailureKind.NO_NODES:
        without_nodes.add(own.attempt)
    latest = itertools.takewhile(without_nodes.__contains__, range(ended, first_attempt - 1, -1))
    newest = run_dir.newest_checkpoint()
    reached = newest.step if newest else 0
    fruitless: list[AttemptDir] = []
    for number in range(ended, first_attempt - 1, -1):
        attempt = run_dir.attempt(number)
        placement = read_model(attempt.placement, Placement)
        if placement is None or placement.resumed_from_step < reached:
            break
        if number not in without_nodes:
            fruitless.append(attempt)
    earlier = [attempt for attempt in fruitless if attempt.number != ended]
    seen = {incident.fingerprint for attempt in earlier if (incident := final_incident(attempt)) is not None}
    # The agents see best if the attempt saved a checkpoint between two failures of its own.
    stopped = any(decision.action is Action.STOP for decision in agent_decisions(run_dir.attempt(ended)))
    return EarlierAttempts(
        attempts_without_progress=len(fruitless),
        attempts_without_nodes=sum(1 for _ in latest),
        same_fingerprint_before=bool(fingerprint) and (fingerprint in seen or stopped),
    )
