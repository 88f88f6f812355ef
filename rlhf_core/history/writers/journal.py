"""Rows of the journal: changes of state, stages, submissions, and an event for each line."""

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from typing import NamedTuple

from sqlalchemy import BindParameter, Connection, Update, bindparam, case, func, select, update

from rlhf_core.errors import IllegalMove
from rlhf_core.history.batch import JournalEntry
from rlhf_core.history.tables.sqlalchemy_core import ATTEMPTS, CONTROLLERS, EVENTS, PROMOTIONS, RUNS, STAGES
from rlhf_core.history.writers.attempts import write_placement
from rlhf_core.history.writers.checks import write_checks
from rlhf_core.history.writers.events import event_row
from rlhf_core.history.writers.incidents import write_decisions, write_incidents
from rlhf_core.history.writers.upserts import Row, as_json, insert_or_keep, insert_or_replace
from rlhf_core.schemas.attempts import (
    ATTEMPT_ENDS,
    ATTEMPT_MOVES,
    PROMOTION_BEGINNINGS,
    PROMOTION_MOVES,
    RUN_ENDS,
    RUN_MOVES,
    AttemptState,
    PromotionState,
    RunState,
    StageState,
    sources_of,
)
from rlhf_core.schemas.checks import CheckStatus
from rlhf_core.schemas.journal import (
    AttemptMoved,
    AttemptPlanned,
    AttemptSubmitted,
    CancelStarted,
    ChecksMade,
    CodeTaken,
    ControllerStarted,
    DecisionMade,
    IncidentFound,
    PromotionMoved,
    RunCreated,
    RunMoved,
    StageEnded,
    StageStarted,
    TrialPlanned,
)
from rlhf_core.schemas.resources import Submission
from rlhf_core.text.formatting import attributed, count

# Built once: a controller writes a few lines at a time, and building a statement takes longer than executing it.
_RUN = RUNS.c.run_id == bindparam("of_run")
_ATTEMPT = (ATTEMPTS.c.run_id == bindparam("of_run"), ATTEMPTS.c.number == bindparam("of_attempt"))
_STAGE = (STAGES.c.run_id == bindparam("of_run"), STAGES.c.stage_index == bindparam("of_stage"))
_AT = bindparam("at", type_=STAGES.c.started_at.type)
_SOURCES: BindParameter[Sequence[str]] = bindparam("sources", expanding=True)
_MOVE_RUN = (
    update(RUNS)
    .where(_RUN, RUNS.c.state.in_(_SOURCES))
    .values(
        state=bindparam("to_state"),
        message=bindparam("cause"),
        started_at=func.coalesce(RUNS.c.started_at, _AT),
        ended_at=bindparam("end", type_=RUNS.c.ended_at.type),
    )
)
_STAGE_STARTED_AT = select(STAGES.c.started_at).where(*_STAGE)
_END_STAGE = (
    update(STAGES)
    .where(*_STAGE)
    .values(state=bindparam("to_state"), ended_at=_AT, seconds=bindparam("lasted_s"), message=bindparam("text"))
)
_SUBMIT_ATTEMPT = (
    update(ATTEMPTS)
    .where(*_ATTEMPT)
    .values(
        scheduler=bindparam("by_scheduler"),
        scheduler_job_id=bindparam("job_id"),
        submission=bindparam("content", type_=ATTEMPTS.c.submission.type),
        submitted_at=func.coalesce(ATTEMPTS.c.submitted_at, _AT),
        state=case(
            (ATTEMPTS.c.state == AttemptState.PLANNED.value, AttemptState.SUBMITTED.value), else_=ATTEMPTS.c.state
        ),
    )
)


class _EventText(NamedTuple):
    """Columns of an event that depend on the kind of its journal line."""

    message: str
    attempt: int | None = None
    restart: int | None = None
    state: str | None = None


def write_journal(connection: Connection, run_id: str, entries: Sequence[JournalEntry]) -> None:
    """Write the rows of journal lines, in their order, and an event for each.

    Raises:
        IllegalMove: the journal has a change of state that is not in the table of moves.
    """
    rows = []
    for entry in entries:
        text = _write_line(connection, run_id, entry)
        line, columns = entry.line, text._asdict()
        columns |= {"data": {"sequence": line.sequence, "token": line.token}}
        rows.append(event_row(run_id, "control.jsonl", entry.position, line.time, line.event.kind, **columns))
    insert_or_keep(connection, EVENTS, rows)


