"""A batch, written: which rows each thing becomes. Called by the store inside its one transaction per batch.

Every statement is an upsert on a key that comes from the files, or an update that names the states it may start from.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple

from pydantic import BaseModel
from sqlalchemy import Connection, Table, case, column, delete, func, insert, or_, select, table, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite

from rlhf_core.errors import IllegalMove
from rlhf_core.history import metric_rows, tables
from rlhf_core.history.batch import EventEntry, IngestBatch, JournalEntry, MetricsEntry, SetAside, TelemetryEntry
from rlhf_core.schemas.attempts import (
    ATTEMPT_ENDS,
    PROMOTION_BEGINNINGS,
    PROMOTION_MOVES,
    RUN_ENDS,
    AttemptState,
    PromotionState,
    RunState,
    StageState,
    attempt_sources,
    promotion_sources,
    run_sources,
)
from rlhf_core.schemas.checks import CheckResult, CheckStatus
from rlhf_core.schemas.failures import Decision, FailureKind, Incident
from rlhf_core.schemas.journal import (
    AttemptMoved,
    AttemptPlanned,
    AttemptSubmitted,
    CancelStarted,
    ChecksMade,
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
from rlhf_core.schemas.probe import ProbeReport
from rlhf_core.schemas.reports import AgentStatus, AttemptOutcome, CheckpointManifest, EvaluationReport, KeeperNote
from rlhf_core.schemas.resources import Placement
from rlhf_core.schemas.run import StoredSpec, shape_key
from rlhf_core.words import attributed

RUNS = tables.metadata.tables["runs"]
OFFSETS = tables.metadata.tables["ingest_offsets"]
STAGES = tables.metadata.tables["stages"]
CONTROLLERS = tables.metadata.tables["controllers"]
PROMOTIONS = tables.metadata.tables["promotions"]
CHECKS = tables.metadata.tables["checks"]
SPEEDS = tables.metadata.tables["node_speeds"]
ATTEMPTS = tables.metadata.tables["attempts"]
RESTARTS = tables.metadata.tables["restarts"]
NODES = tables.metadata.tables["attempt_nodes"]
KEYS = tables.metadata.tables["metric_keys"]
METRICS = tables.metadata.tables["metrics"]
LATEST = tables.metadata.tables["latest_metrics"]
INCIDENTS = tables.metadata.tables["incidents"]
DECISIONS = tables.metadata.tables["decisions"]
STRIKES = tables.metadata.tables["node_strikes"]
CHECKPOINTS = tables.metadata.tables["checkpoints"]
WEIGHTS = tables.metadata.tables["weight_versions"]
EVALUATIONS = tables.metadata.tables["evaluations"]
SAMPLES = tables.metadata.tables["evaluation_samples"]
EVENTS = tables.metadata.tables["events"]
TAGS = tables.metadata.tables["run_tags"]
TELEMETRY = tables.metadata.tables["node_telemetry"]
KEPT_GOODPUT = tables.metadata.tables["kept_goodput"]

SET_ASIDE = "set_aside"
"""Kind of the event that tells that something in a file of the run became no row."""

_MAX_BYTES = 2**63 - 1
_CHUNK = 1000
"""Values in one list of a statement: a database takes only so many."""

_KEPT = ("wall_s", "queue_s", "productive_s", "repeated_s", "lost_s", "ettr")
GOODPUT = table("run_goodput", *map(column, ("run_id", *_KEPT)))

Row = dict[str, Any]

NODE_FAILURES = frozenset(
    {
        FailureKind.NODE_LOST,
        FailureKind.NODE_UNFIT,
        FailureKind.GPU_HARDWARE,
        FailureKind.COLLECTIVE_HANG,
        FailureKind.NETWORK,
        FailureKind.HANG,
        FailureKind.ILLEGAL_ACCESS,
        FailureKind.FILE_SYSTEM,
        FailureKind.WORKER_KILLED,
        FailureKind.AGENT_KILLED,
    }
)
"""Failures that count against the suspect nodes. The others are the code's, the config's or the user's doing."""


# ---------------------------------------------------------------------------------------------------------------------
# Upserts, the same for both databases


def upsert(dialect: str, table: Table) -> Any:
    # Both dialects have the same on_conflict_* methods, but no common type.
    return sqlite.insert(table) if dialect == "sqlite" else postgresql.insert(table)


