"""Connection of Alembic to the database: that of ``rlhf db upgrade``, or, on its own command line, the one named by
``-x url=...`` or RLHF_DATABASE_URL."""

import os
import sqlite3

from alembic import context
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url

from rlhf_core.history.tables import metadata


def _run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=metadata,
        compare_type=True,
        render_as_batch=connection.dialect.name == "sqlite",  # SQLite changes a table by recreating it
    )
    with context.begin_transaction():
        context.run_migrations()


def _begin_transactions(engine: Engine) -> None:
    """Include changes of the schema in transactions. The sqlite3 module begins one only at the first change of a row,
    and a migration that fails would leave what it has done until then."""

    @event.listens_for(engine, "connect")
    def _connect(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def _url() -> URL:
    text = context.get_x_argument(as_dictionary=True).get("url") or os.environ.get("RLHF_DATABASE_URL")
    if not text:
        raise SystemExit("no database given: use `alembic -x url=sqlite:///history.db ...` or set RLHF_DATABASE_URL")
    url = make_url(text)
    return url.set(drivername="postgresql+psycopg") if url.get_backend_name().startswith("postgres") else url


def _run_from_command_line() -> None:
    url = _url()
    if context.is_offline_mode():
        if url.get_backend_name() == "sqlite":
            raise SystemExit(
                "no SQL for SQLite, whose tables are recreated from what is in the database; leave out --sql"
            )
        context.configure(url=url, target_metadata=metadata, literal_binds=True)
        with context.begin_transaction():
            context.run_migrations()
        return
    engine = create_engine(url)
    if url.get_backend_name() == "sqlite":
        _begin_transactions(engine)
    with engine.begin() as connection:
        _run(connection)
    engine.dispose()


_given: Connection | None = context.config.attributes.get("connection")
if _given is not None:
    _run(_given)
else:
    _run_from_command_line()
