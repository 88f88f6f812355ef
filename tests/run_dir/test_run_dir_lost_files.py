"""Append-only files that are deleted, replaced or truncated while they are written and followed."""

import os
import shutil
from pathlib import Path

import pytest

from rlhf_core.files.appended import FilePosition, LineWriter, parse_lines, read_models, read_on
from rlhf_core.run_dir.attempt import RestartDir
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.reports import AgentEvent, MetricsLine
from rlhf_core.worker.event_log import EventLog


def line(step: int) -> MetricsLine:
    return MetricsLine(step=step, time=utc_now(), loop="sft", metrics={"train/loss": 1.0})


class Pair:
    """A writer, and a follower that has read everything so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.messages: list[str] = []
        self.writer = LineWriter(path, self.messages.append)
        self.place = FilePosition()
        self.seen: list[int] = []
        self.write(1, 2, 3)
        self.follow()

    def write(self, *steps: int) -> None:
        for step in steps:
            self.writer.write(line(step))

    def follow(self) -> bool:
        lines, self.place, is_other = read_on(self.path, self.place)
        self.seen += [one.step for one in parse_lines(lines, MetricsLine)]
        return is_other

    @property
    def written(self) -> list[int]:
        return [one.step for one in read_models(self.path, MetricsLine)]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path / "metrics.jsonl")


def move_away(path: Path) -> None:
    path.rename(path.with_suffix(".old"))


def copy_over(path: Path) -> None:
    shutil.copy(path, path.with_suffix(".copy"))
    path.with_suffix(".copy").replace(path)


def copy_a_part_over(path: Path) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    part.replace(path)


@pytest.mark.parametrize("act", [Path.unlink, move_away, copy_over, copy_a_part_over])
def test_a_file_that_goes_away_is_written_anew_with_all_its_lines(pair: Pair, act: object) -> None:
    act(pair.path)  # type: ignore[operator]
    assert not pair.follow()
    pair.write(4, 5)
    pair.follow()
    pair.write(6)
    pair.follow()
    assert pair.written == [1, 2, 3, 4, 5, 6]
    assert pair.seen == [1, 2, 3, 4, 5, 6], "nothing is lost for a follower, and nothing is duplicated"
    (message,) = pair.messages
    assert message.startswith("metrics.jsonl was ")
    assert "bytes were restored" in message


def test_a_writer_that_does_not_look_loses_what_it_writes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the former behaviour."""
    monkeypatch.setattr(LineWriter, "_mend", lambda writer: "")
    pair.path.unlink()
    pair.write(4, 5)
    assert not pair.path.exists()


@pytest.mark.parametrize("further", [1, 9])
def test_a_truncated_file_goes_on_and_its_reader_begins_again(pair: Pair, further: int) -> None:
    """This holds even if the file has grown beyond the read part before the next read."""
    os.truncate(pair.path, 0)
    assert not pair.follow(), "empty: another machine may see it this way for a while"
    pair.write(*range(4, 4 + further))
    assert pair.follow()
    pair.write(20)
    assert not pair.follow()
    assert pair.seen == [1, 2, 3, *range(4, 4 + further), 20]
    (message,) = pair.messages
    assert "was truncated during writing" in message


def test_a_line_that_was_truncated_does_not_swallow_the_next(pair: Pair) -> None:
    os.truncate(pair.path, pair.path.stat().st_size - 30)
    pair.write(4, 5)
    assert pair.written == [1, 2, 4, 5]


def test_a_reader_with_an_offset_alone_loses_lines(pair: Pair) -> None:
    """Control: the former behaviour. The file has grown beyond the offset, and the part before it is never read."""
    os.truncate(pair.path, 0)
    pair.write(*range(4, 13))
    lines, _, is_other = read_on(pair.path, FilePosition(pair.place.offset))
    assert not is_other
    assert len(lines) < 9


def test_lines_that_the_file_system_did_not_keep_are_reported_as_lost(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is deleted on another machine, whose file system does not know that it is open here."""
    pair.path.unlink()
    own = pair.writer._file

    class Stale:
        def fileno(self) -> int:
            return own.fileno()

        def seek(self, offset: int) -> int:
            raise OSError(116, "Stale file handle")

        def close(self) -> None:
            own.close()

    monkeypatch.setattr(pair.writer, "_file", Stale())
    pair.write(4, 5)
    assert pair.written == [4, 5]
    assert pair.messages == [
        "metrics.jsonl was deleted during writing: its earlier lines are lost, later ones are kept"
    ]
    pair.write(6, 7, 8)
    assert pair.follow()
    assert pair.seen == [1, 2, 3, 4, 5, 6, 7, 8]


def test_an_older_version_of_a_file_is_waited_out(pair: Pair, tmp_path: Path) -> None:
    """A network file system may show such a version to another machine: restarting would read all lines twice."""
    whole = pair.path.read_bytes()
    for size in (0, 30, 100, len(whole) - 1):
        older = tmp_path / "older"
        older.write_bytes(whole[:size])
        assert read_on(older, pair.place) == ([], pair.place, False)


def test_a_folder_that_is_gone_is_not_made_again(pair: Pair) -> None:
    shutil.rmtree(pair.path.parent)
    pair.write(4)
    assert not pair.path.parent.exists()
    assert pair.messages == []


def test_events_tell_that_their_own_file_was_deleted(tmp_path: Path) -> None:
    place = RestartDir(tmp_path, 1, 0)
    events = EventLog("n1", place)
    events.add("agent_started", "agent started")
    place.events("n1").unlink()
    events.add("role_started", "role trainer starts")
    events.close()
    recorded = read_models(place.events("n1"), AgentEvent)
    assert [event.kind for event in recorded] == ["agent_started", "role_started", "file"]
    assert "events-n1.jsonl was deleted during writing" in recorded[-1].message