def _write_line(connection: Connection, run_id: str, entry: JournalEntry) -> _EventText:
    """Write the rows of a line, except those that are built from ``spec.json``; return the text of its event."""
    time = entry.line.time
    match entry.line.event:
        case RunCreated() as event:
            by = attributed(event.owner, event.owner_account)
            return _EventText(f"{by} requested {event.name} with {event.config_source}", state=RunState.PENDING.value)
        case RunMoved() as event:
            _move_run(connection, run_id, event, time)
            return _EventText(event.cause, state=event.state.value)
        case StageStarted() as event:
            _start_stage(connection, run_id, event, time)
            return _EventText(f"{event.name.value} started", event.attempt or None, state=StageState.RUNNING.value)
        case StageEnded() as event:
            _end_stage(connection, run_id, event, time)
            message = event.message or f"stage {event.stage_index}: {event.state.value}"
            return _EventText(message, state=event.state.value)
        case ChecksMade() as event:
            write_checks(connection, run_id, event.results, entry.position, time)
            counts = Counter(result.status for result in event.results)
            shown = ", ".join(f"{counts[status]} {status.value}" for status in CheckStatus if counts[status])
            return _EventText(shown or "no checks")
        case TrialPlanned() as event:
            return _EventText(f"the trial {event.run_id} decides {event.check_id}")
        case AttemptPlanned(placement=placement):
            write_placement(connection, run_id, placement, time)
            text = f"{count(placement.num_nodes, 'node')}, from {placement.resume_checkpoint or 'the beginning'}"
            text += f"; {placement.size_reason}" if placement.size_reason else ""
            return _EventText(text, placement.attempt, state=AttemptState.PLANNED.value)
        case AttemptSubmitted(submission=submission):
            _submit_attempt(connection, run_id, submission, time)
            job = f"{submission.scheduler} job {submission.job_id}"
            return _EventText(job, submission.attempt, state=AttemptState.SUBMITTED.value)
        case AttemptMoved() as event:
            _move_attempt(connection, run_id, event, time)
            return _EventText(event.cause, event.attempt, state=event.state.value)
        case IncidentFound(incident=incident):
            write_incidents(connection, run_id, [incident], f"control-{entry.position}", "controller")
            return _EventText(incident.message, incident.attempt, incident.restart)
        case DecisionMade(decision=decision):
            write_decisions(connection, run_id, [decision], f"control-{entry.position}")
            return _EventText(decision.reason, decision.attempt, decision.restart)
        case CancelStarted() as event:
            return _EventText(f"is being cancelled: {event.reason}")
        case CodeTaken() as event:
            changed = ", ".join(event.changed) or "nothing"
            return _EventText(f"{event.by} had the code copied again; changed: {changed}")
        case ControllerStarted() as event:
            row = {**event.model_dump(exclude={"kind", "resumed"}), "started_at": time}
            insert_or_keep(connection, CONTROLLERS, [{"run_id": run_id, "position": entry.position, **row}])
            return _EventText(f"{event.controller} drives the run")
        case PromotionMoved() as event:
            _move_promotion(connection, run_id, event, time)
            why = ": ".join(part for part in (event.by, event.reason) if part)
            message = f"promotion of step {event.checkpoint_step} {event.state.value}"
            return _EventText(f"{message} ({why})" if why else message)


def _move_run(connection: Connection, run_id: str, event: RunMoved, time: datetime) -> None:
    sources = sources_of(event.state, RUN_MOVES)
    change = {"to_state": event.state.value, "cause": event.cause, "at": time}
    end = time if event.state in RUN_ENDS else None
    moved = connection.execute(_MOVE_RUN, {"of_run": run_id, "sources": sources, "end": end, **change})
    if moved.rowcount != 1:
        present = connection.execute(select(RUNS.c.state).where(RUNS.c.run_id == run_id)).scalar_one()
        _refuse_move(f"run {run_id}", present, event.state.value, sources)


