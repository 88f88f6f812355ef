"""Upserts, the same for both databases."""

import json
import math
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import cache
from typing import Any

from pydantic import BaseModel
from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql, sqlite

from rlhf_core.history.tables import CleanJson

Row = dict[str, Any]


CHUNK = 1000
"""Values in one list of a statement: a database takes only so many."""


def upsert(dialect: str, table: Table) -> Any:
    """Start an ``INSERT`` that takes ``on_conflict_*``: both dialects have those methods, but no common type."""
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
        connection.execute(_ignoring_conflicts(connection.dialect.name, table), list(rows))


@cache  # a statement takes longer to build than to execute, and their number is small
def _ignoring_conflicts(dialect: str, table: Table) -> Any:
    return upsert(dialect, table).on_conflict_do_nothing()


def insert_or_replace(connection: Connection, table: Table, rows: Sequence[Row], keep: Iterable[str] = ()) -> None:
    """Insert rows; where the key is taken, the given columns are replaced, but for those in ``keep``."""
    if not rows:
        return
    connection.execute(_replacing(connection.dialect.name, table, tuple(rows[0]), frozenset(keep)), list(rows))


@cache  # likewise
def _replacing(dialect: str, table: Table, columns: tuple[str, ...], keep: frozenset[str]) -> Any:
    statement = upsert(dialect, table)
    key = [column.name for column in table.primary_key]
    kept = {*key, *keep}
    changes = {name: statement.excluded[name] for name in columns if name not in kept}
    return statement.on_conflict_do_update(index_elements=key, set_=changes)


def columns_of(table: Table, schema: BaseModel) -> Row:
    """Fields of a schema that a table has columns for, as the columns take them: a float that is not finite is NULL,
    which SQLite would make of NaN alone; in JSON it is text."""
    names = type(schema).model_fields.keys() & table.columns.keys()
    row = {name: _stored(value) for name, value in schema.model_dump(include=names).items()}
    in_json = [name for name in row if isinstance(table.c[name].type, CleanJson)]
    return row | {name: value for name, value in (as_json(schema) if in_json else {}).items() if name in in_json}


def _stored(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.value if isinstance(value, Enum) else value


def as_json(model: BaseModel) -> Any:
    """Convert a schema to JSON values, by way of text: only there NaN becomes a string, which JSON columns can hold."""
    return json.loads(model.model_dump_json())
