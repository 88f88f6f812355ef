"""Benchmarks that are given the URL of a database."""

import sys
from pathlib import Path

import pytest
from history_tools import RunFiles, new_sqlite

from rlhf_core.history.store import HistoryStore
from rlhf_core.watchdog.ingest import sync


def test_a_history_with_runs_is_not_emptied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[1] / "benchmarks"), *sys.path])
    import bench_daemon
    import bench_ingest

    url = new_sqlite(tmp_path)
    with HistoryStore(url) as store:
        sync(RunFiles(tmp_path / "runs").created().dir, store)
        for benchmark in (bench_ingest, bench_daemon):
            monkeypatch.setattr(sys, "argv", ["benchmark", url])
            with pytest.raises(SystemExit, match="found runs"):
                benchmark.main()
        assert store.run_ids()
