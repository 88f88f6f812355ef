"""Temporary outage of the daemon's database: no errors, no adoptions in the meantime, and no losses."""

from collections.abc import Callable
from pathlib import Path

import pytest
from control_fakes import FakeAgent, FakeScheduler, make_run
from history_tools import postgres, run_sql
from sqlalchemy import text
from sqlalchemy.engine import make_url

from rlhf_core.config.site import load_site
from rlhf_core.control.ingester import Ingester
from rlhf_core.control.reconcile.actions import Reconciler
from rlhf_core.errors import HistoryError
from rlhf_core.history.store import HistoryStore


@pytest.fixture
def database() -> tuple[str, Callable[[bool], None]]:
    """A database, and functions to close it to all clients and open it again."""
    server = postgres()
    url = server.migrated_database()
    name = make_url(url).database

    def allow(open_: bool) -> None:
        engine = server._admin()
        with engine.connect() as connection:
            connection.execute(text(f"ALTER DATABASE {name} WITH ALLOW_CONNECTIONS {str(open_).lower()}"))
            if not open_:
                connection.execute(
                    text(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname='{name}'")
                )
        engine.dispose()

    return url, allow


def test_the_daemon_survives_a_lost_database(
    database: tuple[str, Callable[[bool], None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, allow = database
    monkeypatch.setattr("rlhf_core.control.reconcile.actions.get_scheduler", lambda name: FakeScheduler())
    site = load_site({"RLHF_HOME": str(tmp_path / "site"), "RLHF_DATABASE_URL": url})
    run_dir = make_run(site.runs_dir)
    messages: list[str] = []
    with HistoryStore(url) as store:
        ingester, reconciler = Ingester(site, store, messages.append), Reconciler(site, store, flow_runs=None)
        assert ingester.ingest() == 1
        assert reconciler.poll() == []
        allow(False)
        try:
            FakeAgent(run_dir).step(1)
            assert [ingester.ingest(), ingester.ingest()] == [0, 0]
            with pytest.raises(HistoryError):
                reconciler.poll()
        finally:
            allow(True)
        assert len(messages) == 1, "once, not at every turn"
        assert ingester.ingest() == 1
        assert run_sql(store, "SELECT max(step) FROM metrics").rows == [[1]]
        assert reconciler.poll() == []
        store.clear()