def insert_new(connection: Connection, table: Table, row: Row) -> bool:
    """Insert one row; False, with nothing done, where its key is taken."""
    statement = upsert(connection.dialect.name, table).on_conflict_do_nothing().values(row)
    # Without the option, SQLAlchemy does not keep the count of an INSERT.
    result = connection.execute(statement.execution_options(preserve_rowcount=True))
    return result.rowcount == 1


def insert_or_keep(connection: Connection, table: Table, rows: Sequence[Row]) -> None:
    """Insert rows; where the key is taken, the row that is there stays."""
    if rows:
        connection.execute(upsert(connection.dialect.name, table).on_conflict_do_nothing(), list(rows))


def insert_or_replace(connection: Connection, table: Table, rows: Sequence[Row], keep: Iterable[str] = ()) -> None:
    """Insert rows; where the key is taken, the given columns are replaced, but for those in ``keep``."""
    if not rows:
        return
    connection.execute(_replacing(connection.dialect.name, table, tuple(rows[0]), frozenset(keep)), list(rows))


@cache  # a statement takes longer to build than to carry out, and there are only so many
def _replacing(dialect: str, table: Table, columns: tuple[str, ...], keep: frozenset[str]) -> Any:
    statement = upsert(dialect, table)
    key = [column.name for column in table.primary_key]
    kept = {*key, *keep}
    changes = {name: statement.excluded[name] for name in columns if name not in kept}
    return statement.on_conflict_do_update(index_elements=key, set_=changes)


def _as_json(model: BaseModel) -> Any:
    """A schema as JSON values. Through text, because only there NaN becomes a string, which JSON columns can hold."""
    return json.loads(model.model_dump_json())


# ---------------------------------------------------------------------------------------------------------------------
# The run itself


def insert_run(connection: Connection, run_dir: str, stored: StoredSpec, stamp: int) -> bool:
    """The row of a run that the history does not know; False when another ingester was faster."""
    begun = {
        "state": RunState.PENDING.value,
        "message": "",
        "progress_at": stored.created_at,
        "journal_token": 0,
        "ingest_stamp": stamp,
    }
    row = {"run_id": stored.run_id, **_described_run(run_dir, stored), **begun}
    inserted = insert_new(connection, RUNS, row)
    if inserted:
        _write_tags(connection, stored)
    return inserted


def describe_run(connection: Connection, run_dir: str, stored: StoredSpec) -> None:
    """What ``spec.json`` says, anew: the run directory was moved. What happened to the run is left as it is."""
    connection.execute(update(RUNS).where(RUNS.c.run_id == stored.run_id).values(_described_run(run_dir, stored)))
    _write_tags(connection, stored)


def _write_tags(connection: Connection, stored: StoredSpec) -> None:
    connection.execute(delete(TAGS).where(TAGS.c.run_id == stored.run_id))
    insert_or_keep(connection, TAGS, [{"run_id": stored.run_id, "tag": tag} for tag in sorted(set(stored.tags))])


def _described_run(run_dir: str, stored: StoredSpec) -> Row:
    spec = stored.spec
    return {
        "name": spec.name,
        "owner": stored.owner,
        "owner_account": stored.owner_account,
        "seed": spec.seed,
        "algorithm": spec.loops.main.algorithm.name,
        "total_steps": spec.total_steps,
        "config_source": stored.config_source,
        "overrides": list(stored.overrides),
        "spec": _as_json(spec),
        "shape": shape_key(spec),
        "trial_of": stored.trial_of,
        "tags": list(stored.tags),
        "package_version": stored.package_version,
        "code_revision": stored.code_revision,
        "run_dir": run_dir,
        "created_at": stored.created_at,
    }


def write_progress(connection: Connection, run_id: str, batch: IngestBatch) -> None:
    """The newest time of the run, and the fencing token that its journal has reached."""
    times = [entry.line.time for entry in batch.journal]
    times += [entry.line.time for entry in batch.metrics]
    times += [entry.event.time for entry in batch.events]
    change: Row = {"journal_token": batch.journal_token}
    if times:
        newest = max(times)
        change["progress_at"] = case((RUNS.c.progress_at < newest, newest), else_=RUNS.c.progress_at)
    connection.execute(update(RUNS).where(RUNS.c.run_id == run_id).values(change))


