"""Bulk inserts of metric rows directly through the driver, because they are nearly all rows of a history.

SQLite uses one prepared statement. PostgreSQL uses ``COPY``, which has no "on conflict": if a key is taken (a trainer
wrote a step twice), the rows go through a temporary table instead. Both insert in the order of the primary key, so
neighbours in the table are written together.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

MetricRow = tuple[str, int, int, int, int, float | None, str | None, Any]
"""``run_id, key_id, step, attempt, restart, value, non_finite, time``."""

_COLUMNS = "run_id, key_id, step, attempt, restart, value, non_finite, time"
_POSTGRES_TYPES = ("text", "int4", "int4", "int4", "int4", "float8", "text", "timestamptz")


def stored_time(connection: Connection, moment: datetime) -> Any:
    """Convert a time to its stored form, as ``tables.UtcDateTime`` does."""
    if connection.dialect.name == "sqlite":
        return moment.astimezone(UTC).replace(tzinfo=None).isoformat(" ", "microseconds")
    return moment


def insert(connection: Connection, rows: list[MetricRow]) -> None:
    """Insert rows; existing rows with the same key are kept. Sorts ``rows``."""
    if not rows:
        return
    rows.sort(key=lambda row: row[:5])
    if connection.dialect.name == "sqlite":
        question_marks = ", ".join("?" * len(_POSTGRES_TYPES))
        statement = f"INSERT INTO metrics ({_COLUMNS}) VALUES ({question_marks}) ON CONFLICT DO NOTHING"
        connection.exec_driver_sql(statement, list(rows))
    else:
        _copy(connection, rows)


def _copy(connection: Connection, rows: Sequence[MetricRow]) -> None:
    driver_errors: Any = connection.dialect.loaded_dbapi
    try:
        with connection.begin_nested():
            _copy_into(connection, "metrics", rows)
    except driver_errors.errors.UniqueViolation:
        connection.exec_driver_sql("CREATE TEMPORARY TABLE new_metrics (LIKE metrics) ON COMMIT DROP")
        _copy_into(connection, "new_metrics", rows)
        connection.exec_driver_sql(
            f"INSERT INTO metrics ({_COLUMNS}) SELECT {_COLUMNS} FROM new_metrics ON CONFLICT DO NOTHING"
        )
    except driver_errors.Error as error:  # as SQLAlchemy wraps errors of its own statements
        raise DBAPIError("COPY metrics", None, error) from error


def _copy_into(connection: Connection, table: str, rows: Sequence[MetricRow]) -> None:
    driver: Any = connection.connection.driver_connection
    with (
        driver.cursor() as cursor,
        cursor.copy(f"COPY {table} ({_COLUMNS}) FROM STDIN (FORMAT BINARY)") as copy,
    ):
        copy.set_types(_POSTGRES_TYPES)
        for row in rows:
            copy.write_row(row)
