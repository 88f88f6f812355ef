"""Paths that are not regular files, files that never end a line, and files replaced while they are read."""

import contextlib
import errno
import os
import shutil
import signal
import socket
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
from history_tools import RunFiles, dump, events_of, new_sqlite, synced, whole_run

from rlhf_core.errors import JournalDamaged, RunDirError
from rlhf_core.files import reading
from rlhf_core.files.appended import FilePosition, parse_lines, read_blocks, read_lines, read_on, read_tail
from rlhf_core.files.reading import FileLine, UnfitFile, open_regular, read_document
from rlhf_core.files.whole import read_model
from rlhf_core.history import queries
from rlhf_core.history.store import HistoryStore
from rlhf_core.run_dir.checkpoint import checksum
from rlhf_core.run_dir.journal import read_journal, remove_unfinished_line
from rlhf_core.schemas.reports import AttemptOutcome, MetricsLine
from rlhf_core.watchdog import ingest_reader
from rlhf_core.watchdog.evidence import AttemptReader
from rlhf_core.watchdog.ingest import files_digest, rebuild, sync


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Interrupt a wait that takes longer: opening a FIFO waits forever."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"still waiting after {seconds} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening, contextlib.chdir(path.parent):
        listening.bind(path.name)


def make_link(path: Path) -> None:
    target = path.with_name("elsewhere")
    target.write_text('{"secret": 1}\n')
    path.symlink_to(target)


def make_link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


NO_FILES = [make_fifo, make_socket, Path.mkdir, make_link, make_link_to_itself, make_device]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[HistoryStore]:
    with HistoryStore(new_sqlite(tmp_path)) as store:
        yield store


@pytest.mark.parametrize("make", NO_FILES)
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, make: Callable[[Path], object]) -> None:
    path = tmp_path / "metrics.jsonl"
    make(path)
    with within(5):
        with pytest.raises(UnfitFile, match="expected a regular file"):
            open_regular(path)
        assert read_lines(path).lines == []
        assert read_on(path, FilePosition(7)) == ([], FilePosition(7), False)
        assert list(read_blocks(path)) == []
        assert read_model(path, AttemptOutcome) is None
        assert read_tail(path, 100) == ""
        with pytest.raises(UnfitFile):
            checksum(path)
        with pytest.raises(JournalDamaged, match="expected a regular file"):
            read_journal(path)


def test_a_plain_reader_waits_for_a_fifo(tmp_path: Path) -> None:
    """Control: the former behaviour."""
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(TimeoutError), within(0.3):
        (tmp_path / "fifo").open("rb")


def test_fifos_in_every_place_stop_neither_their_run_nor_the_others(tmp_path: Path, store: HistoryStore) -> None:
    runs = tmp_path / "runs"
    hostile, healthy = whole_run(runs), whole_run(runs, tail="bbbbbb")
    attempt = hostile.dir.attempt(2)
    restart = attempt.restart(0)
    places = [
        *(hostile.dir.housekeeping, attempt.outcome, attempt.probe_report, restart.metrics, restart.events("n1")),
        *(restart.telemetry("n1"), restart.agent_status("n1"), restart.incident(0), restart.decision(0)),
        *(hostile.dir.checkpoint(8).complete, hostile.dir.evaluation("after", "greedy"), restart.events("new")),
    ]
    for path in places:
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(path)
    with within(20):
        report = rebuild(runs, store)
        reader = AttemptReader(attempt)
        reader.update()
        assert files_digest(hostile.dir) is not None
        assert hostile.dir.checkpoint(8).damage() == ["COMPLETE is unreadable: found a FIFO, expected a regular file"]
    assert report.failed == {}
    assert {run["state"] for run in queries.list_runs(store)} == {"completed"}
    assert queries.curve(store, healthy.run_id, ["time/step_s"])["time/step_s"]
    set_aside = [event for event in events_of(store, hostile.run_id) if event["kind"] == "set_aside"]
    assert {event["source"] for event in set_aside} >= {"attempts/2/outcome.json", "evaluations/after-greedy.json"}
    assert "it is no AttemptOutcome" in " ".join(event["message"] for event in set_aside)