def keep_goodput(connection: Connection, run_id: str) -> None:
    """Keep what the view says of a run that is over: it will not change, and making it from the steps takes long when
    it is asked about all runs. Does nothing for a run that is not over."""
    measured = select(RUNS.c.run_id, RUNS.c.ingest_stamp, *(GOODPUT.c[name] for name in _KEPT)).where(
        RUNS.c.run_id == run_id,
        GOODPUT.c.run_id == RUNS.c.run_id,
        RUNS.c.state.in_(sorted(state.value for state in RUN_ENDS)),
    )
    names = ["run_id", "ingest_stamp", *_KEPT]
    connection.execute(delete(KEPT_GOODPUT).where(KEPT_GOODPUT.c.run_id == run_id))
    connection.execute(insert(KEPT_GOODPUT).from_select(names, measured))


def write_offsets(connection: Connection, run_id: str, batch: IngestBatch) -> None:
    """How far the files were read."""
    insert_or_replace(
        connection,
        OFFSETS,
        [{"run_id": run_id, "path": path, "position": position} for path, position in sorted(batch.offsets.items())],
    )
    forgotten = sorted(batch.forgotten)
    for begin in range(0, len(forgotten), _CHUNK):
        part = forgotten[begin : begin + _CHUNK]
        connection.execute(delete(OFFSETS).where(OFFSETS.c.run_id == run_id, OFFSETS.c.path.in_(part)))


# ---------------------------------------------------------------------------------------------------------------------
# The journal


def write_journal(connection: Connection, run_id: str, entries: Sequence[JournalEntry]) -> None:
    """What the controller wrote down, in its order.

    Raises:
        IllegalMove: the journal has a change of state that the table of moves does not allow.
    """
    for entry in entries:
        _write_journal_event(connection, run_id, entry)
    insert_or_keep(connection, EVENTS, [_journal_event_row(run_id, entry) for entry in entries])


def _write_journal_event(connection: Connection, run_id: str, entry: JournalEntry) -> None:
    line = entry.line
    match line.event:
        case RunCreated() | TrialPlanned() | CancelStarted():
            pass  # the row of each is made from its spec.json
        case RunMoved() as event:
            _move_run(connection, run_id, event, line.time)
        case StageStarted() as event:
            _start_stage(connection, run_id, event, line.time)
        case StageEnded() as event:
            _end_stage(connection, run_id, event, line.time)
        case ChecksMade() as event:
            _write_checks(connection, run_id, event.results, entry.position, line.time)
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
    """Raise, unless it is there already: a controller that was killed may say a thing again after its restart."""
    if present == target:
        return
    raise IllegalMove(
        f"{what} is {present or 'unknown'} and cannot become {target}; that is possible only from "
        f"{', '.join(sources) or 'no state'}. Look into its control.jsonl"
    )


def _move_promotion(connection: Connection, run_id: str, event: PromotionMoved, time: datetime) -> None:
    question = select(PROMOTIONS.c.state).where(PROMOTIONS.c.run_id == run_id)
    present = connection.execute(question).scalar_one_or_none()
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
        "asked_at": time,
        "moved_at": time,
    }
    insert_or_replace(connection, PROMOTIONS, [row], keep=["asked_at"])


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
        return  # the line that began it was torn; the event below still tells of its end
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


def _write_checks(
    connection: Connection, run_id: str, results: Sequence[CheckResult], round: int, made_at: datetime, attempt: int = 0
) -> None:
    rows = [
        {
            "run_id": run_id,
            "round": round,
            "position": position,
            "check_id": result.id,
            "status": result.status.value,
            "found": result.found,
            "expected": result.expected,
            "advice": result.advice,
            "node": result.node,
            "seconds": result.seconds,
            "made_at": made_at,
            "attempt": attempt,
        }
        for position, result in enumerate(results)
    ]
    insert_or_replace(connection, CHECKS, rows)


