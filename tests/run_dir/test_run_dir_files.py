"""Reading and writing the files of a run: torn lines, whole files, ends of logs, the newest checkpoint."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from made_reports import checkpoint_manifest

from rlhf_core.files import whole
from rlhf_core.files.appended import LineWriter, read_blocks, read_lines, read_models, read_tail
from rlhf_core.files.whole import RESERVE_BYTES, Reserve, create_once, write_for_user, write_model
from rlhf_core.run_dir.run import RunDir, new_run_id, run_dirs
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.reports import MetricsLine


def line(step: int) -> MetricsLine:
    return MetricsLine(step=step, time=utc_now(), loop="sft", metrics={"train/loss": 1.0})


def steps(path: Path) -> list[int]:
    return [one.step for one in read_models(path, MetricsLine)]


def test_a_torn_line_waits_for_its_end_and_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = LineWriter(path)
    writer.write(line(1))
    writer.close()
    with path.open("a") as file:
        file.write('{"step": 2, "ti')  # killed here
    assert steps(path) == [1]
    writer = LineWriter(path)
    writer.write(line(3))
    writer.close()
    assert steps(path) == [1, 3]


def test_a_line_that_a_full_disk_refuses_names_its_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: .*metrics\.jsonl"):
        LineWriter(path).write(line(1))


def test_blocks_go_on_from_an_offset_and_come_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"".join(b"%03d\n" % number for number in range(100)))
    whole = [one.text for lines, _ in read_blocks(path) for one in lines]
    assert whole == [b"%03d" % number for number in range(100)]
    monkeypatch.setattr(read_lines, "__defaults__", (0, 10))
    blocks = list(read_blocks(path, 40))
    assert len(blocks) > 10
    assert [one.text for lines, _ in blocks for one in lines] == whole[10:]
    assert blocks[-1][1] == 400
    assert list(read_blocks(path, 400)) == []
    assert list(read_blocks(tmp_path / "missing")) == []


def test_the_end_of_a_log_begins_at_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("".join(f"line {number}\n" for number in range(1000)))
    found = read_tail(path, 100)
    assert found.endswith("line 999\n")
    assert found.startswith("line ")
    path.write_text("".join(f"line {number}\n" for number in range(100)))
    assert read_tail(path, 30).splitlines() == ["line 97", "line 98", "line 99"]
    assert read_tail(path, 10_000).startswith("line 0\n")
    assert read_tail(tmp_path / "missing.log", 100) == ""


def test_one_line_that_is_longer_than_the_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "progress.log"
    path.write_text("x" * 100)
    assert read_tail(path, 10) == "x" * 10


@pytest.mark.parametrize("error", [None, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_is_created_once_with_and_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int | None
) -> None:
    if error is not None:
        monkeypatch.setattr(Path, "hardlink_to", _refused(error))
    path = tmp_path / "secret"
    assert create_once(path, "first", 0o600)
    assert not create_once(path, "second", 0o600)
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("first", 0o600)
    assert list(tmp_path.iterdir()) == [path]


def test_without_hard_links_a_file_without_content_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its creator has taken the name and not yet given it its content, or was killed before it did."""
    monkeypatch.setattr(Path, "hardlink_to", _refused(errno.EPERM))
    path = tmp_path / "secret"
    path.touch()
    monkeypatch.setattr(whole.time, "sleep", lambda _: path.write_text("first"))
    assert not create_once(path, "second")
    assert path.read_text() == "first"
    path.write_text("")
    monkeypatch.setattr(whole, "PLACED_S", 0.0)
    monkeypatch.setattr(whole.time, "sleep", lambda _: None)
    assert create_once(path, "second")
    assert path.read_text() == "second"


def test_other_errors_of_a_link_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "hardlink_to", _refused(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        create_once(tmp_path / "secret", "first")
    assert list(tmp_path.iterdir()) == []


def _refused(number: int) -> Callable[[Path, Path], None]:
    def hardlink_to(path: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number), str(path), None, str(target))

    return hardlink_to


def test_a_reserve_holds_real_blocks_until_it_is_freed(tmp_path: Path) -> None:
    reserve = Reserve(tmp_path / "reserve")
    reserve.hold()
    assert reserve.path.stat().st_blocks * 512 >= RESERVE_BYTES
    reserve.free()
    assert not reserve.path.exists()
    reserve.free()


def test_the_newest_checkpoint_is_the_complete_one_of_the_highest_step(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.newest_checkpoint() is None
    for step in (999_999, 20, 1_000_000):
        write_model(run.checkpoint(step).complete, checkpoint_manifest(step))
    run.checkpoint(2_000_000).root.mkdir()  # without COMPLETE it does not count
    newest = run.newest_checkpoint()
    assert newest is not None
    assert newest.step == 1_000_000


def test_a_file_for_the_user_is_whole_or_absent(tmp_path: Path) -> None:
    target = tmp_path / "new" / "a.toml"
    with pytest.raises(UnicodeEncodeError):
        write_for_user(target, "a" * 100_000 + "\ud800")
    assert not target.exists()
    write_for_user(target, "whole\n")
    with pytest.raises(FileExistsError):
        write_for_user(target, "another\n")
    assert target.read_text() == "whole\n"


def test_a_run_directory_closed_by_its_owner_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [RunDir(tmp_path / new_run_id(name)) for name in ("a", "b", "c")]
    for one in runs:
        write_model(one.spec, line(1))
    found = Path.stat

    def stat(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if path == runs[1].spec:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return found(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", stat)
    assert run_dirs(tmp_path) == [runs[0], runs[2]]
    assert [RunDir.find(tmp_path, one.run_id) for one in runs] == [runs[0], None, runs[2]]
