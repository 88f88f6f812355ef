"""Kept configs: concurrent copies of the same config, and the replacement of a damaged one."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from rlhf_core.control import snapshots
from rlhf_core.files.whole import write_text

NUM_USERS = 6


def keep(home: Path) -> snapshots.Kept:
    return snapshots.keep("quickstart", (), "nightly", home, home)


def whole(kept: snapshots.Kept) -> bool:
    return kept.config.is_file() and kept.config.with_name(snapshots.ORIGIN).is_file() and kept.code.is_dir()


def test_the_same_config_is_kept_concurrently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(NUM_USERS)

    def write(path: Path, text: str) -> None:
        together.wait(timeout=60)  # all have copied the code, and no copy has its final name yet
        write_text(path, text)

    monkeypatch.setattr(snapshots, "write_text", write)
    with ThreadPoolExecutor(NUM_USERS) as users:
        found = [made.result() for made in [users.submit(keep, tmp_path) for _ in range(NUM_USERS)]]
    assert len({kept.config for kept in found}) == 1
    assert whole(found[0])
    assert list((tmp_path / "deployments" / "nightly").iterdir()) == [found[0].config.parent]


def test_a_copy_without_its_config_is_replaced(tmp_path: Path) -> None:
    kept = keep(tmp_path)
    kept.config.unlink()
    assert keep(tmp_path) == kept
    assert whole(kept)


def test_leftovers_of_a_killed_deployment_are_removed_later(tmp_path: Path) -> None:
    unfinished = keep(tmp_path).config.parent.rename(tmp_path / "deployments" / "nightly" / ".new-12-0123abcd")
    (left,) = snapshots.copies(tmp_path)
    later = datetime.now(UTC) + timedelta(days=2)
    assert snapshots.removable([left], [], days=1, now=later) == [left]
    assert snapshots.remove(left)
    assert not unfinished.exists()
    assert snapshots.copies(tmp_path) == []