def write_probes(connection: Connection, run_id: str, probes: Sequence[ProbeReport]) -> None:
    """Findings about the nodes of an attempt, and what they measured."""
    for probe in probes:
        _write_checks(connection, run_id, probe.results, -probe.attempt, probe.made_at, probe.attempt)
        rows = []
        for speed in probe.speeds:
            spoke = [pair for pair in speed.pairs if not pair.problem]
            rows.append(
                {
                    "run_id": run_id,
                    "attempt": probe.attempt,
                    "node": speed.node,
                    "device": speed.device,
                    "matmul_tflops": speed.matmul_tflops,
                    "core_share": speed.core_share,
                    "bandwidth_gb_s": max((pair.gb_s for pair in spoke), default=0.0),
                    "latency_ms": min((pair.latency_ms for pair in spoke), default=0.0),
                    "measured_at": probe.made_at,
                }
            )
        insert_or_replace(connection, SPEEDS, rows)


def write_placement(connection: Connection, run_id: str, placement: Placement, planned_at: datetime) -> None:
    """An attempt that was planned."""
    row = {
        **_blank_attempt(run_id, placement.attempt),
        "placement": _as_json(placement),
        "num_nodes": placement.num_nodes,
        "resume_checkpoint": placement.resume_checkpoint,
        "resumed_from_step": placement.resumed_from_step,
        "planned_at": planned_at,
    }
    insert_or_replace(connection, ATTEMPTS, [row], keep=("state", "message", "scheduler"))


def write_attempts(connection: Connection, run_id: str, numbers: Iterable[int]) -> None:
    """Attempts that have a folder: a row each, should the journal line that planned one be torn."""
    insert_or_keep(connection, ATTEMPTS, [_blank_attempt(run_id, number) for number in sorted(numbers)])


def _blank_attempt(run_id: str, number: int) -> Row:
    return {
        "run_id": run_id,
        "number": number,
        "state": AttemptState.PLANNED.value,
        "message": "",
        "scheduler": "",
        "num_nodes": 0,
        "resume_checkpoint": "",
        "resumed_from_step": 0,
    }


def _submit_attempt(connection: Connection, run_id: str, event: AttemptSubmitted, time: datetime) -> None:
    """The scheduler took it. Said again when a restarted controller adopts the job: then only the answer is renewed."""
    submission = event.submission
    connection.execute(
        update(ATTEMPTS)
        .where(ATTEMPTS.c.run_id == run_id, ATTEMPTS.c.number == submission.attempt)
        .values(
            scheduler=submission.scheduler,
            scheduler_job_id=submission.job_id,
            submission=_as_json(submission),
            submitted_at=func.coalesce(ATTEMPTS.c.submitted_at, time),
            state=case(
                (ATTEMPTS.c.state == AttemptState.PLANNED.value, AttemptState.SUBMITTED.value), else_=ATTEMPTS.c.state
            ),
        )
    )


# ---------------------------------------------------------------------------------------------------------------------
# Events


def write_events(connection: Connection, run_id: str, entries: Sequence[EventEntry]) -> None:
    """What the agents wrote down."""
    rows = [
        {
            "run_id": run_id,
            "source": entry.source,
            "position": entry.position,
            "time": entry.event.time,
            "kind": entry.event.kind,
            "attempt": entry.attempt,
            "restart": entry.restart,
            "node": entry.event.node,
            "role": entry.event.role.value if entry.event.role else None,
            "state": None,
            "message": entry.event.message,
            "data": _as_json(entry.event)["data"],
        }
        for entry in entries
    ]
    insert_or_keep(connection, EVENTS, rows)


def write_notes(connection: Connection, run_id: str, source: str, notes: Sequence[tuple[int, KeeperNote]]) -> None:
    """What the keeper of the site wrote down."""
    rows = [
        {
            "run_id": run_id,
            "source": source,
            "position": position,
            "time": note.time,
            "kind": f"keeper_{note.kind}",
            "attempt": note.attempt,
            "restart": None,
            "node": "",
            "role": None,
            "state": None,
            "message": note.message,
            "data": dict(note.data),
        }
        for position, note in notes
    ]
    insert_or_keep(connection, EVENTS, rows)


def write_set_aside(connection: Connection, run_id: str, found: Sequence[SetAside]) -> None:
    """Write events about what became no row."""
    rows: list[Row] = [
        {
            "run_id": run_id,
            "source": one.source,
            "position": one.position,
            "time": one.found_at,
            "kind": SET_ASIDE,
            "attempt": None,
            "restart": None,
            "node": "",
            "role": None,
            "state": None,
            "message": one.message,
            "data": {},
        }
        for one in found
    ]
    insert_or_keep(connection, EVENTS, rows)


