"""Databases of earlier schemas are upgraded with their rows, and get the views of the newest schema."""

import runpy
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from history_tools import new_sqlite, postgres, whole_run
from old_databases import RUN_ID, alembic_config, copy_row, differences, fill, read, upgrade, write

from rlhf_core.errors import SchemaOutOfDate
from rlhf_core.history import database, migrate
from rlhf_core.history.renamed import RENAMED
from rlhf_core.history.store import HistoryStore
from rlhf_core.history.tables import SCHEMA_REVISION, metadata
from rlhf_core.watchdog.ingest import sync

pytestmark = pytest.mark.usefixtures("real_migrations", "scripts_read_once")


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


def test_an_older_database_is_upgraded_with_what_is_in_every_table(empty_url: str, runs: Path) -> None:
    """The run has no length, and its cached total is 1.5 s: it is computed again."""
    upgrade(empty_url, "0007")
    before = renamed(fill(empty_url))
    del before["goodput_cache"]
    with pytest.raises(SchemaOutOfDate, match="Run `rlhf db upgrade`"):
        HistoryStore(empty_url)
    assert migrate.upgrade(database.parse_url(empty_url)) == ("0007", SCHEMA_REVISION)
    assert only(read(empty_url, known=before), before) == before
    with HistoryStore(empty_url) as store:
        assert differences(store, metadata) == []
        assert store.run_ids() == [RUN_ID]
        with store.reading() as connection:
            for question, answer in (
                ("SELECT wall_s FROM goodput_cache", 0.0),
                ("SELECT wall_s FROM run_goodput", 0.0),
                ("SELECT last_valid_step FROM restarts", 1),
            ):
                assert connection.exec_driver_sql(question).scalar_one() == answer, question
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
    command.current(alembic_config(empty_url))
    assert views_of(empty_url) == before


def test_a_migration_that_forgets_rows_would_be_seen(tmp_path: Path) -> None:
    """Negative control: a table that is recreated without its content."""
    url = f"sqlite:///{tmp_path}/history.db"
    upgrade(url, "0007")
    before = fill(url)
    with database.writing_engine(database.parse_url(url)).begin() as connection:
        connection.exec_driver_sql("DELETE FROM metrics")
    with pytest.raises(sa.exc.NoResultFound):
        assert read(url) == before


def test_only_the_kinds_of_the_site_daemon_are_renamed(empty_url: str) -> None:
    """Publishing has its own word, and an underscore in LIKE stands for any character: other kinds stay."""
    upgrade(empty_url, "0007")
    fill(empty_url)
    write(empty_url, "UPDATE events SET kind = 'keeper_tell'")
    for position, kind in ((2, "keeper_adopt"), (3, "keepers")):
        copy_row(empty_url, "events", position=position, kind=kind)
    migrate.upgrade(database.parse_url(empty_url))
    with HistoryStore(empty_url) as store, store.reading() as connection:
        found = connection.exec_driver_sql("SELECT kind FROM events ORDER BY position").scalars().all()
        assert found == ["reconcile_publish", "reconcile_adopt", "keepers"]
        if connection.dialect.name == "postgresql":
            inspector = sa.inspect(connection)
            assert inspector.get_pk_constraint("goodput_cache")["name"] == "pk_goodput_cache"
            assert [one["name"] for one in inspector.get_foreign_keys("goodput_cache")] == ["fk_goodput_cache_run_id"]


def test_the_advice_on_old_names_is_that_of_the_migration() -> None:
    migration = runpy.run_path(str(migrate.SCRIPTS / "versions" / "0019_version_0_2.py"))
    columns = {(one.table, one.column, one.now) for one in RENAMED if one.column}
    assert columns == set(migration["COLUMNS"])
    assert [(one.table, one.now) for one in RENAMED if not one.column] == [migration["TABLE"]]
