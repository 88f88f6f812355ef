"""Rows of the run itself: spec and tags, progress, offsets of its files, cached goodput."""

from sqlalchemy import Connection, bindparam, case, delete, insert, select, update

from rlhf_core.history.batch import IngestBatch
from rlhf_core.history.run_shape import shape_key
from rlhf_core.history.tables.sqlalchemy_core import GOODPUT, GOODPUT_CACHE, OFFSETS, RUNS, TAGS, chunks
from rlhf_core.history.writers.upserts import Row, columns_of, insert_new, insert_or_keep, insert_or_replace
from rlhf_core.schemas.attempts import RUN_ENDS, RunState
from rlhf_core.schemas.journal import RunMoved
from rlhf_core.schemas.stored_spec import StoredSpec

_CACHED = ("wall_s", "queue_s", "productive_s", "repeated_s", "lost_s", "ettr")

# Built once: each round of ingestion executes them, and building a statement takes longer than executing it.
_TOKEN = update(RUNS).where(RUNS.c.run_id == bindparam("run")).values(journal_token=bindparam("token"))
_NEWEST = bindparam("newest", type_=RUNS.c.progress_at.type)
_PROGRESS = _TOKEN.values(progress_at=case((RUNS.c.progress_at < _NEWEST, _NEWEST), else_=RUNS.c.progress_at))
_FORGET_GOODPUT = delete(GOODPUT_CACHE).where(GOODPUT_CACHE.c.run_id == bindparam("run"))
_CACHE_GOODPUT = insert(GOODPUT_CACHE).from_select(
    ["run_id", "ingest_stamp", *_CACHED],
    select(RUNS.c.run_id, RUNS.c.ingest_stamp, *(GOODPUT.c[name] for name in _CACHED)).where(
        RUNS.c.run_id == bindparam("run"),
        GOODPUT.c.run_id == RUNS.c.run_id,
        RUNS.c.state.in_(sorted(state.value for state in RUN_ENDS)),
    ),
)


def insert_run(connection: Connection, run_dir: str, stored: StoredSpec, stamp: int) -> bool:
    """Insert the row of a new run; return False if another ingester was faster."""
    initial = {
        "state": RunState.PENDING.value,
        "message": "",
        "progress_at": stored.created_at,
        "journal_token": 0,
        "ingest_stamp": stamp,
    }
    inserted = insert_new(connection, RUNS, {**_run_columns(run_dir, stored), **initial})
    if inserted:
        _write_tags(connection, stored)
    return inserted


def update_run(connection: Connection, run_dir: str, stored: StoredSpec) -> None:
    """Update the columns from ``spec.json`` after the run directory was moved; the state is kept."""
    connection.execute(update(RUNS).where(RUNS.c.run_id == stored.run_id).values(_run_columns(run_dir, stored)))
    _write_tags(connection, stored)


def _write_tags(connection: Connection, stored: StoredSpec) -> None:
    connection.execute(delete(TAGS).where(TAGS.c.run_id == stored.run_id))
    insert_or_keep(connection, TAGS, [{"run_id": stored.run_id, "tag": tag} for tag in sorted(set(stored.tags))])


def _run_columns(run_dir: str, stored: StoredSpec) -> Row:
    spec = stored.spec
    return {
        **columns_of(RUNS, stored),
        "name": spec.name,
        "seed": spec.seed,
        "algorithm": spec.algorithm,
        "total_steps": spec.total_steps,
        "shape": shape_key(spec),
        "run_dir": run_dir,
    }


def write_progress(connection: Connection, run_id: str, batch: IngestBatch) -> None:
    """Update the newest time of the run and the fencing token of its journal."""
    times = [entry.line.time for entry in batch.journal]
    times += [entry.line.time for entry in batch.metrics]
    times += [entry.event.time for entry in batch.events]
    change: Row = {"run": run_id, "token": batch.journal_token}
    if times:
        connection.execute(_PROGRESS, {**change, "newest": max(times)})
    else:
        connection.execute(_TOKEN, change)


def cache_goodput(connection: Connection, run_id: str, batch: IngestBatch) -> None:
    """Cache the view ``run_goodput`` for an ended run, where it no longer changes, because computing it from the steps
    of all runs is slow. Does nothing for other runs, which is for almost every batch."""
    moves = [entry.line.event.state for entry in batch.journal if isinstance(entry.line.event, RunMoved)]
    has_ended = moves[-1] in RUN_ENDS if moves else batch.base.has_ended
    if batch.base.has_ended or has_ended:
        connection.execute(_FORGET_GOODPUT, {"run": run_id})
    if batch.is_last and has_ended:
        connection.execute(_CACHE_GOODPUT, {"run": run_id})


def write_offsets(connection: Connection, run_id: str, batch: IngestBatch) -> None:
    """Update the offsets of the files."""
    insert_or_replace(
        connection,
        OFFSETS,
        [{"run_id": run_id, "path": path, "position": position} for path, position in sorted(batch.offsets.items())],
    )
    for part in chunks(batch.forgotten):
        connection.execute(delete(OFFSETS).where(OFFSETS.c.run_id == run_id, OFFSETS.c.path.in_(part)))
