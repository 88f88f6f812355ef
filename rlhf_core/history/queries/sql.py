"""Read-only execution of SQL statements."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rlhf_core.errors import BadInput
from rlhf_core.history import read_only, renamed, sql_limits
from rlhf_core.history.queries.plain import plain_value
from rlhf_core.history.sql_limits import WorkClock
from rlhf_core.history.store import HistoryStore
from rlhf_core.history.tables import metadata
from rlhf_core.history.tables.views import ViewBase
from rlhf_core.schemas.base import storable_text


@dataclass(frozen=True)
class SqlStream:
    """Result of a SQL statement, row by row."""

    columns: list[str]
    """Names of the columns."""
    rows: Iterator[list[Any]]
    """Rows, read one by one; raises the errors of :func:`stream_sql`."""


@contextmanager
def stream_sql(
    store: HistoryStore,
    text: str,
    values: Mapping[str, Any] | None = None,
    *,
    shipped: bool = False,
    clock: WorkClock | None = None,
) -> Iterator[SqlStream]:
    """Run one SQL statement of a user and read its result row by row. It cannot change anything: the database itself
    rejects changes (:mod:`rlhf_core.history.read_only`).

    Args:
        values: values of the parameters in the text, in the format of the database's driver.
        shipped: True if the text is part of this program.
        clock: time limit of the database's work; five minutes by default.

    Raises:
        BadInput: the text is not SQL, would change something, names a missing table or column, has too large a value,
            or takes too long; or it or a value is not text that a database accepts.
        UnsafeDatabase: PostgreSQL, as configured, could not prevent changes.
        DatabaseUnavailable: the database does not respond.
    """
    _require_text(text, values or {})
    renamed.refuse_old_values(text)
    clock = clock or WorkClock(read_only.QUERY_TIMEOUT_S)
    with store.reading() as connection:
        driver: Any = connection.connection.driver_connection
        connection.detach()  # closed afterwards: a connection with a user's statement is not reused
        is_sqlite = connection.dialect.name == "sqlite"
        errors = connection.dialect.loaded_dbapi.Error
        try:
            with _translated_errors(text, errors, clock):
                if is_sqlite:
                    read_only.forbid_writing(driver)
                    sql_limits.limit_sqlite(driver, clock)
                    batches = _sqlite_rows(driver, text, values, clock)
                else:
                    batches = read_only.query_postgres(driver, text, values, store.url, clock, shipped=shipped)
                columns = next(batches)
            yield SqlStream([str(name) for name in columns], _plain_rows(batches, text, errors, clock))
        finally:
            if is_sqlite:
                driver.set_progress_handler(None, 0)
                driver.set_authorizer(None)  # SQLAlchemy ends the transaction
            else:
                driver.rollback()  # before 16, a read-only transaction may make large objects


def _require_text(text: str, values: Mapping[str, Any]) -> None:
    """Refuse a statement or value with invalid Unicode, as of bytes that are not UTF-8, or a NUL character.

    Raises:
        BadInput: names the place.
    """
    for place, given in (("the query", text), *((f"the value of {name}", value) for name, value in values.items())):
        if isinstance(given, str) and storable_text(given) != given:
            raise BadInput(f"{place} has a NUL character or bytes that are not UTF-8; expected text")


def _sqlite_rows(
    driver: Any, text: str, values: Mapping[str, Any] | None, clock: WorkClock
) -> Iterator[Sequence[Sequence[Any]]]:
    """Yield the column names, then rows."""
    with clock.working():
        cursor = driver.execute(text, values or {})
    yield [described[0] for described in cursor.description or ()]
    while True:
        with clock.working():
            row = cursor.fetchone()
        if row is None:
            return
        yield [row]


def _plain_rows(
    batches: Iterator[Sequence[Any]], text: str, errors: type[Exception], clock: WorkClock
) -> Iterator[list[Any]]:
    while True:
        with _translated_errors(text, errors, clock):
            batch = next(batches, None)
        if batch is None:
            return
        for row in batch:
            yield [plain_value(value) for value in row]


@contextmanager
def _translated_errors(text: str, errors: type[Exception], clock: WorkClock) -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise BadInput("the database ran out of memory for this query: select fewer or smaller values") from None
    except errors as error:
        if "interrupted" in str(error) and clock.left_s > 0:
            raise KeyboardInterrupt from None
        raise _refusal(text, error) from None


_TOO_LONG = ("interrupted", "statement timeout")
_FORBIDDEN = (
    *("not authorized", "prohibited", "read-only", "readonly", "multiple commands", "one statement", "VACUUM"),
    *("permission denied", "must be superuser", "must be a member", "must not be", "not allowed"),
    "must not contain data-modifying",
)
_NO_QUERY = re.compile(
    r'at or near "(ABORT|ALTER|ANALYZE|BEGIN|CALL|CHECKPOINT|CLOSE|CLUSTER|COMMENT|COMMIT|COPY|CREATE|DEALLOCATE'
    r"|DECLARE|DELETE|DISCARD|DO|DROP|EXECUTE|EXPLAIN|FETCH|GRANT|IMPORT|INSERT|LISTEN|LOAD|LOCK|MERGE|MOVE|NOTIFY|PREPARE"
    r"|REASSIGN|REFRESH|REINDEX|RELEASE|RESET|REVOKE|ROLLBACK|SAVEPOINT|SECURITY|SET|SHOW|START|TRUNCATE|UNLISTEN|UPDATE"
    r'|VACUUM)"',
    re.IGNORECASE,
)
"""Errors of PostgreSQL's parser for statements other than queries; only for the message."""


def _refusal(text: str, error: Exception) -> BadInput:
    message = " ".join(str(error).split())
    if any(sign in message for sign in _FORBIDDEN) or _NO_QUERY.search(message):
        return BadInput(
            f"refused: {text.strip()!r}. `rlhf sql` runs one read-only statement (SELECT) at a time. "
            f"(The database reports: {message})"
        )
    if any(sign in message for sign in _TOO_LONG):
        return BadInput(
            f"the query took longer than {read_only.QUERY_TIMEOUT_S:g} s of the database's time and was stopped: "
            f"select fewer runs, or give each join a condition"
        )
    if "too big" in message:
        return BadInput(
            f"a value of the query or of its result is larger than {sql_limits.MAX_VALUE_BYTES >> 20} MiB, the "
            "limit of `rlhf sql`: omit its column"
        )
    if renamed.NO_TABLE.search(message) or renamed.NO_COLUMN.search(message):
        advice = renamed.advice(text, message)
        if advice:
            return BadInput(f"{advice} (The database reports: {message})")
        return BadInput(f"the query names a missing table or column: {message}. {_names(text, message)}")
    return BadInput(f"the database rejected the query: {message}")


def _names(text: str, message: str) -> str:
    """List the columns of the tables in a statement that names a missing column; otherwise all tables."""
    known = {**metadata.tables, **ViewBase.metadata.tables}
    used = [name for name in dict.fromkeys(re.findall(r"\w+", text.lower())) if name in known]
    if "column" not in message or not used:
        return f"Tables and views: {', '.join(sorted(known))}."
    return " ".join(f"Columns of {name}: {', '.join(known[name].columns.keys())}." for name in used)
