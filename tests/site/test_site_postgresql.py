"""A whole site whose history and whose Prefect are in PostgreSQL: a run from its form to its end, and no password."""

import json
from pathlib import Path

import psycopg
import pytest
from history_tools import postgres
from shop_floor import Floor, free_port, until
from whole_site import SMALL, go, stand_in, state_of

from rlhf_core.run_dir import RunDir
from rlhf_core.schemas.attempts import RunState

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(300)]

SECRET = "s3cret-of-the-database"


def test_a_site_on_postgresql(tmp_path: Path) -> None:
    server = postgres()
    history, prefect = server.empty_database(), server.empty_database()
    floor = Floor(tmp_path / "home", free_port(), settings="reconcile_s = 1.0\ningest_s = 0.5")
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
        words = [word for override in SMALL for word in ("--set", override)]
        asked = json.loads(floor.rlhf("submit", "quickstart", *words, "--json").stdout)
        run_dir = RunDir.of(floor.home / "runs", asked["run_id"])
        until(lambda: state_of(run_dir) is RunState.TRAINING)
        lines = [" ".join(process.cmdline()) for process in floor.processes()]
        go(run_dir)
        until(lambda: floor.state_of(asked["flow_run_id"]) == "Completed")
        floor.rlhf("down")
        assert floor.processes() == []
    finally:
        for process in floor.processes():
            process.kill()
    with psycopg.connect(history) as connection:
        rows = connection.execute("SELECT run_id, state FROM runs").fetchall()
        assert rows == [(run_dir.run_id, "completed")]
    with psycopg.connect(prefect) as connection:
        assert connection.execute("SELECT state_name FROM flow_run WHERE name = %s", (run_dir.run_id,)).fetchall() == [
            ("Completed",)
        ]
    assert any("prefect.engine" in line for line in lines), "the controller was among those that were looked at"
    assert not [line for line in lines if SECRET in line]
    assert not list(floor.home.rglob("*.db"))
    assert _with_secret(tmp_path) == []
    assert _tables_with_secret(prefect) == []
    (tmp_path / "control").write_text(SECRET)
    assert _with_secret(tmp_path) == [tmp_path / "control"]


def _with_secret(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


def _tables_with_secret(database: str) -> list[str]:
    """Tables of Prefect in which the password stands: it would be seen in the UI."""
    with psycopg.connect(database) as connection:
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
        return [
            name
            for (name,) in tables
            if connection.execute(
                f'SELECT 1 FROM "{name}" AS one WHERE one::text LIKE %s LIMIT 1', (f"%{SECRET}%",)
            ).fetchone()
        ]
