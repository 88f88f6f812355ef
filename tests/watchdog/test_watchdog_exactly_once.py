"""Exactly-once ingestion: killed between any two statements, raced by another ingester, rebuilt from scratch."""

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from history_tools import RunFiles, dump, new_sqlite, remove_run, synced, whole_run
from kill_points import Killed
from sqlalchemy import event

from rlhf_core.errors import IllegalMove
from rlhf_core.history.batch import IngestBatch
from rlhf_core.history.store import HistoryStore
from rlhf_core.history.writers import write_batch
from rlhf_core.history.writers.runs import insert_run, write_offsets
from rlhf_core.schemas.attempts import RunState
from rlhf_core.watchdog import ingest_reader
from rlhf_core.watchdog.ingest import rebuild, sync
from rlhf_core.watchdog.ingest_reader import IngestReader


@contextmanager
def failpoints(store: HistoryStore, reached: Callable[[], None]) -> Iterator[None]:
    """Call ``reached`` before every statement of the store that writes, and before every commit."""

    def before_statement(*_arguments: object) -> None:
        reached()

    engine = store._writing
    event.listen(engine, "before_cursor_execute", before_statement)
    event.listen(engine, "commit", before_statement)
    try:
        yield
    finally:
        event.remove(engine, "before_cursor_execute", before_statement)
        event.remove(engine, "commit", before_statement)


class Countdown:
    """Failpoint that kills at the nth call."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Killed


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small batches, so that one run takes several transactions."""
    monkeypatch.setattr(ingest_reader, "BLOCK_BYTES", 700)
    monkeypatch.setattr(ingest_reader, "BATCH_BYTES", 2500)


