"""Connection of Alembic to the database: that of ``rlhf db upgrade``, or, on its own command line, the one named by
``-x url=...`` or RLHF_DATABASE_URL. An upgrade replaces the views after the last script."""

import os
from typing import Any

from alembic import context
from sqlalchemy import URL, Connection

from rlhf_core.history import database
from rlhf_core.history.tables import SCHEMA_REVISION, metadata
from rlhf_core.history.tables.view_sql import ENDED, GOODPUT, view_sql

CACHE_GOODPUT = f"""
INSERT INTO goodput_cache (run_id, ingest_stamp, {GOODPUT})
SELECT n.run_id, n.ingest_stamp, {GOODPUT}
FROM runs n JOIN run_goodput g ON g.run_id = n.run_id
WHERE n.state IN {ENDED} AND NOT EXISTS (SELECT 1 FROM goodput_cache k WHERE k.run_id = n.run_id)"""
"""Goodput of ended runs of which no row is cached: scripts remove the rows that the new views do not confirm."""


def _run(**options: Any) -> None:
    context.configure(target_metadata=metadata, **options)
    with context.begin_transaction():
        if "destination_rev" in context.get_context().opts:
            _upgrade()
        else:  # `alembic current`, `check` or `revision`
            context.run_migrations()


def _upgrade() -> None:
    dialect = context.get_context().dialect.name
    views_of_users = _drop_views(context.get_bind()) if dialect == "sqlite" else []
    context.run_migrations()
    if _is_newest():
        # PostgreSQL keeps permissions on a view that is replaced, and views of users that depend on it.
        create = "CREATE VIEW" if dialect == "sqlite" else "CREATE OR REPLACE VIEW"
        for name, query in view_sql(dialect).items():
            _execute(f"{create} {name} AS {query}")
        _execute(CACHE_GOODPUT)
    for sql in views_of_users:
        _execute(sql)


def _drop_views(connection: Connection) -> list[str]:
    """Drop all views of a SQLite database, which refuses to recreate a table under a view.

    Returns:
        SQL of those that are not ours.
    """
    views = connection.exec_driver_sql("SELECT name, sql FROM sqlite_master WHERE type = 'view'").all()
    for name, _ in views:
        connection.exec_driver_sql(f"DROP VIEW {connection.dialect.identifier_preparer.quote(name)}")
    return [sql for name, sql in views if name not in view_sql("sqlite")]


def _is_newest() -> bool:
    """Return False if a developer upgrades to an older revision, whose tables the views do not fit."""
    if context.is_offline_mode():
        return context.get_revision_argument() == SCHEMA_REVISION
    return context.get_context().get_current_heads() == (SCHEMA_REVISION,)


def _execute(sql: str) -> None:
    context.execute(sql.replace(":", "\\:"))  # a colon would be a parameter


def _run_on(connection: Connection) -> None:
    # SQLite changes a table by recreating it.
    _run(connection=connection, compare_type=True, render_as_batch=connection.dialect.name == "sqlite")


def _url() -> URL:
    text = context.get_x_argument(as_dictionary=True).get("url") or os.environ.get("RLHF_DATABASE_URL")
    if not text:
        raise SystemExit("no database given: use `alembic -x url=sqlite:///history.db ...` or set RLHF_DATABASE_URL")
    return database.parse_url(text)


def _run_from_command_line() -> None:
    url = _url()
    if context.is_offline_mode():
        if database.sqlite_file(url) is not None:
            raise SystemExit(
                "no SQL for SQLite, whose tables are recreated from what is in the database; leave out --sql"
            )
        _run(url=url, literal_binds=True)
        return
    engine = database.writing_engine(url, foreign_keys=False)  # as `rlhf db upgrade` does
    with engine.begin() as connection:
        _run_on(connection)
    engine.dispose()


_given: Connection | None = context.config.attributes.get("connection")
if _given is not None:
    _run_on(_given)
else:
    _run_from_command_line()
