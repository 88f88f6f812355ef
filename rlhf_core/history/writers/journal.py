"""Rows of the journal: changes of state, stages, submissions, and an event for each line."""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import Connection, case, func, select, update

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
    PROMOTION_BEGINNINGS,
    PROMOTION_MOVES,
    RUN_ENDS,
    AttemptState,
    PromotionState,
    StageState,
    attempt_sources,
    promotion_sources,
    run_sources,
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
            row = {**event.model_dump(exclude={"kind"}), "started_at": line.time}
            insert_or_keep(connection, CONTROLLERS, [{"run_id": run_id, "position": entry.position, **row}])
        case PromotionMoved() as event:
            _move_promotion(connection, run_id, event, line.time)


def _control_id(entry: JournalEntry) -> str:
    return f"control-{entry.position}"


def _move_run(connection: Connection, run_id: str, event: RunMoved, time: datetime) -> None:
    sources = sorted(state.value for state in run_sources(event.state))
    moved = connection.execute(
        update(RUNS)
        .where(RUNS.c.run_id == run_id, RUNS.c.state.in_(sources))
        .values(
            state=event.state.value,
            message=event.cause,
            started_at=func.coalesce(RUNS.c.started_at, time),
            ended_at=time if event.state in RUN_ENDS else None,
        )
    )
    if moved.rowcount != 1:
        present = connection.execute(select(RUNS.c.state).where(RUNS.c.run_id == run_id)).scalar_one()
        _refuse_move(f"run {run_id}", present, event.state.value, sources)


def _move_attempt(connection: Connection, run_id: str, event: AttemptMoved, time: datetime) -> None:
    here = (ATTEMPTS.c.run_id == run_id, ATTEMPTS.c.number == event.attempt)
    sources = sorted(state.value for state in attempt_sources(event.state))
    change: Row = {"state": event.state.value, "message": event.cause}
    if event.failure_kind is not None:
        change["failure_kind"] = event.failure_kind.value
    if event.state is AttemptState.SUBMITTED:
        change["submitted_at"] = func.coalesce(ATTEMPTS.c.submitted_at, time)
    if event.state is AttemptState.RUNNING:
        change["started_at"] = time
    if event.state in ATTEMPT_ENDS:
        change["ended_at"] = time
    moved = connection.execute(update(ATTEMPTS).where(*here, ATTEMPTS.c.state.in_(sources)).values(change))
    if moved.rowcount != 1:
        present = connection.execute(select(ATTEMPTS.c.state).where(*here)).scalar_one_or_none()
        _refuse_move(f"attempt {event.attempt} of {run_id}", present, event.state.value, sources)


def _refuse_move(what: str, present: str | None, target: str, sources: Sequence[str]) -> None:
    """Raise, unless the state is the current one: a killed controller may repeat a line after its restart."""
    if present == target:
        return
    raise IllegalMove(
        f"{what} is {present or 'unknown'} and cannot become {target}; that is possible only from "
        f"{', '.join(sources) or 'no state'}. See its control.jsonl"
    )


def _move_promotion(connection: Connection, run_id: str, event: PromotionMoved, time: datetime) -> None:
    query = select(PROMOTIONS.c.state).where(PROMOTIONS.c.run_id == run_id)
    present = connection.execute(query).scalar_one_or_none()
    allowed = PROMOTION_BEGINNINGS if present is None else PROMOTION_MOVES[PromotionState(present)]
    if event.state not in allowed:
        _refuse_move(f"the promotion of {run_id}", present, event.state.value, sorted(promotion_sources(event.state)))
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
    insert_or_replace(connection, PROMOTIONS, [row], keep=["requested_at"])


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
    here = (STAGES.c.run_id == run_id, STAGES.c.stage_index == event.stage_index)
    started_at = connection.execute(select(STAGES.c.started_at).where(*here)).scalar_one_or_none()
    if started_at is None:
        return  # its first line was torn; its end is still recorded as an event
    connection.execute(
        update(STAGES)
        .where(*here)
        .values(
            state=event.state.value,
            ended_at=time,
            seconds=(time - started_at).total_seconds(),
            message=event.message,
        )
    )


def _submit_attempt(connection: Connection, run_id: str, event: AttemptSubmitted, time: datetime) -> None:
    """Record a submission. If a controller that adopts the job repeats the line, only the content is updated."""
    submission = event.submission
    connection.execute(
        update(ATTEMPTS)
        .where(ATTEMPTS.c.run_id == run_id, ATTEMPTS.c.number == submission.attempt)
        .values(
            scheduler=submission.scheduler,
            scheduler_job_id=submission.job_id,
            submission=as_json(submission),
            submitted_at=func.coalesce(ATTEMPTS.c.submitted_at, time),
            state=case(
                (ATTEMPTS.c.state == AttemptState.PLANNED.value, AttemptState.SUBMITTED.value), else_=ATTEMPTS.c.state
            ),
        )
    )