def test_a_journal_that_is_a_fifo_fails_its_run_alone(tmp_path: Path, store: HistoryStore) -> None:
    runs = tmp_path / "runs"
    hostile, healthy = whole_run(runs), whole_run(runs, tail="bbbbbb")
    sync(hostile.dir, store)
    hostile.dir.control.unlink()
    os.mkfifo(hostile.dir.control)
    with within(20):
        with pytest.raises(JournalDamaged, match="found a FIFO"):
            sync(hostile.dir, store)
        report = rebuild(runs, store)
    assert set(report.runs) == {healthy.run_id} | ({hostile.run_id} - set(report.failed))


def test_a_spec_that_is_a_fifo_or_endless_is_reported_as_damaged(tmp_path: Path) -> None:
    run = RunFiles(tmp_path / "runs")
    run.dir.spec.unlink()
    os.mkfifo(run.dir.spec)
    with within(5), pytest.raises(RunDirError, match="damaged: found a FIFO"):
        run.dir.read_spec()
    run.dir.spec.unlink()
    run.dir.spec.write_text("[" * 1_000_000)
    with pytest.raises(RunDirError, match="damaged"):
        run.dir.read_spec()
    run.dir.spec.write_text('{"schema_version": ' + "9" * 5000 + "}")
    with pytest.raises(RunDirError, match=r"damaged|schema_version"):
        run.dir.read_spec()


# ---------------------------------------------------------------------------------------------------------------------
# Lines without an end


GOOD = b'{"step": %d, "time": "2026-03-01T12:00:00Z", "stage": "grpo", "metrics": {"a": 1.0}}\n'


def test_500_mb_without_a_newline_are_skipped_in_bounded_memory(tmp_path: Path, store: HistoryStore) -> None:
    run = RunFiles(tmp_path / "runs").created()
    run.metrics(1, 0, 1, 10)
    path = run.dir.attempt(1).restart(0).metrics
    os.truncate(path, 500 << 20)
    sync(run.dir, store)  # its imports are no memory of the reader
    os.truncate(path, 501 << 20)
    tracemalloc.start()
    try:
        report = sync(run.dir, store)
        assert report.skipped == [], "it was reported before"
        assert list(read_blocks(path))
        reader = AttemptReader(run.dir.attempt(1))
        (run.dir.attempt(1).restart(0).root / "agents").mkdir(exist_ok=True)
        reader.update()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20
    assert reader.progress.step == 1
    (set_aside,) = [event for event in events_of(store, run.run_id) if event["kind"] == "set_aside"]
    assert f"longer than {reading.MAX_LINE_BYTES} bytes" in set_aside["message"]
    with path.open("ab") as file:
        file.write(b"\n" + GOOD % 2)
    sync(run.dir, store)
    reader.update()
    assert queries.curve(store, run.run_id, ["a"]) == {"a": [(2, 1.0)]}, "the following line is read"
    assert reader.progress.step == 2


