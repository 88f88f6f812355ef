"""A whole site whose history and whose Prefect are in PostgreSQL, with room for one run; and no password anywhere."""

from pathlib import Path

import psycopg
import pytest
from history_tools import postgres
from shop_floor import Floor, free_port, until
from whole_site import environments, files_with, go, prefect_says, stand_in, submitted, tables_with

from rlhf_core.launch.journal import read_record

pytestmark = [pytest.mark.site, pytest.mark.end_to_end]

SECRET = "s3cret-of-the-database"


def test_a_site_on_postgresql(tmp_path: Path) -> None:
    server = postgres()
    history, prefect = server.empty_database(), server.empty_database()
    floor = Floor(tmp_path / "home", free_port(), max_runs=1, settings="reconcile_s = 1.0\ningest_s = 0.5")
    floor.variables = {
        "RLHF_DATABASE_URL": history.replace("postgresql://rlhf@", f"postgresql+psycopg://rlhf:{SECRET}@"),
        "RLHF_PREFECT_DATABASE_URL": prefect.replace("postgresql://rlhf@", f"postgresql+asyncpg://rlhf:{SECRET}@"),
        "RLHF_COMPUTE_PYTHON": str(stand_in(tmp_path)),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    floor.write_settings()
    try:
        floor.rlhf("db", "upgrade")
        floor.rlhf("up")
        waits = submitted(floor, "quickstart", "promote.when=approved")
        lines = [" ".join(process.cmdline()) for process in floor.processes()]
        around = environments(waits)
        go(waits)
        until(lambda: read_record(waits).promotion is not None and prefect_says(floor, waits) == "Paused")
        # There is room for one run, and the one that waits for an approval does not take it.
        other = submitted(floor, "quickstart")
        assert prefect_says(floor, waits) == "Paused"
        go(other)
        until(lambda: prefect_says(floor, other) == "Completed")
        floor.rlhf("refuse", waits.run_id, "--reason", "only a test")
        until(lambda: prefect_says(floor, waits) == "Completed")
        floor.rlhf("down")
        assert floor.processes() == []
    finally:
        floor.kill_all()
    both = sorted((one.run_id, "completed") for one in (waits, other))
    with psycopg.connect(history) as connection:
        assert connection.execute("SELECT run_id, state FROM runs ORDER BY run_id").fetchall() == both
    with psycopg.connect(prefect) as connection:
        assert connection.execute("SELECT count(*) FROM flow_run WHERE state_name = 'Completed'").fetchone() >= (2,)
    assert any("prefect.engine" in line for line in lines), "the controller was among those that were looked at"
    assert not [line for line in lines if SECRET in line]
    assert around, "its job was among those that were looked at"
    assert not [text for text in around if SECRET in text]
    assert not list(floor.home.rglob("*.db"))
    assert files_with(SECRET, tmp_path) == []
    assert tables_with(SECRET, prefect) == []
    (tmp_path / "control").write_text(SECRET)
    assert files_with(SECRET, tmp_path) == [tmp_path / "control"]
