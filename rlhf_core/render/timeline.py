"""The timeline of a run: incidents, decisions and first steps after a recovery, and the sentences about them.

Pure data, read by :mod:`rlhf_core.control.views.timeline` from run directories and by :func:`timeline_from_rows` from
the history. The command line, the HTML report and Prefect's artifacts are built from it. Its sentences are plain text,
which each formatter escapes for its own output.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import RUN_ENDS, Role, RunState
from rlhf_core.schemas.failures import Decision, FailureKind, Incident
from rlhf_core.schemas.journal import ControllerStarted, JournalLine, PromotionMoved
from rlhf_core.text.formatting import duration, listed, place_text

if TYPE_CHECKING:
    from rlhf_core.history.queries.rows import DecisionRow, IncidentRow, RestartRow, RunRow

HANGS = frozenset({FailureKind.HANG, FailureKind.COLLECTIVE_HANG, FailureKind.COLLECTIVE_MISMATCH})
"""Failure kinds detected by silence: the workers are still alive, and their last heartbeat counts."""

MAX_SUSPECTS = 8
"""Number of suspect ranks, and of suspect nodes, that a sentence lists: after a stall of a file system, all may be."""


@dataclass(frozen=True)
class TimelineIncident:
    """An incident of a run or of one of its trials."""

    run_dir: RunDir
    incident: Incident
    trial: str = ""
    """Check that the trial serves; empty for the run itself."""


@dataclass(frozen=True)
class TimelineDecision:
    """A decision about a run or one of its trials."""

    run_dir: RunDir
    decision: Decision
    trial: str = ""
    """Check that the trial serves; empty for the run itself."""


@dataclass(frozen=True)
class FirstStep:
    """The first step after a start of the workers."""

    attempt: int
    restart: int
    step: int
    time: datetime
    """Time at which the step was completed."""


@dataclass(frozen=True, order=True)
class TimelineEntry:
    """One sentence of a timeline; sorts by time, then by cause and effect."""

    time: datetime
    order: int
    text: str


@dataclass(frozen=True)
class Timeline:
    """A run and its trials at one moment."""

    run_dir: RunDir
    state: RunState
    cause: str
    """Reason of the state."""
    incidents: Sequence[TimelineIncident] = ()
    """Oldest first."""
    decisions: Sequence[TimelineDecision] = ()
    """Oldest first."""
    first_steps: Sequence[FirstStep] = ()
    lines: Sequence[JournalLine] = ()
    """Journal of the run, without the lines of controllers that had lost it; empty if read from the history."""

    @property
    def run_id(self) -> str:
        """Id of the run."""
        return self.run_dir.run_id

    @property
    def ended(self) -> bool:
        """True if no part of the run is running."""
        return self.state in RUN_ENDS

    @cached_property
    def promotion(self) -> PromotionMoved | None:
        """Latest change of the promotion; None if no promotion was requested."""
        found = [line.event for line in self.lines if isinstance(line.event, PromotionMoved)]
        return found[-1] if found else None

    def flow_run_url(self, line: JournalLine | None = None) -> str:
        """Page of the flow run that wrote a line, or of the newest; empty if its controller recorded none."""
        urls = [
            one.event.flow_run_url
            for one in self.lines
            if isinstance(one.event, ControllerStarted) and (line is None or one.sequence <= line.sequence)
        ]
        return urls[-1] if urls else ""

    def driven_since(self, flow_run_id: str) -> datetime | None:
        """Time at which a flow run first took the run; None if it never did."""
        started = (line for line in self.lines if isinstance(line.event, ControllerStarted))
        return next((line.time for line in started if line.event.flow_run_id == flow_run_id), None)  # type: ignore[union-attr]

    def decisions_on(self, found: TimelineIncident) -> list[Decision]:
        """Decisions about an incident. One without an incident number, from the controller or from version 0.1, applies
        to all incidents of its restart."""
        here = (found.run_dir, found.incident.attempt, found.incident.restart)
        return [one for one in self._decisions_by_restart.get(here, ()) if one.number in (0, found.incident.number)]

    @cached_property
    def _decisions_by_restart(self) -> Mapping[tuple[RunDir, int, int], Sequence[Decision]]:
        """A run that waits for a node for weeks has thousands of incidents, each with its decision."""
        by_restart = defaultdict(list)
        for one in self.decisions:
            by_restart[one.run_dir, one.decision.attempt, one.decision.restart].append(one.decision)
        return by_restart

    def ending(self, attempt: int, message: str) -> str:
        """The end of an attempt, beside its incidents: its message, or the kind of the incident that has it."""
        for found in (one.incident for one in self.incidents if one.run_dir == self.run_dir):
            if found.attempt == attempt and found.message and message.startswith(found.message):
                return f"{found.failure_kind.value.replace('_', ' ')}: see its incident"
        return message

    def entries(self) -> list[TimelineEntry]:
        """Sentences about incidents, decisions and recoveries, oldest first."""
        found = [one.incident for one in self.incidents]
        entries = [TimelineEntry(one.seen_at, 1, incident_text(one)) for one in found]
        entries += [entry for one in found if (entry := _standstill(one)) is not None]
        decided = [one.decision for one in self.decisions]
        entries += [TimelineEntry(one.decided_at, 2, f"-> {decision_text(one)}") for one in decided]
        ended_all = [
            one.incident
            for one in self.incidents
            if not any(decision.action.leaves_running for decision in self.decisions_on(one))
        ]
        return sorted(entries + _recoveries(ended_all, self.first_steps))


def timeline_from_rows(
    run_dir: RunDir,
    run: "RunRow",
    incidents: "Iterable[IncidentRow]",
    decisions: "Iterable[DecisionRow]",
    restarts: "Iterable[RestartRow]",
) -> Timeline:
    """Build the timeline of a run from rows of the history (``queries.show_run``)."""
    return Timeline(
        run_dir,
        RunState(run["state"]),
        run["message"],
        [TimelineIncident(run_dir, Incident.model_validate(_fields(row, Incident.model_fields))) for row in incidents],
        [TimelineDecision(run_dir, Decision.model_validate(_fields(row, Decision.model_fields))) for row in decisions],
        [
            FirstStep(row["attempt"], row["restart"], step, datetime.fromisoformat(time))
            for row in restarts
            if (step := row["first_step"]) is not None and (time := row["first_step_at"]) is not None
        ],
    )


def incident_text(incident: Incident) -> str:
    """Format an incident: kind, circumstances, message and evidence folder."""
    circumstances = (
        place_text(incident.attempt, incident.restart),
        f"step {incident.step}" if incident.step is not None else "",
        incident.phase,
        ", ".join(
            listed(names, MAX_SUSPECTS)
            for names in ([f"rank {rank}" for rank in incident.suspect_ranks], incident.suspect_nodes)
            if names
        ),
    )
    kind = incident.failure_kind.value.replace("_", " ")
    text = f"{kind} ({'; '.join(part for part in circumstances if part)}): {incident.message}"
    if incident.evidence_dir:
        text = f"{text.rstrip('.')}. Stacks, states and logs: {incident.evidence_dir}."
    return text


def decision_text(decision: Decision) -> str:
    """Format a decision: action, reason, and the changes it makes."""
    text = f"{decision.action.value.replace('_', ' ')} (by the {decision.decided_by.value}): {decision.reason}"
    changes = [
        f"Waits {duration(decision.delay_s)} before." if decision.delay_s else "",
        f"Without {', '.join(decision.excluded_nodes)}." if decision.excluded_nodes else "",
        f"Changed: {', '.join(f'{name} = {value}' for name, value in decision.config_diff.items())}."
        if decision.config_diff
        else "",
        f"From {decision.resume_checkpoint}." if decision.resume_checkpoint else "",
    ]
    return " ".join([f"{text.rstrip('.')}.", *(change for change in changes if change)])


def suspects_text(incident: Incident) -> str:
    """Format the suspects: ``ranks 1, 3 on node n2``, ``rank 0 of the group rollout on node n2``; empty if there are
    none."""
    ranks, nodes = incident.suspect_ranks, incident.suspect_nodes
    of_ranks = f"rank{'' if len(ranks) == 1 else 's'} {listed([*map(str, ranks)], MAX_SUSPECTS)}" if ranks else ""
    of_ranks += " of the group rollout" if of_ranks and incident.role is Role.ROLLOUT else ""
    of_nodes = f"node{'' if len(nodes) == 1 else 's'} {listed(nodes, MAX_SUSPECTS)}" if nodes else ""
    return " on ".join(text for text in (of_ranks, of_nodes) if text)


def collective_text(incident: Incident) -> str:
    """Format the last collective that a rank entered; empty if it is unknown."""
    number = "" if incident.collective_sequence is None else f", number {incident.collective_sequence}"
    return f"{incident.collective}{number}" if incident.collective else ""


def _standstill(incident: Incident) -> TimelineEntry | None:
    """Build the entry for the start of a hang. A worker that exits is detected at once and has no such entry."""
    if incident.failure_kind not in HANGS or incident.detected_after_s is None:
        return None
    at_step = f" at step {incident.step}" if incident.step is not None else ""
    phase = f", phase {incident.phase}" if incident.phase else ""
    suspects = suspects_text(incident) or "the ranks; no single one is to blame"
    text = f"progress stopped{at_step}{phase}: last sign of life of {suspects}"
    if incident.collective:
        text += f"; the last collective that a rank entered is {collective_text(incident)}"
    text += f" (found {duration(incident.detected_after_s)} later)"
    return TimelineEntry(incident.seen_at - timedelta(seconds=incident.detected_after_s), 0, text)


def _recoveries(incidents: Sequence[Incident], first_steps: Sequence[FirstStep]) -> list[TimelineEntry]:
    """Build an entry for the first step after each incident; of several without a step in between, after the last."""
    last: dict[FirstStep, Incident] = {}
    steps = sorted(first_steps, key=_restart)
    for incident in sorted(incidents, key=lambda one: one.seen_at):
        after = range(bisect_right(steps, _restart(incident), key=_restart), len(steps))
        first = next((steps[index] for index in after if steps[index].time > incident.seen_at), None)
        if first is not None:
            last[first] = incident
    return [
        TimelineEntry(
            first.time,
            3,
            f"training continued: step {first.step} is done in {place_text(first.attempt, first.restart)}, "
            f"{duration((first.time - incident.seen_at).total_seconds())} after this was found",
        )
        for first, incident in last.items()
    ]


def _restart(of: Incident | FirstStep) -> tuple[int, int]:
    return of.attempt, of.restart


def _fields(row: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: row[name] for name in names if name in row}