def _move_attempt(connection: Connection, run_id: str, event: AttemptMoved, time: datetime) -> None:
    sources = sources_of(event.state, ATTEMPT_MOVES)
    key = {"of_run": run_id, "of_attempt": event.attempt}
    change: Row = {"to_state": event.state.value, "cause": event.cause}
    if event.state is not AttemptState.PLANNED:  # no move leads to it, and it sets no time
        change["at"] = time
    if event.failure_kind is not None:
        change["failure"] = event.failure_kind.value
    statement = _moving_attempt(event.state, event.failure_kind is not None)
    moved = connection.execute(statement, {**key, "sources": sources, **change})
    if moved.rowcount != 1:
        present = connection.execute(select(ATTEMPTS.c.state).where(*_ATTEMPT), key).scalar_one_or_none()
        _refuse_move(f"attempt {event.attempt} of {run_id}", present, event.state.value, sources)


@cache
def _moving_attempt(state: AttemptState, has_kind: bool) -> Update:
    change: Row = {"state": bindparam("to_state"), "message": bindparam("cause")}
    if has_kind:
        change["failure_kind"] = bindparam("failure")
    if state is AttemptState.SUBMITTED:
        change["submitted_at"] = func.coalesce(ATTEMPTS.c.submitted_at, _AT)
    if state is AttemptState.RUNNING:
        change["started_at"] = _AT
    if state in ATTEMPT_ENDS:
        change["ended_at"] = _AT
    return update(ATTEMPTS).where(*_ATTEMPT, ATTEMPTS.c.state.in_(_SOURCES)).values(change)


def _refuse_move(subject: str, present: str | None, target: str, sources: Sequence[str]) -> None:
    """Raise unless the target is the current state: a restarted controller may repeat a line."""
    if present == target:
        return
    raise IllegalMove(
        f"{subject} is {present or 'unknown'} and cannot become {target}; that is possible only from "
        f"{', '.join(sources) or 'no state'}. See its control.jsonl"
    )


def _move_promotion(connection: Connection, run_id: str, event: PromotionMoved, time: datetime) -> None:
    query = select(PROMOTIONS.c.state).where(PROMOTIONS.c.run_id == run_id)
    present = connection.execute(query).scalar_one_or_none()
    allowed = PROMOTION_BEGINNINGS if present is None else PROMOTION_MOVES[PromotionState(present)]
    if event.state not in allowed:
        sources = sources_of(event.state, PROMOTION_MOVES)
        _refuse_move(f"the promotion of {run_id}", present, event.state.value, sources)
    row = {
        "run_id": run_id,
        "state": event.state.value,
        "checkpoint_step": event.checkpoint_step,
        "decided_by": event.by,
        "reason": event.reason,
        "path": event.path,
        "requested_at": time,
        "state_changed_at": time,
    }
    is_request = event.state is PromotionState.WAITING
    insert_or_replace(connection, PROMOTIONS, [row], keep=[] if is_request else ["requested_at"])


def _start_stage(connection: Connection, run_id: str, event: StageStarted, time: datetime) -> None:
    row = {
        "run_id": run_id,
        "stage_index": event.stage_index,
        "name": event.name.value,
        "state": StageState.RUNNING.value,
        "attempt": event.attempt,
        "started_at": time,
        "message": "",
    }
    insert_or_keep(connection, STAGES, [row])


def _end_stage(connection: Connection, run_id: str, event: StageEnded, time: datetime) -> None:
    key = {"of_run": run_id, "of_stage": event.stage_index}
    started_at = connection.execute(_STAGE_STARTED_AT, key).scalar_one_or_none()
    if started_at is None:
        return  # its first line was torn; its end is still recorded as an event
    change = {"to_state": event.state.value, "at": time, "text": event.message}
    connection.execute(_END_STAGE, {**key, **change, "lasted_s": (time - started_at).total_seconds()})


def _submit_attempt(connection: Connection, run_id: str, submission: Submission, time: datetime) -> None:
    """Record a submission. If a controller that adopts the job repeats the line, only the content is updated."""
    content = {
        "by_scheduler": submission.scheduler,
        "job_id": submission.job_id,
        "content": as_json(submission),
        "at": time,
    }
    connection.execute(_SUBMIT_ATTEMPT, {"of_run": run_id, "of_attempt": submission.attempt, **content})
