"""The migrations create the declared tables on both databases, and do nothing automatically on PostgreSQL."""

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.script import ScriptDirectory
from history_tools import dump, new_sqlite, postgres, whole_run
from old_databases import alembic_config, differences, upgrade, write

from rlhf_core.errors import DatabaseUnavailable, SchemaOutOfDate
from rlhf_core.history import database, migrate
from rlhf_core.history.store import HistoryStore
from rlhf_core.history.tables import SCHEMA_REVISION, metadata
from rlhf_core.watchdog.ingest import sync

pytestmark = pytest.mark.usefixtures("real_migrations", "scripts_read_once")

CHECKOUT = Path(__file__).parents[2]


def test_the_migrated_schema_is_the_declared_one(store: HistoryStore) -> None:
    assert differences(store, metadata) == []


def test_a_forgotten_migration_would_be_seen(store: HistoryStore) -> None:
    """Negative control: a column and an index that no migration creates."""
    declared = sa.MetaData(naming_convention=metadata.naming_convention)
    for table in metadata.tables.values():
        table.to_metadata(declared)
    declared.tables["runs"].append_column(sa.Column("forgotten", sa.Text))
    sa.Index("ix_forgotten", declared.tables["runs"].c.owner)
    assert len(differences(store, declared)) == 2


def test_check_constraints_and_references_are_the_declared_ones(store: HistoryStore) -> None:
    """Compare the names of check constraints and the cascades of a run, which Alembic ignores."""
    with store.reading() as connection:
        inspector = sa.inspect(connection)
        for table in metadata.sorted_tables:
            checks = {check["name"] for check in inspector.get_check_constraints(table.name)}
            declared = {str(c.name) for c in table.constraints if isinstance(c, sa.CheckConstraint)}
            assert checks == declared, table.name
            for reference in inspector.get_foreign_keys(table.name):
                cascades = reference["referred_table"] != "metric_keys"
                assert reference["options"].get("ondelete") == ("CASCADE" if cascades else None), table.name


def test_metrics_are_clustered_by_run_and_key_on_sqlite(tmp_path: Path) -> None:
    with HistoryStore(new_sqlite(tmp_path)) as store, store.reading() as connection:
        made = connection.exec_driver_sql("SELECT sql FROM sqlite_master WHERE name = 'metrics'").scalar_one()
    assert made.rstrip().endswith("WITHOUT ROWID")


def test_the_program_knows_its_newest_migration() -> None:
    assert ScriptDirectory(str(migrate.SCRIPTS)).get_heads() == [SCHEMA_REVISION]


def test_a_new_file_is_made_by_itself(tmp_path: Path) -> None:
    with HistoryStore(f"sqlite:///{tmp_path}/some/where/history.db") as store:
        assert differences(store, metadata) == []


def test_upgrading_an_up_to_date_database_changes_nothing(store: HistoryStore, runs: Path) -> None:
    sync(whole_run(runs).dir, store)
    before = dump(store)
    assert migrate.upgrade(store.url) == (SCHEMA_REVISION, SCHEMA_REVISION)
    assert dump(store) == before


def test_an_older_schema_names_the_command(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrate, "SCHEMA_REVISION", "9998")
    with pytest.raises(
        SchemaOutOfDate, match=rf"has schema {SCHEMA_REVISION}, but this program needs 9998. Run `rlhf db upgrade`"
    ) as error:
        HistoryStore(database_url)
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("revision", "source"), [("9999", "a newer version of rlhf-flows"), ("0012", "a checkout between two versions")]
)
def test_a_schema_of_another_program_is_left_alone(database_url: str, revision: str, source: str) -> None:
    write(database_url, f"UPDATE alembic_version SET version_num = '{revision}'")
    try:
        with pytest.raises(SchemaOutOfDate, match=f"schema {revision}, which was created by {source}"):
            HistoryStore(database_url)
        with pytest.raises(SchemaOutOfDate, match="nothing was changed"):
            migrate.upgrade(database.parse_url(database_url))
    finally:
        write(database_url, f"UPDATE alembic_version SET version_num = '{SCHEMA_REVISION}'")


