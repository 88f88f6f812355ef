"""Rows as plain data, ready for JSON: times are ISO 8601 text in UTC."""

from collections.abc import Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

from sqlalchemy import Connection, FromClause, select

Facts = dict[str, Any]


def parts(connection: Connection, part: FromClause, run_id: str, *order: str) -> list[Facts]:
    """Read the rows of a run from a table or view, ordered by some columns."""
    query = select(part).where(part.c.run_id == run_id).order_by(*(part.c[name] for name in order))
    return [without_run(row) for row in connection.execute(query)]


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