class _Told(NamedTuple):
    """What an event row says of a journal line."""

    message: str
    attempt: int | None = None
    restart: int | None = None
    state: str | None = None


def _journal_event_row(run_id: str, entry: JournalEntry) -> Row:
    line: JournalLine = entry.line
    told = _tell(line.event)
    return {
        "run_id": run_id,
        "source": "control.jsonl",
        "position": entry.position,
        "time": line.time,
        "kind": line.event.kind,
        "attempt": told.attempt,
        "restart": told.restart,
        "node": "",
        "role": None,
        "state": told.state,
        "message": told.message,
        "data": {"sequence": line.sequence, "token": line.token},
    }


def _tell(event: ControlEvent) -> _Told:
    match event:
        case RunCreated(name=name, owner=owner, owner_account=account, config_source=source):
            return _Told(f"{attributed(owner, account)} asked for {name} with {source}", state=RunState.PENDING.value)
        case RunMoved(state=run_state, cause=cause):
            return _Told(cause, state=run_state.value)
        case StageStarted(name=stage, attempt=attempt):
            return _Told(f"{stage.value} began", attempt or None, state=StageState.RUNNING.value)
        case StageEnded(stage_index=index, state=stage_state, message=message):
            return _Told(message or f"stage {index}: {stage_state.value}", state=stage_state.value)
        case ChecksMade(results=results):
            counts = ((status, sum(result.status is status for result in results)) for status in CheckStatus)
            return _Told(", ".join(f"{count} {status.value}" for status, count in counts if count) or "no checks")
        case TrialPlanned(check_id=check_id, run_id=trial):
            return _Told(f"{check_id} is decided by the trial {trial}")
        case AttemptPlanned(placement=placement):
            origin = placement.resume_checkpoint or "the beginning"
            return _Told(
                f"{placement.num_nodes} node(s), from {origin}", placement.attempt, state=AttemptState.PLANNED.value
            )
        case AttemptSubmitted(submission=submission):
            job = f"{submission.scheduler} job {submission.job_id}"
            return _Told(job, submission.attempt, state=AttemptState.SUBMITTED.value)
        case AttemptMoved(attempt=attempt, state=attempt_state, cause=cause):
            return _Told(cause, attempt, state=attempt_state.value)
        case IncidentFound(incident=incident):
            return _Told(incident.message, incident.attempt, incident.restart)
        case DecisionMade(decision=decision):
            return _Told(decision.reason, decision.attempt, decision.restart)
        case CancelStarted(reason=reason):
            return _Told(f"is being cancelled: {reason}")
        case ControllerStarted(controller=controller):
            return _Told(f"{controller} drives the run")
        case PromotionMoved(state=promotion_state, checkpoint_step=step, by=by, reason=reason):
            why = ": ".join(part for part in (by, reason) if part)
            return _Told(f"promotion of step {step} {promotion_state.value}" + (f" ({why})" if why else ""))


# ---------------------------------------------------------------------------------------------------------------------
# Restarts, metrics, nodes


def write_restarts(connection: Connection, run_id: str, batch: IngestBatch) -> None:
    """What each restart spans, widened by what the batch has of it."""
    times: dict[tuple[int, int], list[datetime]] = {restart: [] for restart in sorted(batch.restarts)}
    steps: dict[tuple[int, int], list[int]] = {}
    roles: dict[tuple[int, int], str] = {}
    for event in batch.events:
        times.setdefault((event.attempt, event.restart), []).append(event.event.time)
        if event.event.role is not None:
            roles[event.attempt, event.restart] = event.event.role.value
    for metrics in batch.metrics:
        times.setdefault((metrics.attempt, metrics.restart), []).append(metrics.line.time)
        steps.setdefault((metrics.attempt, metrics.restart), []).append(metrics.line.step)
    rows = [
        {
            "run_id": run_id,
            "attempt": attempt,
            "restart": restart,
            "role": roles.get((attempt, restart)),
            "started_at": min(seen, default=None),
            "ended_at": max(seen, default=None),
            "first_step": min(steps.get((attempt, restart), ()), default=None),
            "last_step": max(steps.get((attempt, restart), ()), default=None),
        }
        for (attempt, restart), seen in times.items()
    ]
    if rows:
        connection.execute(_widening(connection.dialect.name), rows)


