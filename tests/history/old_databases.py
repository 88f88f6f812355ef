"""Databases of earlier schemas, with a row in every table."""

from argparse import Namespace
from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from history_tools import postgres

from rlhf_core.history import database, migrate
from rlhf_core.history.store import HistoryStore


@pytest.fixture(scope="module")
def scripts_read_once() -> Iterator[None]:
    """Read the scripts once: Alembic reads them for each command, a fifth of the time of most tests here."""
    scripts = ScriptDirectory.from_config(alembic_config("sqlite://"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptDirectory, "from_config", lambda _config: scripts)
        yield


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a database without tables."""
    return f"sqlite:///{tmp_path}/history.db" if request.param == "sqlite" else postgres().empty_database()


def upgrade(url: str, revision: str) -> None:
    """Upgrade a database like Alembic's command line, but in this process: a separate process takes 0.5 s."""
    command.upgrade(alembic_config(url), revision)


def alembic_config(url: str) -> Config:
    """Settings of Alembic for a database."""
    config = Config(cmd_opts=Namespace(x=[f"url={url}"]))
    config.set_main_option("script_location", str(migrate.SCRIPTS))
    return config


RUN_ID = "sort-20260301-120000-aaaaaa"
WHEN = datetime(2026, 3, 1, 12, tzinfo=UTC)


def a_value(column: sa.Column[object]) -> object:
    """Value that fits a column, and the rows of other tables that it may reference."""
    named = {
        "run_id": RUN_ID,
        "state": "completed",
        "overrides": ["a=1"],
        "non_finite": None,
        "name": "sort",
        "when_made": "before",
        "incident_id": "1.0",
    }
    if column.name in named:
        return named[column.name]
    match column.type:
        case sa.DateTime():
            return WHEN if column.type.timezone else WHEN.replace(tzinfo=None)
        case sa.JSON():
            return {"a": 1}
        case sa.Boolean():
            return True
        case sa.Text():
            return f"some {column.name}"
        case sa.Float():
            return 1.5
        case _:
            return 1


def fill(url: str) -> dict[str, dict[str, object]]:
    """Insert a row into every table of the database's schema; return the rows as they are read back."""
    schema = sa.MetaData()
    engine = database.writing_engine(database.parse_url(url))
    with engine.begin() as connection:
        schema.reflect(connection)
        for table in schema.sorted_tables:
            if table.name != "alembic_version":
                # The only number assigned by the database: inserted past its counter, it would be assigned again.
                given = {"key_id"} if table.name == "metric_keys" else set()
                row = {column.name: a_value(column) for column in table.columns if column.name not in given}
                connection.execute(table.insert(), [row])
    engine.dispose()
    return read(url)


def read(url: str, known: Collection[str] | None = None) -> dict[str, dict[str, object]]:
    """The only row of each table of the current schema, or of some of them."""
    engine = database.writing_engine(database.parse_url(url))
    schema = sa.MetaData()
    found = {}
    with engine.begin() as connection:
        schema.reflect(connection)
        for table in schema.sorted_tables:
            if table.name != "alembic_version" and (known is None or table.name in known):
                found[table.name] = dict(connection.execute(table.select()).one()._mapping)
    engine.dispose()
    return found


def copy_row(url: str, name: str, **changed: object) -> None:
    """Insert the first row of a table once more, with other values in some columns."""
    engine = database.writing_engine(database.parse_url(url))
    with engine.begin() as connection:
        table = sa.Table(name, sa.MetaData(), autoload_with=connection)
        row = connection.execute(table.select()).mappings().fetchall()[0]
        connection.execute(table.insert(), [{**row, **changed}])
    engine.dispose()


def write(url: str, statement: str) -> None:
    """Change rows directly, bypassing the store."""
    engine = database.writing_engine(database.parse_url(url))
    with engine.begin() as connection:
        connection.exec_driver_sql(statement)
    engine.dispose()


def differences(store: HistoryStore, declared: sa.MetaData) -> list[object]:
    """Remaining changes according to Alembic."""
    with store.reading() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        return list(compare_metadata(context, declared))
