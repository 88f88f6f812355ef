"""The migrations create the declared tables on both databases, and do nothing automatically on PostgreSQL."""

import contextlib
import json
import os
import runpy
import sqlite3
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from history_tools import dump, new_sqlite, postgres, whole_run

from rlhf_core.errors import DatabaseUnavailable, SchemaOutOfDate
from rlhf_core.history import database, migrate
from rlhf_core.history.renamed import RENAMED
from rlhf_core.history.store import HistoryStore
from rlhf_core.history.tables import SCHEMA_REVISION, VIEWS, metadata
from rlhf_core.watchdog.ingest import sync

pytestmark = pytest.mark.usefixtures("real_migrations")

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def _scripts_read_once() -> Iterator[None]:
    """Read the scripts once: Alembic reads them for each command, a fifth of the time of most tests here."""
    scripts = ScriptDirectory.from_config(_config("sqlite://"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptDirectory, "from_config", lambda _config: scripts)
        yield


def differences(store: HistoryStore, declared: sa.MetaData) -> list[object]:
    """Remaining changes according to Alembic."""
    with store.reading() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        return list(compare_metadata(context, declared))


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


def test_views_answer_on_an_empty_database(store: HistoryStore) -> None:
    with store.reading() as connection:
        for view in VIEWS:
            assert connection.exec_driver_sql(f"SELECT * FROM {view}").all() == []


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


def test_a_schema_of_a_newer_program_is_left_alone(database_url: str) -> None:
    with HistoryStore(database_url) as store, store.writing() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    try:
        with pytest.raises(SchemaOutOfDate, match=r"schema 9999, .* newer version of rlhf-flows"):
            HistoryStore(database_url)
        with pytest.raises(SchemaOutOfDate, match="nothing was changed"):
            migrate.upgrade(database.parse_url(database_url))
    finally:
        with HistoryStore(database_url, check_schema=False) as store, store.writing() as connection:
            connection.exec_driver_sql(f"UPDATE alembic_version SET version_num = '{SCHEMA_REVISION}'")


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
    upgrade(url, "0001")
    monkeypatch.setattr(migrate, "_LOCK_TIMEOUT_S", 1)
    reader = sa.create_engine(database.parse_url(url))
    with reader.connect() as notebook:
        notebook.exec_driver_sql("SELECT * FROM incidents")
        with pytest.raises(DatabaseUnavailable, match=r"other sessions use its tables.*pg_stat_activity"):
            migrate.upgrade(database.parse_url(url))
    reader.dispose()
    assert migrate.upgrade(database.parse_url(url)) == ("0001", SCHEMA_REVISION)


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
    upgrade(url, "0005")
    write(url, "CREATE VIEW run_curve AS SELECT * FROM metrics")
    write(url, "CREATE TABLE old_metrics (a)")  # a name that 0006 needs

    def schema() -> list[str]:
        with contextlib.closing(sqlite3.connect(tmp_path / "history.db")) as connection:
            return [sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master ORDER BY name, sql")]

    before = schema()
    with pytest.raises(sa.exc.OperationalError, match="old_metrics"):
        upgrade(url, "head")
    assert schema() == before


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a database without tables."""
    return f"sqlite:///{tmp_path}/history.db" if request.param == "sqlite" else postgres().empty_database()


def upgrade(url: str, revision: str) -> None:
    """Upgrade a database like Alembic's command line, but in this process: a separate process takes 0.5 s."""
    command.upgrade(_config(url), revision)


def _config(url: str) -> Config:
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
        "tags": ["nightly", "nightly", "sort"],
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
    """Insert the only row of a table once more, with other values in some columns."""
    engine = database.writing_engine(database.parse_url(url))
    with engine.begin() as connection:
        table = sa.Table(name, sa.MetaData(), autoload_with=connection)
        row = connection.execute(table.select()).one()._mapping
        connection.execute(table.insert(), [{**row, **changed}])
    engine.dispose()


def renamed(rows: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    """The same rows with the current schema's names of tables and columns."""
    tables = {one.table: one.now for one in RENAMED if not one.column}
    columns = {(one.table, one.column): one.now for one in RENAMED if one.column}
    return {
        tables.get(table, table): {columns.get((table, name), name): value for name, value in row.items()}
        for table, row in rows.items()
    }


def only(rows: dict[str, dict[str, object]], known: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    """Restrict rows to the tables and columns of the known rows."""
    return {table: {name: rows[table][name] for name in row} for table, row in known.items()}


@pytest.mark.parametrize("old", ["0001", "0002", "0003", "0004", "0005"])
def test_an_older_database_is_upgraded_with_what_is_in_every_table(empty_url: str, runs: Path, old: str) -> None:
    upgrade(empty_url, old)
    before = renamed(fill(empty_url))
    with pytest.raises(SchemaOutOfDate, match="Run `rlhf db upgrade`"):
        HistoryStore(empty_url)
    assert migrate.upgrade(database.parse_url(empty_url)) == (old, SCHEMA_REVISION)
    assert only(read(empty_url, known=before), before) == before
    with HistoryStore(empty_url) as store:
        assert differences(store, metadata) == []
        assert store.run_ids() == [RUN_ID]
        with store.reading() as connection:
            tags, kept, true = (
                [tuple(row) for row in connection.execute(sa.text(question))]
                for question in (
                    "SELECT tag FROM run_tags ORDER BY tag",
                    "SELECT wall_s FROM goodput_cache",
                    "SELECT wall_s FROM run_goodput",
                )
            )
        assert tags == ([("nightly",), ("sort",)] if old == "0005" else [])
        assert kept == true
        sync(whole_run(runs, "sort", "bbbbbb", 0).dir, store)
        assert len(store.run_ids()) == 2


def views_of(url: str) -> dict[str, str]:
    """Definitions of all views of a database."""
    engine = database.writing_engine(database.parse_url(url))
    with engine.begin() as connection:
        inspector = sa.inspect(connection)
        found = {name: inspector.get_view_definition(name) for name in inspector.get_view_names()}
    engine.dispose()
    return found


NODE_HEALTH = """CREATE VIEW node_health AS
SELECT node, COUNT(*) AS num_attempts, COUNT(*) AS num_runs, COUNT(*) AS num_strikes,
       MAX(measured_at) AS last_strike_at, 'oom' AS last_failure_kind
FROM node_speeds GROUP BY node"""
"""A view as an earlier version may have created it."""


def test_an_upgrade_replaces_the_views_and_keeps_those_of_users(empty_url: str, tmp_path: Path) -> None:
    is_sqlite = empty_url.startswith("sqlite")
    upgrade(empty_url, "0007")
    write(empty_url, NODE_HEALTH)
    write(empty_url, "CREATE VIEW my_nodes AS SELECT node FROM node_health")
    mine = views_of(empty_url)["my_nodes"]
    if not is_sqlite:
        write(empty_url, "GRANT SELECT ON node_health TO pg_monitor")
    migrate.upgrade(database.parse_url(empty_url))
    (tmp_path / "new").mkdir()
    new = new_sqlite(tmp_path / "new") if is_sqlite else postgres().migrated_database()
    assert views_of(empty_url) == {**views_of(new), "my_nodes": mine}
    if not is_sqlite:
        with HistoryStore(empty_url) as store, store.reading() as connection:
            permission = "SELECT has_table_privilege('pg_monitor', 'node_health', 'SELECT')"
            assert connection.exec_driver_sql(permission).scalar_one()
    upgrade(empty_url, "head")  # no script runs
    assert views_of(empty_url) == {**views_of(new), "my_nodes": mine}


def test_alembic_changes_no_views_unless_it_upgrades(empty_url: str) -> None:
    upgrade(empty_url, "0007")
    write(empty_url, NODE_HEALTH)
    before = views_of(empty_url)
    command.current(_config(empty_url))
    assert views_of(empty_url) == before


def resume(url: str) -> None:
    """Make the run one with two controllers."""
    write(url, "UPDATE events SET source = 'control.jsonl', kind = 'controller_started'")
    copy_row(url, "events", position=2)


def find_twice(url: str) -> None:
    """Make the controller find the incident too."""
    write(url, "UPDATE incidents SET found_by = 'agent'")
    copy_row(url, "incidents", incident_id="2.0", found_by="controller")


def make_external(url: str) -> None:
    """Make the trainer an external program."""
    write(url, """UPDATE runs SET spec = '{"trainer": {"kind": "command"}}'""")


@pytest.mark.parametrize(
    ("old", "change", "is_renewed"),
    [("0011", resume, True), ("0012", find_twice, True), ("0013", make_external, True), ("0011", None, False)],
)
def test_cached_totals_that_the_new_views_would_not_confirm_are_computed_again(
    empty_url: str, old: str, change: Callable[[str], None] | None, *, is_renewed: bool
) -> None:
    upgrade(empty_url, old)
    fill(empty_url)  # with a run of no length, and a cached one of 1.5 s
    if change:
        change(empty_url)
    migrate.upgrade(database.parse_url(empty_url))
    assert read(empty_url, known=["goodput_cache"])["goodput_cache"]["wall_s"] == (0.0 if is_renewed else 1.5)


def test_a_migration_that_forgets_rows_would_be_seen(tmp_path: Path) -> None:
    """Negative control: a table that is recreated without its content."""
    url = f"sqlite:///{tmp_path}/history.db"
    upgrade(url, "0005")
    before = fill(url)
    with database.writing_engine(database.parse_url(url)).begin() as connection:
        connection.exec_driver_sql("DELETE FROM metrics")
    with pytest.raises(sa.exc.NoResultFound):
        assert read(url) == before


def test_renamed_tables_columns_and_events_keep_their_rows(empty_url: str) -> None:
    upgrade(empty_url, "0008")
    before = fill(empty_url)
    write(empty_url, "UPDATE events SET kind = 'keeper_adopt'")
    before["events"]["kind"] = "keeper_adopt"
    upgrade(empty_url, "0009")
    now = read(empty_url)
    assert now["events"].pop("kind") == "reconcile_adopt"
    expected = renamed(before)
    assert expected["events"].pop("kind") == "keeper_adopt"
    assert now == expected
    assert now["checkpoints"]["loop"] == "some stage"
    upgrade(empty_url, "head")
    with HistoryStore(empty_url) as store, store.reading() as connection:
        for view in VIEWS:
            connection.exec_driver_sql(f"SELECT * FROM {view}").all()
        if connection.dialect.name == "postgresql":
            inspector = sa.inspect(connection)
            assert inspector.get_pk_constraint("goodput_cache")["name"] == "pk_goodput_cache"
            assert [one["name"] for one in inspector.get_foreign_keys("goodput_cache")] == ["fk_goodput_cache_run_id"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("keeper_tell", "reconcile_publish", id="publishing has its own word"),
        pytest.param("keepers", "keepers", id="an underscore in LIKE stands for any character: others stay"),
    ],
)
def test_only_the_kinds_of_the_site_daemon_are_renamed(empty_url: str, before: str, after: str) -> None:
    upgrade(empty_url, "0008")
    fill(empty_url)
    write(empty_url, f"UPDATE events SET kind = '{before}'")
    upgrade(empty_url, "0009")
    assert read(empty_url)["events"]["kind"] == after


def test_the_advice_on_old_names_is_that_of_the_migration() -> None:
    migration = runpy.run_path(str(migrate.SCRIPTS / "versions" / "0009_words.py"))
    columns = {(one.table, one.column, one.now) for one in RENAMED if one.column}
    assert columns == set(migration["COLUMNS"])
    assert [(one.table, one.now) for one in RENAMED if not one.column] == [migration["TABLE"]]


def write(url: str, statement: str) -> None:
    """Change rows directly, bypassing the store."""
    engine = database.writing_engine(database.parse_url(url))
    with engine.begin() as connection:
        connection.exec_driver_sql(statement)
    engine.dispose()


def test_alembic_prints_the_sql(tmp_path: Path) -> None:
    sql = alembic("upgrade", "head", "--sql", url="postgresql://host/database")
    assert "CREATE OR REPLACE VIEW run_curve" in sql
    assert "JSONB" in sql
    with pytest.raises(SystemExit, match="no SQL for SQLite"):
        command.upgrade(_config(f"sqlite:///{tmp_path}/history.db"), "head", sql=True)