@cache
def _widening(dialect: str) -> Any:
    statement = upsert(dialect, RESTARTS)
    new = statement.excluded

    def wider(name: str, is_wider: Callable[[Any, Any], Any]) -> Any:
        old = RESTARTS.c[name]
        return case((new[name].is_(None), old), (or_(old.is_(None), is_wider(new[name], old)), new[name]), else_=old)

    return statement.on_conflict_do_update(
        index_elements=["run_id", "attempt", "restart"],
        set_={
            "role": func.coalesce(new.role, RESTARTS.c.role),
            "started_at": wider("started_at", lambda new, old: new < old),
            "ended_at": wider("ended_at", lambda new, old: new > old),
            "first_step": wider("first_step", lambda new, old: new < old),
            "last_step": wider("last_step", lambda new, old: new > old),
        },
    )


def write_metric_keys(connection: Connection, names: Iterable[str]) -> dict[str, int]:
    """Ids of metric names; new names get one.

    Asked for in every batch rather than remembered: an id remembered from a transaction that was rolled back, or from a
    database that was made again, would silently file values under another name.
    """
    wanted = sorted(set(names))
    known = _metric_key_ids(connection, wanted)
    new = [{"name": name} for name in wanted if name not in known]  # sorted: two controllers cannot block each other
    if new:
        insert_or_keep(connection, KEYS, new)
        known = _metric_key_ids(connection, wanted)
    return known


def _metric_key_ids(connection: Connection, names: Sequence[str]) -> dict[str, int]:
    known: dict[str, int] = {}
    for begin in range(0, len(names), _CHUNK):
        part = select(KEYS.c.name, KEYS.c.key_id).where(KEYS.c.name.in_(names[begin : begin + _CHUNK]))
        known |= {row.name: row.key_id for row in connection.execute(part)}
    return known


def write_metrics(
    connection: Connection, run_id: str, entries: Sequence[MetricsEntry], key_ids: Mapping[str, int]
) -> None:
    """Metric rows, and the newest value of each metric."""
    rows: list[metric_rows.MetricRow] = []
    latest: dict[int, tuple[MetricsEntry, float]] = {}
    for entry in sorted(entries, key=_order):  # so that what comes later is newer
        line = entry.line
        time = metric_rows.stored_time(connection, line.time)
        step, attempt, restart = line.step, entry.attempt, entry.restart
        for name, value in line.metrics.items():
            key_id = key_ids[name]
            latest[key_id] = (entry, value)
            if math.isfinite(value):
                rows.append((run_id, key_id, step, attempt, restart, value, None, time))
            else:
                rows.append((run_id, key_id, step, attempt, restart, None, _non_finite(value), time))
    metric_rows.insert(connection, rows)
    _write_latest(connection, [_latest_row(run_id, key_id, *latest[key_id]) for key_id in sorted(latest)])


def _order(entry: MetricsEntry) -> tuple[int, int, int]:
    return entry.attempt, entry.restart, entry.line.step


def _latest_row(run_id: str, key_id: int, entry: MetricsEntry, value: float) -> Row:
    finite = math.isfinite(value)
    return {
        "run_id": run_id,
        "key_id": key_id,
        "step": entry.line.step,
        "attempt": entry.attempt,
        "restart": entry.restart,
        "value": value if finite else None,
        "non_finite": None if finite else _non_finite(value),
        "time": entry.line.time,
    }


