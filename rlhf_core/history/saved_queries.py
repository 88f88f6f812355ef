"""Saved queries: one SQL file each, for both databases, with arguments that are bound, not interpolated.

A query starts with a comment: its title, its meaning, and a line for each argument, ``name (type) = default: meaning``,
with the type ``text``, ``number`` or ``run`` (an id, a name, or ``last``). An argument without a default is required.
In the statement, ``:name`` stands for the value.

Where SQLite and PostgreSQL differ, a query uses functions such as ``@seconds(start, end)``; :data:`FUNCTIONS` has the
expansion for each. A statement of a user may also have such a comment and arguments.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from rlhf_core.errors import BadInput
from rlhf_core.history import queries, sql_limits
from rlhf_core.history.queries import SqlStream
from rlhf_core.history.sql_limits import WorkClock
from rlhf_core.history.store import HistoryStore
from rlhf_core.history.tables.dialects import Postgresql, Sqlite

Value = str | int | float
Clock = WorkClock | None

FUNCTIONS: Mapping[str, Mapping[str, str]] = {
    "sqlite": {
        "seconds": Sqlite.seconds("{0}", "{1}"),
        # In the format of stored times, so that they compare as text.
        "days_ago": "strftime('%Y-%m-%d %H:%M:%f000', 'now', '-' || {0} || ' days')",
        "week": "date({0}, 'weekday 0', '-6 days')",
        "number": "CAST(json_extract({0}, '$.{1}') AS double precision)",
        "leaves": "json_tree({0})",
        "leaf_name": "replace(substr({0}.fullkey, 3), '\"', '')",
        "leaf_value": "CASE {0}.type WHEN 'true' THEN 'true' WHEN 'false' THEN 'false' "
        "ELSE CAST({0}.value AS text) END",
        "is_leaf": "({0}.type <> 'object' AND {0}.fullkey NOT LIKE '%[%')",
    },
    "postgresql": {
        "seconds": Postgresql.seconds("{0}", "{1}"),
        "days_ago": "(now() - CAST({0} AS double precision) * INTERVAL '1 day')",
        "week": "to_char(date_trunc('week', {0} AT TIME ZONE 'UTC'), 'YYYY-MM-DD')",
        "number": "CAST({0} ->> '{1}' AS double precision)",
        "leaves": "LATERAL (WITH RECURSIVE walk(name, value) AS (SELECT '', {0} UNION ALL "
        "SELECT w.name || '.' || e.key, e.value FROM walk w, "
        "LATERAL jsonb_each(CASE jsonb_typeof(w.value) WHEN 'object' THEN w.value END) e) "
        "SELECT substr(name, 2) AS name, value FROM walk)",
        "leaf_name": "{0}.name",
        "leaf_value": "({0}.value #>> '{{}}')",
        "is_leaf": "(jsonb_typeof({0}.value) <> 'object')",
    },
}
"""Expansions of ``@name(...)`` for each database.