@pytest.mark.usefixtures("small_batches")
def test_killed_at_any_point_the_rows_are_the_same(
    store: HistoryStore, known: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each ingester is killed later than the one before, and leaves whole batches, which the next one continues."""
    store.clear()  # metric names are kept, so that all ingesters below execute the same statements
    batches = [dump(store)]
    apply = HistoryStore.apply

    def apply_and_note(self: HistoryStore, run_id: str, batch: IngestBatch) -> bool:
        assert apply(self, run_id, batch)
        batches.append(dump(store))
        return True

    with monkeypatch.context() as patch:
        patch.setattr(HistoryStore, "apply", apply_and_note)
        assert sync(known.dir, store).batches > 5
    store.clear()
    every = 1 if store.url.get_backend_name() == "sqlite" else 7
    whole, nth, kills = 0, 1, 0
    while True:
        with failpoints(store, Countdown(nth)), suppress(Killed):
            sync(known.dir, store)
            break
        kills += 1
        found = dump(store)
        assert found in batches[whole : whole + 2], f"killed at statement {nth} after {whole} batches"
        if found == batches[whole]:
            nth += every
        else:  # that ingester finished a batch, and was killed in the next one
            whole, nth = whole + 1, 1
    assert kills * every > 100
    assert whole == len(batches) - 2, "the last one finished the last batch"
    assert dump(store) == batches[-1]


def test_killed_right_after_the_commit(store: HistoryStore, whole: RunFiles, monkeypatch: pytest.MonkeyPatch) -> None:

    def apply_and_die(self: HistoryStore, run_id: str, batch: IngestBatch) -> bool:
        assert original(self, run_id, batch)
        raise Killed

    original = HistoryStore.apply
    with monkeypatch.context() as patch:
        patch.setattr(HistoryStore, "apply", apply_and_die)
        with pytest.raises(Killed):
            sync(whole.dir, store)
    expected = dump(store)
    assert sync(whole.dir, store).batches == 0
    assert dump(store) == expected


class OffsetsFirst(HistoryStore):
    """Negative control: offsets in a separate transaction, before the rows."""

    between: Callable[[], None] = staticmethod(lambda: None)

    def apply(self, run_id: str, batch: IngestBatch) -> bool:
        with self.writing() as connection:
            if not self._take_turn(connection, run_id, batch):
                return False
            write_offsets(connection, run_id, batch)
        self.between()
        with self.writing() as connection:
            write_batch(connection, run_id, batch)
        return True


class OffsetsLast(OffsetsFirst):
    """Negative control: offsets in a separate transaction, after the rows."""

    def apply(self, run_id: str, batch: IngestBatch) -> bool:
        without_offsets = IngestBatch(**{**vars(batch), "offsets": {}, "forgotten": set()})
        if not super(OffsetsFirst, self).apply(run_id, without_offsets):
            return False
        self.between()
        with self.writing() as connection:
            write_offsets(connection, run_id, batch)
        return True


def test_offsets_before_rows_lose_rows(database_url: str, whole: RunFiles) -> None:
    with OffsetsFirst(database_url) as store:
        sync(whole.dir, store)
        expected = dump(store)
        store.clear()
        store.between = Countdown(1)
        with pytest.raises(Killed):
            sync(whole.dir, store)
        store.between = lambda: None
        sync(whole.dir, store)
        assert dump(store) != expected
        assert not dump(store)["metrics"]


def test_offsets_after_rows_apply_the_journal_twice(database_url: str, whole: RunFiles) -> None:
    with OffsetsLast(database_url) as store:
        store.between = Countdown(1)
        with pytest.raises(Killed):
            sync(whole.dir, store)
        store.between = lambda: None
        with pytest.raises(IllegalMove, match="is completed and cannot become preflight"):
            sync(whole.dir, store)


# ---------------------------------------------------------------------------------------------------------------------
# A real kill

_SYNC_AND_DIE = """
import os, signal, sys
from pathlib import Path
from sqlalchemy import event
from rlhf_core.history.store import HistoryStore
from rlhf_core.run_dir.run import RunDir
from rlhf_core.watchdog.ingest import sync

store = HistoryStore(sys.argv[1])
left = int(sys.argv[3])

def count(*_arguments):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

event.listen(store._writing, "before_cursor_execute", count)
event.listen(store._writing, "commit", count)
sync(RunDir(Path(sys.argv[2])), store)
"""


def test_kill_minus_nine(database_url: str, whole: RunFiles, tmp_path: Path) -> None:
    """Near the end of the only transaction."""
    with HistoryStore(new_sqlite(tmp_path / "..")) as clean:
        sync(whole.dir, clean)
        expected = dump(clean)
    command = [sys.executable, "-c", _SYNC_AND_DIE, database_url, str(whole.dir.root), "45"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    assert subprocess.run(command, env=environment).returncode == -signal.SIGKILL
    with HistoryStore(database_url) as store:
        assert not dump(store)["runs"], "nothing of the batch is there"
        sync(whole.dir, store)
        assert dump(store) == expected


# ---------------------------------------------------------------------------------------------------------------------
# Two ingesters


def test_a_batch_counts_once(store: HistoryStore, whole: RunFiles) -> None:
    batch = IngestReader(whole.dir, store.ingest_state(whole.run_id)).read()
    assert store.apply(whole.run_id, batch)
    expected = dump(store)
    assert not store.apply(whole.run_id, batch)
    assert dump(store) == expected


def test_the_slower_of_two_ingesters_starts_over(store: HistoryStore, run: RunFiles) -> None:
    sync(run.dir, store)
    run.moved(RunState.PREFLIGHT, 1)
    slow = IngestReader(run.dir, store.ingest_state(run.run_id)).read()
    run.moved(RunState.QUEUED, 2)
    sync(run.dir, store)
    expected = dump(store)
    assert not store.apply(run.run_id, slow)
    assert dump(store) == expected


def test_without_the_stamp_the_slower_ingester_would_break_the_run(
    store: HistoryStore, run: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: a store that does not check whether the history has advanced."""
    monkeypatch.setattr(HistoryStore, "_take_turn", lambda *_arguments: True)
    with store.writing() as connection:
        insert_run(connection, str(run.dir.root), run.dir.read_spec(), 1)
    run.moved(RunState.PREFLIGHT, 1)
    slow = IngestReader(run.dir, store.ingest_state(run.run_id)).read()
    run.moved(RunState.QUEUED, 2)
    fast = IngestReader(run.dir, store.ingest_state(run.run_id)).read()
    store.apply(run.run_id, fast)
    with pytest.raises(IllegalMove):
        store.apply(run.run_id, slow)


@pytest.mark.usefixtures("small_batches")
def test_many_ingesters_at_once(database_url: str, whole: RunFiles) -> None:
    barrier = threading.Barrier(4)

    def ingest_it() -> None:
        with HistoryStore(database_url) as store:
            barrier.wait()
            sync(whole.dir, store)

    with ThreadPoolExecutor(4) as threads:
        for one in [threads.submit(ingest_it) for _ in range(4)]:
            one.result()
    with HistoryStore(database_url) as store:
        together = dump(store)
        store.clear()
        sync(whole.dir, store)
        assert together == dump(store)


# ---------------------------------------------------------------------------------------------------------------------
# Rebuilt


def test_rebuild_gives_the_same_rows(store: HistoryStore, runs: Path) -> None:
    whole_run(runs)
    whole_run(runs, name="other", tail="bbbbbb", created=100)
    first = rebuild(runs, store)
    assert (len(first.runs), first.failed, first.kept) == (2, {}, ())
    expected = dump(store)
    second = rebuild(runs, store)
    assert sorted(second.runs) == sorted(first.runs)
    assert dump(store) == expected
    store.clear()
    rebuild(runs, store)
    assert dump(store) == expected


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.usefixtures("small_batches")
def test_incremental_history_equals_rebuilt_history(store: HistoryStore, runs: Path, seed: int) -> None:
    """Files grow by random pieces, checkpoints appear and disappear, and the ingester runs and is killed at random."""
    chance = random.Random(seed)
    source = whole_run(runs.parent / "source")
    run_dir = type(source.dir)(runs / source.run_id)
    shutil.copytree(source.dir.root, run_dir.root, ignore=shutil.ignore_patterns("*.jsonl"))
    appended = sorted(path.relative_to(source.dir.root) for path in source.dir.root.rglob("*.jsonl"))
    written = dict.fromkeys(appended, 0)
    while any(written[path] < (source.dir.root / path).stat().st_size for path in appended):
        path = chance.choice(appended)
        piece = (source.dir.root / path).read_bytes()[written[path] :][: chance.randrange(1, 900)]
        written[path] += len(piece)
        with (run_dir.root / path).open("ab") as file:
            file.write(piece)
        if chance.random() < 0.1:
            shutil.rmtree(run_dir.checkpoint(2).root, ignore_errors=True)
        if chance.random() < 0.5:
            with failpoints(store, Countdown(chance.randrange(1, 200))), suppress(Killed):
                sync(run_dir, store)
    sync(run_dir, store)
    expected = dump(store)
    rebuild(runs, store)
    assert dump(store) == expected
    assert [row for row in expected["runs"] if ("state", "'completed'") in row]


def test_rebuild_keeps_data_missing_from_the_files(store: HistoryStore, runs: Path, known: RunFiles) -> None:
    shutil.rmtree(known.dir.checkpoint(2).root)
    sync(known.dir, store)
    token = store.acquire_lease(known.run_id, "me", 60)
    archived = synced(whole_run(runs, name="archived", tail="cccccc", created=200), store)
    shutil.rmtree(archived.dir.root)
    expected = dump(store)
    assert rebuild(runs, store).kept == (archived.run_id,)
    assert dump(store) == expected
    store.renew_lease(known.run_id, "me", token, 60)


def test_rebuild_names_the_run_that_cannot_be_rebuilt(store: HistoryStore, runs: Path) -> None:
    good = whole_run(runs)
    newer = synced(whole_run(runs, name="newer", tail="dddddd", created=300), store)
    spec = newer.dir.spec
    spec.write_text(spec.read_text().replace('"schema_version": 2', '"schema_version": 99'))
    broken = RunFiles(runs, name="broken", tail="eeeeee", created=400).created()
    broken.moved(RunState.COMPLETED, 1)
    report = rebuild(runs, store)
    assert list(report.runs) == [good.run_id]
    assert "schema_version 99" in report.failed[newer.run_id]
    assert "cannot become completed" in report.failed[broken.run_id]
    assert newer.run_id in store.run_ids(), "data that cannot be read again is kept"


def test_clearing_keeps_leases(store: HistoryStore, known: RunFiles) -> None:
    token = store.acquire_lease(known.run_id, "me", 60)
    store.clear()
    assert not any(dump(store).values())
    store.renew_lease(known.run_id, "me", token, 60)


def test_removing_a_run_removes_all_its_rows(store: HistoryStore, runs: Path, whole: RunFiles) -> None:
    synced(whole_run(runs, name="other", tail="bbbbbb", created=100), store)
    expected = dump(store)
    sync(whole.dir, store)
    remove_run(store, whole.run_id)
    assert dump(store) == expected
