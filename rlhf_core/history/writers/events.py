"""Rows of events: of agents, the site daemon, the journal, and data that could not be stored."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection

from rlhf_core.history.batch import EventEntry, JournalEntry, SetAside
from rlhf_core.history.tables.sqlalchemy_core import EVENTS
from rlhf_core.history.writers.upserts import Row, columns_of, insert_or_keep
from rlhf_core.schemas.attempts import AttemptState, RunState, StageState
from rlhf_core.schemas.checks import CheckStatus
from rlhf_core.schemas.journal import (
    AttemptMoved,
    AttemptPlanned,
    AttemptSubmitted,
    CancelStarted,
    ChecksMade,
    CodeTaken,
    ControlEvent,
    ControllerStarted,
    DecisionMade,
    IncidentFound,
    JournalLine,
    PromotionMoved,
    RunCreated,
    RunMoved,
    StageEnded,
    StageStarted,
    TrialPlanned,
)
from rlhf_core.schemas.reports import ReconcileNote
from rlhf_core.text.formatting import attributed, count

SET_ASIDE = "set_aside"
"""Kind of the event for part of a file of the run that could not be stored."""


def write_events(connection: Connection, run_id: str, entries: Sequence[EventEntry]) -> None:
    """Write the events of agents."""
    rows = [
        {
            "run_id": run_id,
            "source": entry.source,
            "position": entry.position,
            "attempt": entry.attempt,
            "restart": entry.restart,
            "state": None,
            **columns_of(EVENTS, entry.event),
        }
        for entry in entries
    ]
    insert_or_keep(connection, EVENTS, rows)


_RENAMED_NOTES = {"tell": "publish"}
"""Kinds of notes that earlier versions wrote, with their present names."""


def write_notes(connection: Connection, run_id: str, notes: Sequence[tuple[int, ReconcileNote]]) -> None:
    """Write the notes of the site daemon."""
    rows = [
        _event_row(
            run_id,
            "housekeeping.jsonl",
            position,
            note.time,
            f"reconcile_{_RENAMED_NOTES.get(note.kind, note.kind)}",
            note.message,
            attempt=note.attempt,
            data=dict(note.data),
        )
        for position, note in notes
    ]
    insert_or_keep(connection, EVENTS, rows)


def write_set_aside(connection: Connection, run_id: str, found: Sequence[SetAside]) -> None:
    """Write an event for each part of a file that could not be stored."""
    rows = [_event_row(run_id, one.source, one.position, one.found_at, SET_ASIDE, one.message) for one in found]
    insert_or_keep(connection, EVENTS, rows)


def _event_row(run_id: str, source: str, position: int, time: datetime, kind: str, message: str, **more: Any) -> Row:
    """Build the row of an event; ``more`` are further columns of its kind."""
    key = {"run_id": run_id, "source": source, "position": position}
    nothing: Row = {"attempt": None, "restart": None, "node": "", "role": None, "state": None, "data": {}}
    return {**key, "time": time, "kind": kind, "message": message, **nothing, **more}


class _EventText(NamedTuple):
    """Columns of an event that depend on the kind of its journal line."""

    message: str
    attempt: int | None = None
    restart: int | None = None
    state: str | None = None


def journal_event_row(run_id: str, entry: JournalEntry) -> Row:
    """Build the event of a journal line."""
    line: JournalLine = entry.line
    text = _event_text(line.event)
    return _event_row(
        run_id,
        "control.jsonl",
        entry.position,
        line.time,
        line.event.kind,
        text.message,
        attempt=text.attempt,
        restart=text.restart,
        state=text.state,
        data={"sequence": line.sequence, "token": line.token},
    )


def _event_text(event: ControlEvent) -> _EventText:
    match event:
        case RunCreated(name=name, owner=owner, owner_account=account, config_source=source):
            return _EventText(
                f"{attributed(owner, account)} requested {name} with {source}", state=RunState.PENDING.value
            )
        case RunMoved(state=run_state, cause=cause):
            return _EventText(cause, state=run_state.value)
        case StageStarted(name=stage, attempt=attempt):
            return _EventText(f"{stage.value} started", attempt or None, state=StageState.RUNNING.value)
        case StageEnded(stage_index=index, state=stage_state, message=message):
            return _EventText(message or f"stage {index}: {stage_state.value}", state=stage_state.value)
        case ChecksMade(results=results):
            counts = ((status, sum(result.status is status for result in results)) for status in CheckStatus)
            return _EventText(", ".join(f"{count} {status.value}" for status, count in counts if count) or "no checks")
        case TrialPlanned(check_id=check_id, run_id=trial):
            return _EventText(f"the trial {trial} decides {check_id}")
        case AttemptPlanned(placement=placement):
            origin = placement.resume_checkpoint or "the beginning"
            text = f"{count(placement.num_nodes, 'node')}, from {origin}"
            text += f"; {placement.size_reason}" if placement.size_reason else ""
            return _EventText(text, placement.attempt, state=AttemptState.PLANNED.value)
        case AttemptSubmitted(submission=submission):
            job = f"{submission.scheduler} job {submission.job_id}"
            return _EventText(job, submission.attempt, state=AttemptState.SUBMITTED.value)
        case AttemptMoved(attempt=attempt, state=attempt_state, cause=cause):
            return _EventText(cause, attempt, state=attempt_state.value)
        case IncidentFound(incident=incident):
            return _EventText(incident.message, incident.attempt, incident.restart)
        case DecisionMade(decision=decision):
            return _EventText(decision.reason, decision.attempt, decision.restart)
        case CancelStarted(reason=reason):
            return _EventText(f"is being cancelled: {reason}")
        case CodeTaken(by=by, changed=changed):
            return _EventText(f"{by} had the code copied again; changed: {', '.join(changed) or 'nothing'}")
        case ControllerStarted(controller=controller):
            return _EventText(f"{controller} drives the run")
        case PromotionMoved(state=promotion_state, checkpoint_step=step, by=by, reason=reason):
            why = ": ".join(part for part in (by, reason) if part)
            return _EventText(f"promotion of step {step} {promotion_state.value}" + (f" ({why})" if why else ""))