``seconds(start, end)``: time between two times. ``days_ago(n)``: time ``n`` days ago. ``week(time)``: the Monday of its
week, as text. ``number(column, key)``: a number in a JSON column. ``leaves(column) leaf``: in ``FROM``, the values in a
JSON column, with a list as one value; with ``leaf_name(leaf)`` (dotted), ``leaf_value(leaf)`` (text) and, in ``WHERE``,
``is_leaf(leaf)``.
"""

TYPES = ("text", "number", "run")
"""Types of arguments."""

_HEADER = re.compile(r"\s*/\*(.*?)\*/", re.DOTALL)
_ARGUMENT = re.compile(rf"(?P<name>[a-z_]+) \((?P<type>{'|'.join(TYPES)})\)(?: = (?P<default>[^:]*))?: (?P<meaning>.+)")
_FUNCTION = re.compile(r"@([a-z_]+)\(")
# Texts, quoted names, comments and PostgreSQL's casts come first: a colon in them is not a parameter.
_PARAMETER = re.compile(r"'(?:[^']|'')*'|\"[^\"]*\"|--[^\n]*|/\*.*?\*/|::|:([A-Za-z_]\w*)", re.DOTALL)


@dataclass(frozen=True)
class Argument:
    """One argument of a query."""

    name: str
    type: str
    """One of :data:`TYPES`."""
    default: str | None
    """Default, as text; None if a value is required."""
    meaning: str


@dataclass(frozen=True)
class SavedQuery:
    """One query with its description and arguments."""

    name: str
    """Name; empty for a statement of a user."""
    title: str
    meaning: str
    arguments: tuple[Argument, ...]
    sql: str
    """The whole text, including its comment."""


@dataclass(frozen=True)
class SqlResult:
    """Result of a query."""

    columns: list[str]
    """Names of the columns."""
    rows: list[list[Any]]
    """Rows, in the order of the columns."""
    truncated: bool
    """True if there were more rows than the limit."""


# ---------------------------------------------------------------------------------------------------------------------
# The saved queries


def saved() -> list[SavedQuery]:
    """Load all saved queries, by name."""
    folder = resources.files("rlhf_core.history").joinpath("saved_queries")
    found = [file for file in folder.iterdir() if file.name.endswith(".sql")]
    return [
        replace(parse(file.read_text(encoding="utf-8")), name=file.name.removesuffix(".sql"))
        for file in sorted(found, key=lambda file: file.name)
    ]


def find(name: str) -> SavedQuery:
    """Find a saved query by name.

    Raises:
        BadInput: it does not exist; the message suggests the closest name.
    """
    known = {query.name: query for query in saved()}
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, 1)
    suggestion = f"; did you mean {near[0]}?" if near else "."
    raise BadInput(f"saved query {name!r} not found{suggestion} `rlhf sql --list` lists them.")


def is_name(text: str) -> bool:
    """Return True if a text can only be the name of a query, because no statement is a single word."""
    return re.fullmatch(r"[A-Za-z0-9_-]+", text) is not None


def parse(text: str) -> SavedQuery:
    """Parse the comment of a statement; without a comment, it has no title and no typed arguments."""
    header = _HEADER.match(text)
    lines = [line.strip() for line in header[1].strip().splitlines()] if header else []
    arguments, prose = [], []
    for line in lines:
        found = _ARGUMENT.fullmatch(line)
        if found is None:
            prose.append(line)
            continue
        default = found["default"]
        shown = None if default is None else default.strip().strip("'")
        arguments.append(Argument(found["name"], found["type"], shown, found["meaning"]))
    title = prose[0] if prose else ""
    return SavedQuery("", title, " ".join(" ".join(prose[1:]).split()), tuple(arguments), text)


# ---------------------------------------------------------------------------------------------------------------------
# Running a query


def run(
    store: HistoryStore, query: SavedQuery, given: Mapping[str, str], limit: int | None = None, clock: Clock = None
) -> SqlResult:
    """Run a query and load its result into memory; see :func:`stream`.

    Args:
        limit: maximum number of rows; None for all.

    Raises:
        BadInput: as :func:`stream`, or the result is larger than 256 MiB.
    """
    rows: list[list[Any]] = []
    size = 0
    with stream(store, query, given, clock) as answer:
        for row in answer.rows:
            rows.append(row)
            size += sum(map(sql_limits.size_of, row))
            if size > sql_limits.MAX_ANSWER_BYTES:
                raise BadInput(
                    f"the result is larger than {sql_limits.MAX_ANSWER_BYTES >> 20} MiB after {len(rows)} rows: "
                    f"select fewer columns or rows (LIMIT), or print it row by row with --json"
                )
            if limit is not None and len(rows) > limit:
                break
    kept = rows if limit is None else rows[:limit]
    return SqlResult(answer.columns, kept, len(kept) < len(rows))


@contextmanager
def stream(
    store: HistoryStore, query: SavedQuery, given: Mapping[str, str], clock: Clock = None
) -> Iterator[SqlStream]:
    """Run a query under the guards of :func:`queries.stream_sql`, and read its result row by row.

    Args:
        given: values of arguments, as text.
        clock: time limit of the database's work.

    Raises:
        BadInput: an argument is missing, unknown or of the wrong type; or as :func:`queries.stream_sql`.
    """
    text, values = _bound_query(store, query, given)
    with queries.stream_sql(store, text, values, shipped=bool(query.name), clock=clock) as result:
        yield result


def _bound_query(
    store: HistoryStore, query: SavedQuery, given: Mapping[str, str]
) -> tuple[str, dict[str, Value] | None]:
    """Build the text for the driver and the values of its parameters (None without parameters)."""
    dialect = dialect_of(store)
    text = statement(query, dialect) if query.name else query.sql
    values = _values(store, query, given)
    named = parameters(text)
    if unknown := sorted(given.keys() - named):
        listed = ", ".join(sorted(named)) or "none"
        raise BadInput(f"the query has no argument {unknown[0]!r}. Its arguments: {listed}.")
    if missing := sorted(named - values.keys()):
        raise BadInput(f"the query needs a value for {missing[0]!r}: give {missing[0]}=VALUE.")
    if not named:
        return text, None
    return _bound(text) if dialect == "postgresql" else text, {name: values[name] for name in named}


def statement(query: SavedQuery, dialect: str) -> str:
    """Expand the text of a query for one database: ``sqlite`` or ``postgresql``."""
    return "".join(_expanded(query.sql, FUNCTIONS[dialect]))


def dialect_of(store: HistoryStore) -> str:
    """Name the database: ``sqlite`` or ``postgresql``."""
    return store.url.get_backend_name()


def parameters(text: str) -> set[str]:
    """Find the names of the parameters of a statement."""
    return {found[1] for found in _PARAMETER.finditer(text) if found[1]}


def _bound(text: str) -> str:
    """Rewrite a statement for PostgreSQL's driver: parameters as ``%(name)s``, other percent signs doubled."""
    parts, end = [], 0
    for found in _PARAMETER.finditer(text):
        if found[1]:
            parts += [text[end : found.start()].replace("%", "%%"), f"%({found[1]})s"]
            end = found.end()
    return "".join([*parts, text[end:].replace("%", "%%")])


