"""Guards that prevent changes by the SQL of a user, on both databases."""

import re
import shlex
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import URL

from rlhf_core.errors import UnsafeDatabase
from rlhf_core.history.database import displayed
from rlhf_core.history.sql_limits import WorkClock
from rlhf_core.text.redaction import is_secret_name

READER_ROLE = "rlhf_reader"
"""The PostgreSQL role that runs the SQL of users, if it exists (``infra/reader.sql`` creates it)."""

QUERY_TIMEOUT_S = 300
"""Time limit of a statement in the database."""

_RIGHTS = """
WITH privileged AS (
    SELECT oid FROM pg_roles
     WHERE rolsuper OR rolreplication
        OR rolname IN ('pg_execute_server_program', 'pg_read_server_files', 'pg_write_server_files',
                       'pg_signal_backend')
), reader AS (
    SELECT oid FROM pg_roles
     WHERE rolname = %(reader)s AND pg_has_role(session_user, oid, 'MEMBER')
       AND has_table_privilege(oid, 'runs', 'SELECT')
)
SELECT EXISTS (SELECT FROM privileged WHERE pg_has_role(session_user, oid, 'MEMBER')),
       EXISTS (SELECT FROM reader),
       EXISTS (SELECT FROM reader
                WHERE NOT has_function_privilege(oid, 'pg_catalog.set_config(text, text, boolean)', 'EXECUTE')
                  AND NOT EXISTS (SELECT FROM privileged WHERE pg_has_role(reader.oid, privileged.oid, 'MEMBER')))
"""
"""Three results: the login has or can take rights beyond the tables; the reading role exists; a statement cannot leave
it. The login counts, not the current role: ``set_config('role', 'none', true)``, which may be part of a SELECT, leaves
any role unless that function is revoked. Roles belong to the server: one created for another database has no rights in
this one."""

_FETCHED_ROWS = 500
"""Rows fetched from PostgreSQL at a time."""

_NOTHING = re.compile(r"(?:\s|;|--[^\n]*(?:\n|$)|/\*.*?\*/)*", re.DOTALL)
"""Text without a statement."""


def query_postgres(
    connection: Any, text: str, values: Mapping[str, Any] | None, url: URL, clock: WorkClock, *, shipped: bool = False
) -> Iterator[Sequence[Sequence[Any]]]:
    """Run one statement of a user on PostgreSQL, in the read-only transaction of ``connection``. Yield the column
    names, then rows in batches.

    Besides the transaction, three guards protect the server. The statement is declared as a cursor, so the parser
    rejects everything but a query: COPY, DO, SET, a WITH that writes. It runs as ``rlhf_reader``, a role that can only
    read and cannot be left; an ordinary login that is not a member keeps its own rights. And it has a time limit. None
    of them stops a superuser, who may signal other sessions and read files inside a SELECT: such a login runs
    statements as ``rlhf_reader`` or not at all.

    Args:
        connection: the driver's own connection.
        text: the statement.
        values: values of its parameters (``%(name)s``); None without parameters, in which case percent signs are
            literal.
        url: the database, for the error message.
        clock: time limit.
        shipped: True if the text is part of this program and only its values are given, so any login may run it.

    Raises:
        UnsafeDatabase: the login has rights that the statement could abuse.
    """
    if _NOTHING.fullmatch(text):
        yield []
        return
    is_privileged, has_reader, is_confined = connection.execute(_RIGHTS, {"reader": READER_ROLE}).fetchone()
    if is_privileged and not is_confined and not shipped:
        raise UnsafeDatabase(_refusal(url, has_reader=has_reader))
    if has_reader:
        _keep_schemas(connection)
        connection.execute(f"SET LOCAL ROLE {READER_ROLE}")
    _limit_time(connection, clock)
    # All rows are fetched. By default, a cursor is planned for the first tenth of them, which takes far longer for all.
    connection.execute("SET LOCAL cursor_tuple_fraction = 1")
    # Prepared, because the simple protocol would accept several statements: "SELECT 1; DROP TABLE runs".
    connection.execute(f"DECLARE statement NO SCROLL CURSOR FOR {text}", values, prepare=True)
    columns = None
    while True:
        _limit_time(connection, clock)
        with clock.working():
            cursor = connection.execute(f"FETCH {_FETCHED_ROWS} FROM statement")
            rows = cursor.fetchall()
        if columns is None:
            columns = [described[0] for described in cursor.description or ()]
            yield columns
        if not rows:
            return
        yield rows


def _keep_schemas(connection: Any) -> None:
    """Keep the schemas of the login for the transaction: "$user" in search_path means another one for another role."""
    (schemas,) = connection.execute(
        "SELECT string_agg(quote_ident(name), ', ' ORDER BY place) "
        "FROM unnest(current_schemas(false)) WITH ORDINALITY AS found(name, place)"
    ).fetchone()
    if schemas:
        connection.execute(f"SET LOCAL search_path TO {schemas}")


def _limit_time(connection: Any, clock: WorkClock) -> None:
    connection.execute(f"SET LOCAL statement_timeout = {max(1, int(1000 * clock.left_s))}")  # ms; 0 is no limit


def _refusal(url: URL, *, has_reader: bool) -> str:
    lacking = (
        f"the role {READER_ROLE} does not stop a statement from regaining those rights, as it may call set_config or "
        f"has such rights itself"
        if has_reader
        else f"the role {READER_ROLE}, which can only read, is missing in this database"
    )
    # Without a password, for which psql asks. URL.set() would keep it.
    query = {name: value for name, value in url.query.items() if not is_secret_name(name)}
    address = URL.create("postgresql", url.username, None, url.host, url.port, url.database, query).render_as_string()
    return (
        f"refused: {url.username or 'the user'} of {displayed(url)} is a superuser or has similar rights, and a "
        f"statement with those rights can end sessions, read files and change settings; {lacking}. Create the "
        f"role correctly, once, as a superuser: `rlhf db reader | psql {shlex.quote(address)}` "
        "(`rlhf db reader` alone prints the script). Better still, set RLHF_DATABASE_URL to an ordinary user that owns "
        "the tables"
    )


def forbid_writing(connection: Any) -> None:
    """Restrict a SQLite connection to reading: it cannot even attach another file or change a setting.

    Args:
        connection: the driver's own connection.
    """
    allowed = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
    describing = {"table_info", "table_xinfo", "table_list", "index_list", "index_info", "foreign_key_list"}

    # fts3_tokenizer returns and accepts memory addresses.
    forbidden = {"load_extension", "fts3_tokenizer"}

    def authorize(
        action: int, first: str | None, second: str | None, _database: str | None, _trigger: str | None
    ) -> int:
        if action == sqlite3.SQLITE_FUNCTION and second in forbidden:
            return sqlite3.SQLITE_DENY
        if action in allowed or (action == sqlite3.SQLITE_PRAGMA and first in describing):
            return sqlite3.SQLITE_OK
        return sqlite3.SQLITE_DENY

    # SQLite creates these tables at their first use, which must be before that is forbidden.
    for function in ("json_each", "json_tree"):
        connection.execute(f"SELECT 1 FROM {function}('{{}}')").close()
    connection.set_authorizer(authorize)
