"""What went wrong in a run and what was done about it, as sentences with a time each, for a tired person: when progress
stopped, who was to blame and where, what lies where, what was decided and why, when training went on."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from rlhf_core.cli import output
from rlhf_core.formatting import place_text
from rlhf_core.schemas.failures import Decision, FailureKind, Incident

HANGS = frozenset({FailureKind.HANG, FailureKind.COLLECTIVE_HANG, FailureKind.COLLECTIVE_MISMATCH})
"""Kinds that are found by silence: the workers were still there, and what counts is their last sign of life."""


@dataclass(frozen=True)
class Start:
    """A start of the workers that has made at least one step."""

    attempt: int
    restart: int
    step: int
    """The first step that it made."""
    time: datetime
    """When that step was done."""


@dataclass(frozen=True, order=True)
class Line:
    """One sentence of the story; sorts by time, then by what follows from what."""

    time: datetime
    order: int
    text: str


def tell(incidents: Sequence[Incident], decisions: Sequence[Decision], starts: Sequence[Start]) -> list[Line]:
    """The story, oldest line first."""
    lines = [Line(incident.seen_at, 1, incident_in_words(incident)) for incident in incidents]
    lines += [line for incident in incidents if (line := _stopped(incident)) is not None]
    lines += [Line(decision.decided_at, 2, decision_in_words(decision)) for decision in decisions]
    return sorted(lines + _went_on(incidents, starts))


def of_facts(
    incidents: Iterable[Mapping[str, Any]],
    decisions: Iterable[Mapping[str, Any]],
    restarts: Iterable[Mapping[str, Any]],
) -> list[Line]:
    """The story from what the history tells (``queries.show_run``)."""
    starts = [
        Start(row["attempt"], row["restart"], row["first_step"], datetime.fromisoformat(row["first_step_at"]))
        for row in restarts
        if row["first_step_at"] is not None
    ]
    return tell(
        [Incident.model_validate(_fields(facts, Incident.model_fields)) for facts in incidents],
        [Decision.model_validate(_fields(facts, Decision.model_fields)) for facts in decisions],
        starts,
    )


def incident_in_words(incident: Incident) -> str:
    """What was found, where, and where the evidence lies."""
    circumstances = (
        place_text(incident.attempt, incident.restart),
        f"step {incident.step}" if incident.step is not None else "",
        incident.phase,
        ", ".join([f"rank {rank}" for rank in incident.suspect_ranks] + list(incident.suspect_nodes)),
    )
    kind = incident.failure_kind.value.replace("_", " ")
    words = f"{kind} ({'; '.join(text for text in circumstances if text)}): {incident.message}"
    if incident.evidence_dir:
        words = f"{words.rstrip('.')}. Stacks, states and logs: {incident.evidence_dir}."
    return words


def decision_in_words(decision: Decision) -> str:
    """What was decided, why, and what is different from then on."""
    words = f"-> {decision.action.value.replace('_', ' ')}: {decision.reason}"
    more = []
    if decision.delay_s:
        more.append(f"Waits {output.seconds_text(decision.delay_s)} before.")
    if decision.excluded_nodes:
        more.append(f"Without {', '.join(decision.excluded_nodes)}.")
    if decision.config_diff:
        more.append(f"Changed: {', '.join(f'{name} = {value}' for name, value in decision.config_diff.items())}.")
    if decision.resume_checkpoint:
        more.append(f"From {decision.resume_checkpoint}.")
    return " ".join([f"{words.rstrip('.')}.", *more]) if more else words


def _stopped(incident: Incident) -> Line | None:
    """When a hang began. A worker that ended is found at once: there is nothing to tell beforehand."""
    if incident.failure_kind not in HANGS or incident.detected_after_s is None:
        return None
    where = f" at step {incident.step}" if incident.step is not None else ""
    phase = f", phase {incident.phase}" if incident.phase else ""
    words = f"progress stopped{where}{phase}: last sign of life of {_suspects(incident)}"
    if incident.collective:
        number = "" if incident.collective_sequence is None else f", number {incident.collective_sequence}"
        words += f"; the last collective that a rank entered is {incident.collective}{number}"
    words += f" (found {output.seconds_text(incident.detected_after_s)} later)"
    return Line(incident.seen_at - timedelta(seconds=incident.detected_after_s), 0, words)


def _suspects(incident: Incident) -> str:
    ranks, nodes = incident.suspect_ranks, incident.suspect_nodes
    who = f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}" if ranks else ""
    where = f"node{'' if len(nodes) == 1 else 's'} {', '.join(nodes)}" if nodes else ""
    return " on ".join(text for text in (who, where) if text) or "the ranks; no single one is to blame"


def _went_on(incidents: Sequence[Incident], starts: Sequence[Start]) -> list[Line]:
    """The first step after an incident; told once, of the last one, when nothing was done between several."""
    last: dict[Start, Incident] = {}
    for incident in sorted(incidents, key=lambda one: one.seen_at):
        here = (incident.attempt, incident.restart)
        later = [start for start in starts if (start.attempt, start.restart) > here and start.time > incident.seen_at]
        if later:
            last[min(later, key=lambda start: (start.attempt, start.restart))] = incident
    return [
        Line(
            start.time,
            3,
            f"training went on: step {start.step} is done in {place_text(start.attempt, start.restart)}, "
            f"{output.seconds_text((start.time - incident.seen_at).total_seconds())} after this was found",
        )
        for start, incident in last.items()
    ]


def _fields(facts: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: facts[name] for name in names if name in facts}