def _non_finite(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _write_latest(connection: Connection, rows: Sequence[Row]) -> None:
    if rows:
        ordered = sorted(rows, key=lambda row: row["key_id"])
        connection.execute(_newest_metric(connection.dialect.name), ordered)


@cache
def _newest_metric(dialect: str) -> Any:
    statement = upsert(dialect, LATEST)
    new = statement.excluded
    return statement.on_conflict_do_update(
        index_elements=["run_id", "key_id"],
        set_={name: new[name] for name in ("step", "attempt", "restart", "value", "non_finite", "time")},
        where=tuple_(new.attempt, new.restart, new.step) > tuple_(LATEST.c.attempt, LATEST.c.restart, LATEST.c.step),
    )


def write_telemetry(connection: Connection, run_id: str, entries: Sequence[TelemetryEntry]) -> None:
    """Figures of the nodes over time."""
    rows = [
        {
            "run_id": run_id,
            "attempt": entry.attempt,
            "restart": entry.restart,
            "node": entry.node,
            "position": entry.position,
            "time": entry.line.time,
            "seconds": entry.line.seconds,
            "figures": {name: value for name, value in entry.line.figures.items() if math.isfinite(value)},
        }
        for entry in entries
    ]
    insert_or_keep(connection, TELEMETRY, rows)


def write_nodes(connection: Connection, run_id: str, statuses: Sequence[AgentStatus]) -> None:
    """What the agents said last, the newest restart winning."""
    if not statuses:
        return
    rows = []
    for status in sorted(statuses, key=lambda status: status.restart):
        content = _as_json(status)
        rows.append(
            {
                "run_id": run_id,
                "attempt": status.attempt,
                "node": status.node,
                "node_index": status.node_index,
                "restart": status.restart,
                "role": status.role.value,
                "sequence": status.sequence,
                "ranks": content["ranks"],
                "telemetry": content["telemetry"],
                "longest_gaps_s": content["longest_gaps_s"],
            }
        )
    connection.execute(_newest_status(connection.dialect.name), rows)


@cache
def _newest_status(dialect: str) -> Any:
    statement = upsert(dialect, NODES)
    new = statement.excluded
    changing = ("node_index", "restart", "role", "sequence", "ranks", "telemetry", "longest_gaps_s")
    return statement.on_conflict_do_update(
        index_elements=["run_id", "attempt", "node"],
        set_={name: new[name] for name in changing},
        where=new.restart >= NODES.c.restart,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Incidents, decisions, outcomes


def write_incidents(
    connection: Connection, run_id: str, incidents: Sequence[Incident], incident_id: str = "", found_by: str = "agent"
) -> None:
    """Incidents, and the strikes they are against nodes.

    Args:
        incident_id: empty for incidents of agents, which are known by their attempt and restart.
    """
    rows = []
    strikes = []
    for incident in incidents:
        identity = incident_id or f"{incident.attempt}.{incident.restart}"
        rows.append(
            {
                "run_id": run_id,
                "incident_id": identity,
                "attempt": incident.attempt,
                "restart": incident.restart,
                "found_by": found_by,
                "failure_kind": incident.failure_kind.value,
                "phase": incident.phase,
                "step": incident.step,
                "suspect_ranks": list(incident.suspect_ranks),
                "suspect_nodes": list(incident.suspect_nodes),
                "detected_after_s": incident.detected_after_s,
                "seen_at": incident.seen_at,
                "fingerprint": incident.fingerprint,
                "evidence_dir": incident.evidence_dir,
                "message": incident.message,
                "collective": incident.collective,
                "collective_sequence": incident.collective_sequence,
            }
        )
        if incident.failure_kind in NODE_FAILURES:
            strikes += [
                {
                    "run_id": run_id,
                    "incident_id": identity,
                    "node": node,
                    "attempt": incident.attempt,
                    "failure_kind": incident.failure_kind.value,
                    "struck_at": incident.seen_at,
                }
                for node in sorted(set(incident.suspect_nodes))
            ]
    insert_or_replace(connection, INCIDENTS, rows)
    for row in rows:  # an incident that was written anew may blame others
        connection.execute(
            delete(STRIKES).where(STRIKES.c.run_id == run_id, STRIKES.c.incident_id == row["incident_id"])
        )
    insert_or_replace(connection, STRIKES, strikes)


def write_decisions(connection: Connection, run_id: str, decisions: Sequence[Decision], decision_id: str = "") -> None:
    """Decisions; ``decision_id`` as in :func:`write_incidents`."""
    rows = [
        {
            "run_id": run_id,
            "decision_id": decision_id or f"{decision.attempt}.{decision.restart}",
            "attempt": decision.attempt,
            "restart": decision.restart,
            "action": decision.action.value,
            "reason": decision.reason,
            "decided_by": decision.decided_by.value,
            "decided_at": decision.decided_at,
            "delay_s": decision.delay_s,
            "excluded_nodes": list(decision.excluded_nodes),
            "config_diff": _as_json(decision)["config_diff"],
            "resume_checkpoint": decision.resume_checkpoint,
        }
        for decision in decisions
    ]
    insert_or_replace(connection, DECISIONS, rows)


def write_outcomes(connection: Connection, run_id: str, outcomes: Sequence[AttemptOutcome]) -> None:
    """What ``outcome.json`` says. The state of the attempt is the journal's to change."""
    for outcome in outcomes:
        connection.execute(
            update(ATTEMPTS)
            .where(ATTEMPTS.c.run_id == run_id, ATTEMPTS.c.number == outcome.attempt)
            .values(
                outcome_state=outcome.state.value,
                outcome_failure_kind=outcome.failure_kind.value if outcome.failure_kind else None,
                outcome_message=outcome.message,
                num_restarts=outcome.num_restarts,
                last_step=outcome.last_step,
                outcome_at=outcome.time,
            )
        )


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints, evaluations


def write_checkpoints(
    connection: Connection, run_id: str, checkpoints: Sequence[tuple[str, CheckpointManifest]]
) -> None:
    """Complete checkpoints, and the weights they hold."""
    rows = [
        {
            "run_id": run_id,
            "step": manifest.step,
            "path": path,
            "stage": manifest.loop,
            "stage_finished": manifest.loop_finished,
            "num_ranks": manifest.num_ranks,
            "spec_hash": manifest.spec_hash,
            "num_files": len(manifest.files),
            "bytes": min(sum(file.bytes for file in manifest.files.values()), _MAX_BYTES),
            "completed_at": manifest.time,
            "removed_at": None,
        }
        for path, manifest in checkpoints
    ]
    insert_or_replace(connection, CHECKPOINTS, rows)
    weights = [_weights_row(run_id, manifest) for _, manifest in checkpoints]
    insert_or_replace(connection, WEIGHTS, [row for row in weights if row is not None])


def _weights_row(run_id: str, manifest: CheckpointManifest) -> Row | None:
    files = {name: file for name, file in manifest.files.items() if name.startswith("model/") and _holds_weights(name)}
    if not files:
        return None
    return {
        "run_id": run_id,
        "version": manifest.step,
        "sha256": _combined_sha256({name: file.sha256 for name, file in files.items()}),
        "num_files": len(files),
        "checkpoint_step": manifest.step,
        "made_at": manifest.time,
    }


def _holds_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".pt"))


