"""A site with history and Prefect in PostgreSQL and a limit of one run, without a password in any record."""

from pathlib import Path

import psycopg
import pytest
from history_tools import postgres
from process_tools import until
from secret_places import environments, files_with, tables_with
from site_files import QUICK
from sites import Site, go

from rlhf_core.launch.journal import read_record

pytestmark = [pytest.mark.site, pytest.mark.end_to_end]

SECRET = "s3cret-of-the-database"


def test_a_site_on_postgresql(tmp_path: Path) -> None:
    server = postgres()
    history, prefect = server.empty_database(), server.empty_database()
    site = Site(tmp_path / "home", makes_database=True, pretended=True, max_runs=1, settings=QUICK)
    site.database_url = history.replace("postgresql://rlhf@", f"postgresql+psycopg://rlhf:{SECRET}@")
    site.variables = {
        "RLHF_PREFECT_DATABASE_URL": prefect.replace("postgresql://rlhf@", f"postgresql+asyncpg://rlhf:{SECRET}@")
    }
    with site.running():
        waits = site.submit("quickstart", "promote.when=approved")
        lines = site.commands()
        around = environments(waits)
        go(waits)
        until(lambda: read_record(waits).promotion is not None and site.flow_runs(waits) == [("Paused", False)])
        # The limit is one run, and the run that waits for approval does not count.
        other = site.submit("quickstart")
        assert site.flow_runs(waits) == [("Paused", False)]
        go(other)
        until(lambda: site.flow_runs(other) == [("Completed", False)])
        site.rlhf("refuse", waits.run_id, "--reason", "only a test")
        until(lambda: site.flow_runs(waits) == [("Completed", False)])
        site.rlhf("down")
        assert site.processes() == []
    both = sorted((one.run_id, "completed") for one in (waits, other))
    with psycopg.connect(history) as connection:
        assert connection.execute("SELECT run_id, state FROM runs ORDER BY run_id").fetchall() == both
    with psycopg.connect(prefect) as connection:
        assert connection.execute("SELECT count(*) FROM flow_run WHERE state_name = 'Completed'").fetchone() >= (2,)
    assert any("prefect.engine" in line for line in lines), "the controller was among those that were looked at"
    assert not [line for line in lines if SECRET in line]
    assert around, "its job was among those that were looked at"
    assert not [text for text in around if SECRET in text]
    assert not list(site.home.rglob("*.db"))
    assert files_with(SECRET, tmp_path) == []
    assert tables_with(SECRET, prefect) == []
    (tmp_path / "control").write_text(SECRET)
    assert files_with(SECRET, tmp_path) == [tmp_path / "control"]
