"""Upserts for both databases."""

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


def upsert(dialect: str, table: Table) -> Any:
    """Start an ``INSERT`` with ``on_conflict_*`` methods, which both dialects have but without a common type."""
    return sqlite.insert(table) if dialect == "sqlite" else postgresql.insert(table)


def insert_new(connection: Connection, table: Table, row: Row) -> bool:
    """Insert one row; return False, with nothing done, if its key is taken."""
    statement = upsert(connection.dialect.name, table).on_conflict_do_nothing().values(row)
    # Without the option, SQLAlchemy does not keep the count of an INSERT.
    result = connection.execute(statement.execution_options(preserve_rowcount=True))
    return result.rowcount == 1


def insert_or_keep(connection: Connection, table: Table, rows: Sequence[Row]) -> None:
    """Insert rows; existing rows with the same key are kept."""
    if rows:
        connection.execute(_ignoring_conflicts(connection.dialect.name, table), list(rows))


@cache  # building a statement takes longer than executing it, and their number is small
def _ignoring_conflicts(dialect: str, table: Table) -> Any:
    return upsert(dialect, table).on_conflict_do_nothing()


def insert_or_replace(connection: Connection, table: Table, rows: Sequence[Row], keep: Iterable[str] = ()) -> None:
    """Insert rows; in existing rows with the same key, the given columns except ``keep`` are replaced."""
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
    """Fields of a schema that are columns of a table, in stored form: a non-finite float is NULL (SQLite would convert
    only NaN); in JSON it is text."""
    names = type(schema).model_fields.keys() & table.columns.keys()
    row = {name: _stored(value) for name, value in schema.model_dump(include=names).items()}
    in_json = [name for name in row if isinstance(table.c[name].type, CleanJson)]
    return row | {name: value for name, value in (as_json(schema) if in_json else {}).items() if name in in_json}


def _stored(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.value if isinstance(value, Enum) else value


def as_json(model: BaseModel) -> Any:
    """Convert a schema to JSON values through text, because only that converts NaN to a string, which JSON columns can
    store."""
    return json.loads(model.model_dump_json())