def test_postgresql_is_never_migrated_on_the_way() -> None:
    url = postgres().empty_database()
    with pytest.raises(SchemaOutOfDate, match=r"is empty\. Run `rlhf db upgrade`"):
        HistoryStore(url)
    assert migrate.upgrade(database.parse_url(url)) == ("", SCHEMA_REVISION)
    with HistoryStore(url) as store:
        assert differences(store, metadata) == []


def test_a_migration_names_the_sessions_that_it_would_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook that has read and not ended its transaction would block it, and every reader behind it, for good."""
    url = postgres().empty_database()
    upgrade(url, "0007")
    monkeypatch.setattr(migrate, "_LOCK_TIMEOUT_S", 1)
    reader = sa.create_engine(database.parse_url(url))
    with reader.connect() as notebook:
        notebook.exec_driver_sql("SELECT * FROM incidents")
        with pytest.raises(DatabaseUnavailable, match=r"other sessions use its tables.*pg_stat_activity"):
            migrate.upgrade(database.parse_url(url))
    reader.dispose()
    assert migrate.upgrade(database.parse_url(url)) == ("0007", SCHEMA_REVISION)


def test_a_migration_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_at_the_end(*_arguments: Any) -> None:
        original(*_arguments)
        raise KeyboardInterrupt

    original = migrate._run_scripts
    url = f"sqlite:///{tmp_path}/history.db"
    with monkeypatch.context() as patch:
        patch.setattr(migrate, "_run_scripts", fail_at_the_end)
        with pytest.raises(KeyboardInterrupt):
            HistoryStore(url)
    assert list(tmp_path.iterdir()) == []
    HistoryStore(url).close()


def alembic(*arguments: str, url: str) -> str:
    """Alembic's own command line, as in a checkout."""
    return _in_checkout("-m", "alembic", "-x", f"url={url}", *arguments)


def _in_checkout(*arguments: str) -> str:
    program = [sys.executable, *arguments]
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(program, cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


SEVERAL = "import json, sys\nfrom alembic.config import main\nfor argv in json.loads(sys.argv[1]): main(argv)"
"""Program that is Alembic's command line several times, at a third of the cost of as many processes."""


def test_alembic_works_from_the_checkout(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/history.db"
    asked = [["-x", f"url={url}", *command] for command in (["upgrade", "head"], ["current"], ["check"])]
    done = _in_checkout("-c", SEVERAL, json.dumps(asked))
    assert f"{SCHEMA_REVISION} (head)" in done
    assert "No new upgrade operations" in done
    with HistoryStore(url) as store:
        assert store.run_ids() == []


def test_alembic_leaves_nothing_of_a_migration_that_fails(tmp_path: Path) -> None:
    """Like `rlhf db upgrade`: neither the tables that it has created nor the views that it has dropped."""
    url = f"sqlite:///{tmp_path}/history.db"
    upgrade(url, "0007")
    write(url, "CREATE VIEW run_curve AS SELECT * FROM metrics")
    write(url, "CREATE TABLE weight_syncs (a)")  # a name that 0019 needs

    def schema() -> list[str]:
        with contextlib.closing(sqlite3.connect(tmp_path / "history.db")) as connection:
            return [sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master ORDER BY name, sql")]

    before = schema()
    with pytest.raises(sa.exc.OperationalError, match="weight_syncs"):
        upgrade(url, "head")
    assert schema() == before


def test_alembic_prints_the_sql(tmp_path: Path) -> None:
    sql = alembic("upgrade", "head", "--sql", url="postgresql://host/database")
    assert "CREATE OR REPLACE VIEW run_curve" in sql
    assert "JSONB" in sql
    with pytest.raises(SystemExit, match="no SQL for SQLite"):
        command.upgrade(alembic_config(f"sqlite:///{tmp_path}/history.db"), "head", sql=True)
