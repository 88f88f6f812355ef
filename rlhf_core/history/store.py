"""Leases, and batches of ingestion in one transaction each."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from types import TracebackType
from typing import Self

from sqlalchemy import Connection, bindparam, delete, func, literal, select, update

from rlhf_core.errors import HistoryError, LeaseLost
from rlhf_core.history import database, migrate
from rlhf_core.history.batch import IngestBatch, IngestState
from rlhf_core.history.tables import metadata
from rlhf_core.history.tables.sqlalchemy_core import CHECKPOINTS, KEYS, LEASES, OFFSETS, RUNS, chunks
from rlhf_core.history.writers import write_batch
from rlhf_core.history.writers.runs import insert_run, update_run
from rlhf_core.history.writers.upserts import insert_new
from rlhf_core.schemas.attempts import RUN_ENDS, RunState
from rlhf_core.schemas.base import utc_now

_REMEMBERED = frozenset({"checkpoints", "weight_versions"})
"""Tables with rows whose files may be gone from the run directory."""

# Built once: each round of ingestion executes them, and building a statement takes longer than executing it.
_STATE = (
    select(RUNS.c.ingest_stamp, RUNS.c.journal_token, RUNS.c.state, OFFSETS.c.path, OFFSETS.c.position)
    .outerjoin_from(RUNS, OFFSETS, OFFSETS.c.run_id == RUNS.c.run_id)
    .where(RUNS.c.run_id == bindparam("run"))
)
_CLAIM = (
    update(RUNS)
    .where(RUNS.c.run_id == bindparam("run"), RUNS.c.ingest_stamp == bindparam("present_stamp"))
    .values(ingest_stamp=bindparam("new_stamp"))
)


class HistoryStore:
    """The history database. An object may be used by several threads; close it at the end, or use it in a ``with``.

    Args:
        url: SQLAlchemy URL of a SQLite file or a PostgreSQL database. A SQLite file that does not exist yet is created
            with all tables; nothing else is migrated implicitly.

    Raises:
        BadConfig: the URL is invalid, or the database is not supported.
        UnsafeDatabase: SQLite on a network file system.
        SchemaOutOfDate: created by another version; with the remedy.
        DatabaseUnavailable: no response, no space, no permission, or no database.
    """

    def __init__(self, url: str) -> None:
        self.url = database.parse_url(url)
        file = database.sqlite_file(self.url)
        if file is not None:
            database.refuse_network_file_system(file)
            if migrate.is_new(file):
                migrate.upgrade(self.url)
        self._writing = database.writing_engine(self.url)
        self._reading = database.reading_engine(self.url, self._writing)
        try:
            migrate.require_current(self._reading, self.url)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close every connection."""
        self._reading.dispose()
        self._writing.dispose()  # last: only a writing connection can merge SQLite's log into its file

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Open a read-only transaction. For :mod:`rlhf_core.history.queries`; modules above the history get no
        connection."""
        with database.translated_errors(self.url), self._reading.begin() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """Open a writing transaction: committed at the end, rolled back on an error. For this package only."""
        with database.translated_errors(self.url), self._writing.begin() as connection:
            yield connection

    # -----------------------------------------------------------------------------------------------------------------
    # Leases

    def acquire_lease(
        self, run_id: str, holder: str, ttl_s: float, *, takeover: Callable[[str], bool] | None = None, above: int = 0
    ) -> int:
        """Become the only controller of a run.

        Args:
            run_id: the run; it need not be in the history yet.
            holder: name of this controller; unique to its process.
            ttl_s: seconds until the lease expires unless it is renewed.
            takeover: called with the current holder; returns True if that is known to be dead, so its lease need not
                expire first.
            above: lower bound of the token: the highest token of the run's journal, in case the database is newer than
                the journal.

        Returns:
            The fencing token: higher than every earlier one, including those in the ingested journal.

        Raises:
            LeaseLost: another controller holds the run.
        """
        while True:
            token = self._try_lease(run_id, holder, ttl_s, takeover, above)
            if token is not None:
                return token

    def _try_lease(
        self, run_id: str, holder: str, ttl_s: float, takeover: Callable[[str], bool] | None, above: int
    ) -> int | None:
        """Try once; return None if another controller changed the lease between the read and the write."""
        with self.reading() as connection:
            present = connection.execute(select(LEASES).where(LEASES.c.run_id == run_id)).one_or_none()
            ingested = connection.execute(select(RUNS.c.journal_token).where(RUNS.c.run_id == run_id)).scalar()
            now = self.time(connection)
        held = present is not None and present.expires_at > now and present.holder not in ("", holder)
        # Outside any transaction, because looking for a process may take long.
        if present is not None and held and (takeover is None or not takeover(present.holder)):
            raise LeaseLost(
                f"run {run_id} is driven by another controller, {present.holder}; its lease expires in "
                f"{(present.expires_at - now).total_seconds():.0f} s unless it is renewed."
            )
        token = max(present.token if present is not None else 0, ingested or 0, above) + 1
        with self.writing() as connection:
            expires_at = self.time(connection) + timedelta(seconds=ttl_s)
            taken = {"holder": holder, "token": token, "expires_at": expires_at}
            if present is None:
                return token if insert_new(connection, LEASES, {"run_id": run_id, **taken}) else None
            # Compare and swap: of all controllers that read this token, only one finds it unchanged.
            swapped = connection.execute(
                update(LEASES)
                .where(LEASES.c.run_id == run_id, LEASES.c.token == present.token, LEASES.c.holder == present.holder)
                .values(taken)
            )
            return token if swapped.rowcount == 1 else None

    def renew_lease(self, run_id: str, holder: str, token: int, ttl_s: float) -> None:
        """Extend the lease to ``ttl_s`` seconds from now. An expired lease is ours until another controller takes it.

        Raises:
            LeaseLost: another controller has taken over the run. Stop at once without further changes.
        """
        with self.writing() as connection:
            renewed = connection.execute(
                update(LEASES)
                .where(LEASES.c.run_id == run_id, LEASES.c.holder == holder, LEASES.c.token == token)
                .values(expires_at=self.time(connection) + timedelta(seconds=ttl_s))
            )
            if renewed.rowcount == 1:
                return
        self.verify_lease(run_id, holder, token)

    def verify_lease(self, run_id: str, holder: str, token: int) -> None:
        """Verify that no other controller has taken the lease, without writing.

        Raises:
            LeaseLost: another controller has taken over the run.
        """
        with self.reading() as connection:
            present = connection.execute(select(LEASES).where(LEASES.c.run_id == run_id)).one_or_none()
        if present is not None and (present.holder, present.token) == (holder, token):
            return
        other = f"{present.holder or 'no controller'} with token {present.token}" if present else "no controller"
        raise LeaseLost(
            f"run {run_id} was taken over: this controller ({holder}) held lease {token}, now it is held by {other}. "
            f"This controller stops; the run continues under the other one."
        )

    def release_lease(self, run_id: str, holder: str, token: int) -> None:
        """Release the lease if it is still ours. The token is kept, so that the next one is higher."""
        with self.writing() as connection:
            connection.execute(
                update(LEASES)
                .where(LEASES.c.run_id == run_id, LEASES.c.holder == holder, LEASES.c.token == token)
                .values(holder="", expires_at=self.time(connection))
            )

    def time(self, connection: Connection) -> datetime:
        """Read the clock for leases: on SQLite that of this machine, on which every controller then runs; on PostgreSQL
        that of the server, so controllers on several machines need no synchronized clocks."""
        if connection.dialect.name == "sqlite":
            return utc_now()
        moment: datetime = connection.execute(select(func.clock_timestamp())).scalar_one()
        return moment

    # -----------------------------------------------------------------------------------------------------------------
    # Ingestion

    def ingest_state(self, run_id: str) -> IngestState:
        """Read the state that the next batch of a run must be built from."""
        with self.reading() as connection:
            found = connection.execute(_STATE, {"run": run_id}).all()
        if not found:
            return IngestState()
        stamp, token, state = found[0][:3]
        positions = {path: position for *_, path, position in found if path is not None}
        return IngestState(stamp, positions, token, state in RUN_ENDS)

    def apply(self, run_id: str, batch: IngestBatch) -> bool:
        """Write a batch and the offsets after it, in one transaction.

        Returns:
            False, with nothing written, if the history has changed since ``batch.base`` was read: another ingester was
                faster, or this batch was already applied. Read the state again and build a new batch.

        Raises:
            IllegalMove: the journal has a change of state that is not in the table of moves.
            DatabaseUnavailable: the batch was not written.
            HistoryError: it has a value that no column can store, which its schema should have rejected.
        """
        try:
            with self.writing() as connection:
                if not self._take_turn(connection, run_id, batch):
                    return False
                write_batch(connection, run_id, batch)
                return True
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            # A run that cannot be stored must not end the ingestion of others.
            raise HistoryError(
                f"the files of run {run_id} cannot be stored: {type(error).__name__}: {error}"
            ) from error

    def _take_turn(self, connection: Connection, run_id: str, batch: IngestBatch) -> bool:
        """Claim the run for this transaction if it is unchanged since the batch was built."""
        new_stamp = secrets.randbits(62) + 1
        if batch.base.stamp == 0:
            return batch.stored is not None and insert_run(connection, batch.run_dir, batch.stored, new_stamp)
        claimed = connection.execute(_CLAIM, {"run": run_id, "present_stamp": batch.base.stamp, "new_stamp": new_stamp})
        if claimed.rowcount != 1:
            return False
        if batch.stored is not None:
            update_run(connection, batch.run_dir, batch.stored)
        return True

    # -----------------------------------------------------------------------------------------------------------------
    # The whole history

    def run_ids(self) -> list[str]:
        """List every run in the history."""
        with self.reading() as connection:
            return list(connection.execute(select(RUNS.c.run_id).order_by(RUNS.c.run_id)).scalars())

    def ingested_runs(self) -> dict[str, tuple[int, str]]:
        """The number of the last ingestion of every run, which is random, and the path of its directory; by id."""
        with self.reading() as connection:
            rows = connection.execute(select(RUNS.c.run_id, RUNS.c.ingest_stamp, RUNS.c.run_dir))
            return {run_id: (stamp, run_dir) for run_id, stamp, run_dir in rows}

    def max_connections(self) -> int | None:
        """The number of connections that a PostgreSQL server accepts from ordinary users; None on SQLite, which has no
        limit."""
        with self.reading() as connection:
            if connection.dialect.name == "sqlite":
                return None
            accepted = (
                "current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int"
            )
            return int(connection.exec_driver_sql(f"SELECT {accepted}").scalar_one())

    def record_move(self, run_ids: Sequence[str], folder: str) -> None:
        """Record that run directories were moved to a folder."""
        with self.writing() as connection:
            for among in chunks(run_ids):
                path = literal(f"{folder}/", RUNS.c.run_dir.type) + RUNS.c.run_id
                connection.execute(update(RUNS).where(RUNS.c.run_id.in_(among)).values(run_dir=path))

    def forget(self, run_id: str) -> None:
        """Delete the rows of a run, so that it is ingested again from the start (``rlhf db rebuild``).

        The lease is kept, and so are rows of checkpoints removed by retention, because their files are gone.
        """
        with self.writing() as connection:
            # The run first, as in a batch: otherwise a batch and this would wait for each other's rows.
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
            for table in reversed(metadata.sorted_tables):
                if "run_id" in table.c and table.name not in _REMEMBERED | {"runs", "leases"}:
                    connection.execute(delete(table).where(table.c.run_id == run_id))
            connection.execute(
                update(CHECKPOINTS)
                .where(CHECKPOINTS.c.run_id == run_id, CHECKPOINTS.c.removed_at.is_(None))
                .values(removed_at=utc_now())  # reset for those that are found again
            )

    def clear(self) -> None:
        """Remove all rows except leases and names of metrics, whose ids another process may be about to use."""
        with self.writing() as connection:
            for table in reversed(metadata.sorted_tables):
                if table.name not in (LEASES.name, KEYS.name):
                    connection.execute(delete(table))
