"""Rows of the journal: changes of state, stages, submissions, and an event for each line."""

from collections.abc import Sequence
from datetime import datetime
from functools import cache

from sqlalchemy import BindParameter, Connection, Update, bindparam, case, func, select, update

from rlhf_core.errors import IllegalMove
from rlhf_core.history.batch import JournalEntry
from rlhf_core.history.tables.sqlalchemy_core import ATTEMPTS, CONTROLLERS, EVENTS, PROMOTIONS, RUNS, STAGES
from rlhf_core.history.writers.attempts import write_placement
from rlhf_core.history.writers.checks import write_checks
from rlhf_core.history.writers.events import journal_event_row
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
    StageState,
    sources_of,
)
from rlhf_core.schemas.journal import (
    AttemptMoved,
    AttemptPlanned,
    AttemptSubmitted,
    CancelStarted,
    ChecksMade,
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


def write_journal(connection: Connection, run_id: str, entries: Sequence[JournalEntry]) -> None:
    """Write the rows of journal lines, in their order.

    Raises:
        IllegalMove: the journal has a change of state that is not in the table of moves.
    """
    for entry in entries:
        _write_journal_event(connection, run_id, entry)
    insert_or_keep(connection, EVENTS, [journal_event_row(run_id, entry) for entry in entries])


def _write_journal_event(connection: Connection, run_id: str, entry: JournalEntry) -> None:
    line = entry.line
    match line.event:
        case RunCreated() | TrialPlanned() | CancelStarted():
            pass  # their rows are built from spec.json
        case RunMoved() as event:
            _move_run(connection, run_id, event, line.time)
        case StageStarted() as event:
            _start_stage(connection, run_id, event, line.time)
        case StageEnded() as event:
            _end_stage(connection, run_id, event, line.time)
        case ChecksMade() as event:
            write_checks(connection, run_id, event.results, entry.position, line.time)
        case AttemptPlanned() as event:
            write_placement(connection, run_id, event.placement, line.time)
        case AttemptSubmitted() as event:
            _submit_attempt(connection, run_id, event, line.time)
        case AttemptMoved() as event:
            _move_attempt(connection, run_id, event, line.time)
        case IncidentFound() as event:
            write_incidents(connection, run_id, [event.incident], _control_id(entry), "controller")
        case DecisionMade() as event:
            write_decisions(connection, run_id, [event.decision], _control_id(entry))
        case ControllerStarted() as event:
            row = {**event.model_dump(exclude={"kind", "resumed"}), "started_at": line.time}
            insert_or_keep(connection, CONTROLLERS, [{"run_id": run_id, "position": entry.position, **row}])
        case PromotionMoved() as event:
            _move_promotion(connection, run_id, event, line.time)


def _control_id(entry: JournalEntry) -> str:
    return f"control-{entry.position}"


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


def _submit_attempt(connection: Connection, run_id: str, event: AttemptSubmitted, time: datetime) -> None:
    """Record a submission. If a controller that adopts the job repeats the line, only the content is updated."""
    submission = event.submission
    content = {
        "by_scheduler": submission.scheduler,
        "job_id": submission.job_id,
        "content": as_json(submission),
        "at": time,
    }
    connection.execute(_SUBMIT_ATTEMPT, {"of_run": run_id, "of_attempt": submission.attempt, **content})
