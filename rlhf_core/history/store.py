"""Writes to the history: leases, and batches of ingestion in one transaction each."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from types import TracebackType
from typing import Self

from sqlalchemy import Connection, delete, func, select, update

from rlhf_core.errors import HistoryError, LeaseLost
from rlhf_core.history import database, migrate, writers
from rlhf_core.history.batch import IngestBatch, IngestState
from rlhf_core.history.tables import Lease, Run, metadata
from rlhf_core.schemas.attempts import RunState
from rlhf_core.schemas.base import utc_now

LEASES = metadata.tables[Lease.__tablename__]
RUNS = metadata.tables[Run.__tablename__]

_REMEMBERED = frozenset({"checkpoints", "weight_versions"})
"""Tables that remember more than the run directory still holds."""


class HistoryStore:
    """The history database. One object may serve several threads; close it at the end, or use it in a ``with``.

    Args: url: SQLAlchemy URL of a SQLite file or a PostgreSQL database. check_schema: False only for ``rlhf db
        upgrade``. A SQLite file that does not exist yet is made, with all tables; nothing else is ever migrated on
        the way. now: clock for leases on SQLite, where every controller runs on this machine. PostgreSQL uses the
        server's clock, so that controllers on several machines need not agree about the time.

    Raises:
        BadConfig: the URL is none, or of a database that is not supported.
        UnsafeDatabase: SQLite on a network file system.
        SchemaOutOfDate: made by another version; names what to do.
        DatabaseUnavailable: no answer, no room, no permission, or no database.
    """

    def __init__(self, url: str, *, check_schema: bool = True, now: Callable[[], datetime] = utc_now) -> None:
        self.url = database.parse_url(url)
        self._now = now
        file = database.sqlite_file(self.url)
        if file is not None:
            database.refuse_network_file_system(file)
            if migrate.is_new(file):
                migrate.upgrade(self.url)
        self._writing = database.writing_engine(self.url)
        self._reading = database.reading_engine(self.url)
        if check_schema:
            try:
                migrate.require_current(self._reading, self.url)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Close every connection."""
        self._reading.dispose()
        self._writing.dispose()  # last: only a connection that may write can fold SQLite's log into its file

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A read-only transaction. For :mod:`rlhf_core.history.queries`; nothing above the history sees a
        connection."""
        with database.errors_in_words(self.url), self._reading.begin() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that writes: committed at the end, rolled back by an error. For this package only."""
        with database.errors_in_words(self.url), self._writing.begin() as connection:
            yield connection

    # -----------------------------------------------------------------------------------------------------------------
    # Leases

    def acquire_lease(
        self, run_id: str, owner: str, ttl_s: float, *, takeover: Callable[[str], bool] | None = None, above: int = 0
    ) -> int:
        """Become the one controller of a run.

        Args: run_id: the run; the history need not know it yet. owner: text that names this controller; unique to its
            process. ttl_s: seconds until the lease runs out unless renewed. takeover: asked about the present owner;
            True when that one is known to be dead, so that its lease need not be waited for. above: the token will be
            higher than this. The highest token of the run's journal, for the case that the database is younger than
            the journal.

        Returns:
            The fencing token: higher than every one before it, also than those in the ingested journal.

        Raises:
            LeaseLost: another controller holds the run.
        """
        while True:
            token = self._try_lease(run_id, owner, ttl_s, takeover, above)
            if token is not None:
                return token

    def _try_lease(
        self, run_id: str, owner: str, ttl_s: float, takeover: Callable[[str], bool] | None, above: int
    ) -> int | None:
        """One try; None when another controller changed the lease between looking and taking."""
        with self.reading() as connection:
            present = connection.execute(select(LEASES).where(LEASES.c.run_id == run_id)).one_or_none()
            ingested = connection.execute(select(RUNS.c.journal_token).where(RUNS.c.run_id == run_id)).scalar()
            now = self.time(connection)
        held = present is not None and present.expires_at > now and present.owner not in ("", owner)
        # The owner is asked about outside of any transaction: looking for a process may take its time.
        if present is not None and held and (takeover is None or not takeover(present.owner)):
            raise LeaseLost(
                f"run {run_id} is driven by another controller, {present.owner}; its lease runs for "
                f"{(present.expires_at - now).total_seconds():.0f} s more unless it is renewed."
            )
        token = max(present.token if present is not None else 0, ingested or 0, above) + 1
        with self.writing() as connection:
            expires_at = self.time(connection) + timedelta(seconds=ttl_s)
            taken = {"owner": owner, "token": token, "expires_at": expires_at}
            if present is None:
                return token if writers.insert_new(connection, LEASES, {"run_id": run_id, **taken}) else None
            # Compare and swap: of all who saw this token, one finds it still there.
            swapped = connection.execute(
                update(LEASES)
                .where(LEASES.c.run_id == run_id, LEASES.c.token == present.token, LEASES.c.owner == present.owner)
                .values(taken)
            )
            return token if swapped.rowcount == 1 else None

    def renew_lease(self, run_id: str, owner: str, token: int, ttl_s: float) -> None:
        """Hold the lease for ``ttl_s`` more seconds. One that ran out is still ours while nobody else took it.

        Raises:
            LeaseLost: another controller has taken the run over. Stop at once and change nothing more.
        """
        with self.writing() as connection:
            renewed = connection.execute(
                update(LEASES)
                .where(LEASES.c.run_id == run_id, LEASES.c.owner == owner, LEASES.c.token == token)
                .values(expires_at=self.time(connection) + timedelta(seconds=ttl_s))
            )
            if renewed.rowcount == 1:
                return
        self.verify_lease(run_id, owner, token)

    def verify_lease(self, run_id: str, owner: str, token: int) -> None:
        """Make sure that nobody else has taken the lease, by reading alone.

        Raises:
            LeaseLost: another controller has taken the run over.
        """
        with self.reading() as connection:
            present = connection.execute(select(LEASES).where(LEASES.c.run_id == run_id)).one_or_none()
        if present is not None and (present.owner, present.token) == (owner, token):
            return
        holder = f"{present.owner or 'nobody'} with token {present.token}" if present is not None else "nobody"
        raise LeaseLost(
            f"run {run_id} was taken over: this controller ({owner}) held lease {token}, now it is held by {holder}. "
            f"This controller stops; the run goes on under the other one."
        )

    def release_lease(self, run_id: str, owner: str, token: int) -> None:
        """Give the lease back. Does nothing when it is no longer ours. The token stays, so that the next one is
        higher."""
        with self.writing() as connection:
            connection.execute(
                update(LEASES)
                .where(LEASES.c.run_id == run_id, LEASES.c.owner == owner, LEASES.c.token == token)
                .values(owner="", expires_at=self.time(connection))
            )

    def time(self, connection: Connection) -> datetime:
        """The present, by the clock that leases are measured with."""
        if connection.dialect.name == "sqlite":
            return self._now()
        moment: datetime = connection.execute(select(func.clock_timestamp())).scalar_one()
        return moment

    # -----------------------------------------------------------------------------------------------------------------
    # Ingestion

    def ingest_state(self, run_id: str) -> IngestState:
        """How far the history has come with a run; what a batch must be made from."""
        with self.reading() as connection:
            run = connection.execute(
                select(RUNS.c.ingest_stamp, RUNS.c.journal_token).where(RUNS.c.run_id == run_id)
            ).one_or_none()
            if run is None:
                return IngestState()
            offsets = writers.OFFSETS
            found = connection.execute(select(offsets.c.path, offsets.c.position).where(offsets.c.run_id == run_id))
            positions = {row.path: row.position for row in found}
            return IngestState(run.ingest_stamp, positions, run.journal_token)

    def offsets(self, run_id: str) -> dict[str, int]:
        """How far each file of a run was read: path relative to the run directory -> position or fingerprint."""
        return self.ingest_state(run_id).offsets

    def apply(self, run_id: str, batch: IngestBatch) -> bool:
        """Write a batch and the offsets it reaches, in one transaction: all of it or nothing.

        Returns: False, with nothing written, when the history has moved on since ``batch.base`` was read: another
            ingester was faster, or this batch was applied before. Read the state again and make a new batch.

        Raises:
            IllegalMove: the journal has a change of state that the table of moves does not allow.
            DatabaseUnavailable: it was not written.
            HistoryError: it holds something that no column takes, which its schema should have refused.
        """
        try:
            with self.writing() as connection:
                if not self._take_turn(connection, run_id, batch):
                    return False
                self._write(connection, run_id, batch)
                return True
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            # One run that cannot be stored must not end whoever reads all of them.
            raise HistoryError(
                f"the files of run {run_id} cannot be stored: {type(error).__name__}: {error}"
            ) from error

    def _take_turn(self, connection: Connection, run_id: str, batch: IngestBatch) -> bool:
        """Claim the run for this transaction, if it is as it was when the batch was made."""
        new_stamp = secrets.randbits(62) + 1
        if batch.base.stamp == 0:
            return batch.stored is not None and writers.insert_run(connection, batch.run_dir, batch.stored, new_stamp)
        claimed = connection.execute(
            update(RUNS)
            .where(RUNS.c.run_id == run_id, RUNS.c.ingest_stamp == batch.base.stamp)
            .values(ingest_stamp=new_stamp)
        )
        if claimed.rowcount != 1:
            return False
        if batch.stored is not None:
            writers.describe_run(connection, batch.run_dir, batch.stored)
        return True

    def _write(self, connection: Connection, run_id: str, batch: IngestBatch) -> None:
        writers.write_journal(connection, run_id, batch.journal)
        writers.write_notes(connection, run_id, "housekeeping.jsonl", batch.notes)
        writers.write_attempts(connection, run_id, batch.attempts)
        writers.write_restarts(connection, run_id, batch)
        writers.write_events(connection, run_id, batch.events)
        writers.write_set_aside(connection, run_id, batch.set_aside)
        names = {name for entry in batch.metrics for name in entry.line.metrics}
        writers.write_metrics(connection, run_id, batch.metrics, writers.write_metric_keys(connection, names))
        writers.write_nodes(connection, run_id, batch.nodes)
        writers.write_probes(connection, run_id, batch.probes)
        writers.write_incidents(connection, run_id, batch.incidents)
        writers.write_decisions(connection, run_id, batch.decisions)
        writers.write_outcomes(connection, run_id, batch.outcomes)
        writers.write_checkpoints(connection, run_id, batch.checkpoints)
        writers.write_removed_checkpoints(connection, run_id, batch.removed_checkpoints)
        writers.write_evaluations(connection, run_id, batch.evaluations)
        writers.write_telemetry(connection, run_id, batch.telemetry)
        writers.write_progress(connection, run_id, batch)
        writers.write_offsets(connection, run_id, batch)
        if batch.is_last:
            writers.keep_goodput(connection, run_id)

    # -----------------------------------------------------------------------------------------------------------------
    # Making it again

    def run_ids(self) -> list[str]:
        """Every run that the history knows."""
        with self.reading() as connection:
            return list(connection.execute(select(RUNS.c.run_id).order_by(RUNS.c.run_id)).scalars())

    def forget(self, run_id: str) -> None:
        """Drop what was ingested of a run, so that it is read again from the beginning (``rlhf db rebuild``).

        Kept are the lease, and checkpoints that retention removed: no file tells of them any more.
        """
        with self.writing() as connection:
            for table in reversed(metadata.sorted_tables):
                if "run_id" in table.c and table.name not in _REMEMBERED | {"runs", "leases"}:
                    connection.execute(delete(table).where(table.c.run_id == run_id))
            checkpoints = writers.CHECKPOINTS
            connection.execute(
                update(checkpoints)
                .where(checkpoints.c.run_id == run_id, checkpoints.c.removed_at.is_(None))
                .values(removed_at=self._now())  # those that are there are found again
            )
            connection.execute(
                update(RUNS)
                .where(RUNS.c.run_id == run_id)
                .values(
                    state=RunState.PENDING.value,
                    message="",
                    started_at=None,
                    ended_at=None,
                    progress_at=RUNS.c.created_at,
                    journal_token=0,
                    ingest_stamp=secrets.randbits(62) + 1,
                )
            )

    def remove_run(self, run_id: str) -> None:
        """Remove every row of a run but its lease."""
        with self.writing() as connection:
            connection.execute(delete(RUNS).where(RUNS.c.run_id == run_id))

    def clear(self) -> None:
        """Remove every row but the leases and the names of metrics, whose ids another process may be about to use."""
        with self.writing() as connection:
            for table in reversed(metadata.sorted_tables):
                if table.name not in (LEASES.name, writers.KEYS.name):
                    connection.execute(delete(table))
