"""Rows as plain data, ready for JSON: times are ISO 8601 text in UTC."""

from collections.abc import Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, TypeVar, cast

from sqlalchemy import Connection, FromClause, select

Facts = dict[str, Any]
RowT = TypeVar("RowT")


def rows_of(connection: Connection, part: FromClause, row_type: type[RowT], run_id: str, *order: str) -> list[RowT]:
    """Read the rows of a run from a table or view, ordered by some columns.

    Args:
        row_type: the type of :mod:`rlhf_core.history.queries.rows` that has the columns of ``part``.
    """
    query = select(part).where(part.c.run_id == run_id).order_by(*(part.c[name] for name in order))
    return [cast("RowT", without_run(row)) for row in connection.execute(query)]


def without_run(row: Any) -> Facts:
    """Convert a row and drop its ``run_id``."""
    facts = plain(row._mapping)
    del facts["run_id"]
    return facts


def plain(mapping: Mapping[str, Any]) -> Facts:
    """Convert the values of a row."""
    return {name: plain_value(value) for name, value in mapping.items()}


def plain_value(value: Any) -> Any:
    """Convert a value of a row to a JSON value."""
    match value:
        case datetime() | date() | time():
            return value.isoformat()
        case Decimal() if not value.is_finite():
            return float(value)
        case Decimal():
            return int(value) if value == value.to_integral_value() else float(value)
        case bytes():
            return value.hex()
        case list():  # JSON, or an array of PostgreSQL, which may hold any of these types
            return [plain_value(item) for item in value]
        case None | bool() | int() | float() | str() | dict():
            return value
        case _:
            return str(value)