def test_a_line_without_an_end_is_skipped_in_bounded_reads(
    tmp_path: Path, store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (reading, ingest_reader):
        monkeypatch.setattr(module, "MAX_SKIP_BYTES", 8 << 20)
    run = RunFiles(tmp_path / "runs").created()
    run.metrics(1, 0, 1, 10)
    os.truncate(run.dir.attempt(1).restart(0).metrics, 25 << 20)
    assert [sync(run.dir, store).num_skipped for _ in range(4)] == [1, 1, 1, 0]


def test_lines_around_one_that_is_too_long_keep_their_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_LINE_BYTES", 100)
    monkeypatch.setattr(reading, "_CHUNK_BYTES", 7)
    path = tmp_path / "lines"
    texts = [b"a" * 3, b"b" * 100, b"c" * 101, b"d", b"e" * 500, b"f" * 99]
    path.write_bytes(b"\n".join(texts) + b"\n" + b"torn")
    begins = [0, 4, 105, 207, 209, 710]
    wanted = [FileLine(begin, text if len(text) <= 100 else None) for begin, text in zip(begins, texts, strict=True)]
    for limit in (1, 2, 50, 99, 100, 101, 150, 400, 1 << 20):
        found, place = [], FilePosition()
        for _ in range(50):
            lines, place, is_other = read_on(path, place, limit)
            assert not is_other
            found += lines
        assert found == wanted, limit
        assert place.offset == 810
    with path.open("ab") as file:
        file.write(b"x" * 200)
    lines, place, _ = read_on(path, place)
    assert lines == [FileLine(810, None)]
    assert read_on(path, place)[0] == []
    with path.open("ab") as file:
        file.write(b"y" * 200 + b"\nnext\n")
    lines, place, _ = read_on(path, place)
    assert [line.text for line in lines] == [None, b"next"], "the rest counts as another line"
    assert list(parse_lines([FileLine(0, None)], MetricsLine)) == []


def test_a_document_without_an_end_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "outcome.json"
    path.touch()
    os.truncate(path, 2 << 30)
    tracemalloc.start()
    try:
        assert read_model(path, AttemptOutcome) is None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 200 << 20
    with pytest.raises(UnfitFile, match="found more than 10 bytes") as caught:
        read_document(path, 10)
    assert caught.value.errno == errno.EFBIG


def test_a_journal_without_an_end_is_damaged_and_is_mended_in_bounded_memory(tmp_path: Path) -> None:
    run = RunFiles(tmp_path / "runs").created()
    size = run.dir.control.stat().st_size
    os.truncate(run.dir.control, 300 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(JournalDamaged, match="line 2 cannot be read: it is longer than"):
            read_journal(run.dir.control)
        remove_unfinished_line(run.dir.control)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20
    assert run.dir.control.stat().st_size == size
    assert len(read_journal(run.dir.control)) == 1


# ---------------------------------------------------------------------------------------------------------------------
# Replaced files


def test_a_journal_that_was_replaced_is_noticed(tmp_path: Path, store: HistoryStore) -> None:
    """This holds even if all its lines can be read, and none begins in the middle of the one before."""
    run = synced(whole_run(tmp_path / "runs"), store)
    content = run.dir.control.read_bytes()
    run.dir.control.unlink()
    run.dir.control.write_bytes(content)
    assert sync(run.dir, store).batches == 0, "a copy was put back"
    run.dir.control.write_bytes(content.replace(b'"token":1', b'"token":2'))
    with pytest.raises(JournalDamaged, match="rlhf db rebuild"):
        sync(run.dir, store)
    assert not rebuild(tmp_path / "runs", store).failed
    assert sync(run.dir, store).batches == 0


def test_a_copy_of_a_run_directory_does_not_hold_the_reader(tmp_path: Path, store: HistoryStore) -> None:
    """Its spec is that of the original run: the rows of neither could be claimed, and the reader would restart
    forever."""
    runs = tmp_path / "runs"
    run = whole_run(runs)
    copy = shutil.copytree(run.dir.root, runs / run.run_id.replace("aaaaaa", "cccccc"))
    shutil.copytree(run.dir.root, runs / f"{run.run_id}.bak")
    sync(run.dir, store)
    with within(20):
        report = rebuild(runs, store)
    assert list(report.runs) == [run.run_id]
    assert "the folder was copied or renamed" in report.failed[copy.name]


@pytest.mark.parametrize("name", [b"events-\xff\xfe.jsonl", b"events-\x1b]52;c;.jsonl", b"events-a\nb.jsonl"])
def test_names_that_are_no_utf_8_are_read(tmp_path: Path, store: HistoryStore, name: bytes) -> None:
    run = synced(whole_run(tmp_path / "runs"), store)
    restart = run.dir.attempt(1).restart(1)
    content = restart.events("n1").read_bytes()
    folder = os.fsencode(restart.root)
    (Path(os.fsdecode(folder)) / os.fsdecode(name)).write_bytes(content)
    Path(os.fsdecode(folder + b"/agents/\xff.json")).write_bytes(restart.agent_status("n1").read_bytes())
    Path(os.fsdecode(folder + b"/telemetry-\xff.jsonl")).write_bytes(restart.telemetry("n1").read_bytes())
    assert files_digest(run.dir) is not None
    before = dump(store)
    sync(run.dir, store)
    after = dump(store)
    assert [len(after[table]) - len(before[table]) > 0 for table in ("events", "node_telemetry")] == [True, True]
    assert sync(run.dir, store).batches == 0
    assert rebuild(tmp_path / "runs", store).failed == {}