def _values(store: HistoryStore, query: SavedQuery, given: Mapping[str, str]) -> dict[str, Value]:
    declared = {argument.name: argument for argument in query.arguments}
    # PostgreSQL takes text as the type of its place. SQLite does so only beside a column.
    convert = _plain_number if dialect_of(store) == "sqlite" else str
    values: dict[str, Value] = {name: convert(text) for name, text in given.items() if name not in declared}
    for name, argument in declared.items():
        text = given.get(name, argument.default)
        if text is not None:
            values[name] = _value(store, argument, text)
    return values


def _value(store: HistoryStore, argument: Argument, text: str) -> Value:
    match argument.type:
        case "run":
            return queries.resolve_run(store, text)
        case "number":
            if not _is_number(text):
                raise BadInput(f"found {argument.name}={text}, expected a number: {argument.meaning}.")
            return _number(text)
        case _:
            return text


def _plain_number(text: str) -> Value:
    """A number as people write it; the text of any other, as of a fingerprint that begins with zeros."""
    return _number(text) if re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?", text) and _is_number(text) else text


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[+-]?\d{1,18}(\.\d+)?", text) is not None  # an integer of SQLite has 64 bits


def _number(text: str) -> int | float:
    return float(text) if "." in text else int(text)


# ---------------------------------------------------------------------------------------------------------------------
# Expansion for a database


def _expanded(text: str, functions: Mapping[str, str]) -> Iterator[str]:
    found = next((match for match in _FUNCTION.finditer(text) if match[1] in functions), None)
    if found is None:
        yield text
        return
    arguments, end = _call(text, found.end())
    yield text[: found.start()]
    yield functions[found[1]].format(*("".join(_expanded(argument, functions)) for argument in arguments))
    yield from _expanded(text[end:], functions)


def _call(text: str, start: int) -> tuple[Sequence[str], int]:
    """Split the arguments of a call with its opening bracket before ``start``; return them and the end of the call."""
    depth, begin, arguments = 0, start, []
    for position in range(start, len(text)):
        character = text[position]
        if character == "," and depth == 0:
            arguments.append(text[begin:position].strip())
            begin = position + 1
        elif character == "(":
            depth += 1
        elif character == ")":
            if depth == 0:
                return [*arguments, text[begin:position].strip()], position + 1
            depth -= 1
    raise BadInput(f"a bracket is not closed: {text[start:].strip()!r}")