def _combined_sha256(hashes: Mapping[str, str]) -> str:
    if len(hashes) == 1:
        return next(iter(hashes.values()))
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(hashes.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def write_removed_checkpoints(connection: Connection, run_id: str, removed: Mapping[int, datetime]) -> None:
    """Checkpoints that are gone keep their row, with the time at which that was first seen."""
    for step, seen_at in sorted(removed.items()):
        connection.execute(
            update(CHECKPOINTS)
            .where(CHECKPOINTS.c.run_id == run_id, CHECKPOINTS.c.step == step, CHECKPOINTS.c.removed_at.is_(None))
            .values(removed_at=seen_at)
        )


def write_evaluations(connection: Connection, run_id: str, reports: Sequence[EvaluationReport]) -> None:
    """Evaluations and their sample tables; one that was made again replaces the older one."""
    for report in reports:
        row = {
            "run_id": run_id,
            "when_made": report.when,
            "name": report.name,
            "metric": report.metric,
            "value": _finite_or_none(report.value),
            "ci_low": _finite_or_none(report.ci_low),
            "ci_high": _finite_or_none(report.ci_high),
            "num_prompts": report.num_prompts,
            "num_samples": report.num_samples,
            "checkpoint_step": report.checkpoint_step,
            "seconds": report.seconds,
            "made_at": report.time,
        }
        insert_or_replace(connection, EVALUATIONS, [row])
        connection.execute(
            delete(SAMPLES).where(
                SAMPLES.c.run_id == run_id, SAMPLES.c.when_made == report.when, SAMPLES.c.name == report.name
            )
        )
        samples = [
            {
                "run_id": run_id,
                "when_made": report.when,
                "name": report.name,
                "position": position,
                "prompt_uid": sample.prompt_uid,
                "sample_index": sample.sample_index,
                "prompt": sample.prompt,
                "completion": sample.completion,
                "answer": sample.answer,
                "score": _finite_or_none(sample.score),
            }
            for position, sample in enumerate(report.samples)
        ]
        insert_or_replace(connection, SAMPLES, samples)


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
