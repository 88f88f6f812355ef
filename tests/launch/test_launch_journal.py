"""The journal: lines are read back after kills, on full disks, and with two concurrent controllers."""

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from control_fakes import make_run

from rlhf_core.errors import IllegalMove, JournalDamaged, LeaseLost, RunDirError
from rlhf_core.files.appended import LineWriter, append_lines, read_models
from rlhf_core.launch.journal import Journal, fold, read_record
from rlhf_core.run_dir.journal import scan_journal
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import AttemptState, RunState, StageName, StageState
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.journal import JOURNAL_VERSION, AttemptPlanned, ControlEvent, JournalLine, RunMoved
from rlhf_core.schemas.resources import Placement


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "runs")


def lines(run_dir: RunDir) -> list[JournalLine]:
    return read_models(run_dir.control, JournalLine)


def late(run_dir: RunDir, token: int, event: ControlEvent) -> None:
    """Write a line of a controller that had lost the run and had not noticed."""
    append_lines(run_dir.control, JournalLine(sequence=9, token=token, time=utc_now(), event=event))


def placement(number: int) -> Placement:
    return Placement(attempt=number, num_nodes=1, phases=())


def test_a_second_journal_continues_the_numbering(run_dir: RunDir) -> None:
    first = Journal(run_dir, token=1)
    first.move_run(RunState.PREFLIGHT, "started")
    first.close()
    second = Journal(run_dir, token=2)
    second.move_run(RunState.QUEUED, "attempt 1")
    second.close()
    assert [line.sequence for line in lines(run_dir)] == [0, 1, 2]
    assert [line.token for line in lines(run_dir)] == [0, 1, 2]
    assert read_record(run_dir).state is RunState.QUEUED


def test_a_line_torn_by_a_kill_is_left_out_and_removed_by_the_next_controller(run_dir: RunDir) -> None:
    with run_dir.control.open("ab") as file:
        file.write(b'{"sequence":1,"token":1,"time":"2026-')
    assert read_record(run_dir).next_sequence == 1
    journal = Journal(run_dir, token=1)
    journal.move_run(RunState.PREFLIGHT, "started")
    assert [line.sequence for line in lines(run_dir)] == [0, 1]
    assert run_dir.control.read_bytes().count(b"\n") == 2
    assert read_record(run_dir).state is RunState.PREFLIGHT


def test_illegal_transitions_are_refused_and_not_written(run_dir: RunDir) -> None:
    journal = Journal(run_dir, token=1)
    with pytest.raises(IllegalMove, match="pending and cannot become training"):
        journal.move_run(RunState.TRAINING, "too early")
    journal.append(AttemptPlanned(placement=placement(1)))
    with pytest.raises(IllegalMove, match="planned and cannot become running"):
        journal.move_attempt(1, AttemptState.RUNNING, "too early")
    assert len(lines(run_dir)) == 2


def test_a_transition_to_the_current_state_writes_nothing(run_dir: RunDir) -> None:
    journal = Journal(run_dir, token=1)
    journal.move_run(RunState.PREFLIGHT, "started")
    journal.move_run(RunState.PREFLIGHT, "again")
    assert len(lines(run_dir)) == 2


def test_an_open_stage_is_continued(run_dir: RunDir) -> None:
    journal = Journal(run_dir, token=1)
    index = journal.begin_stage(StageName.TRAIN, 1)
    again = Journal(run_dir, token=2)
    assert again.begin_stage(StageName.TRAIN, 1) == index
    assert len(again.record.stages) == 1


def test_a_stage_left_open_by_a_kill_is_closed_when_another_starts(run_dir: RunDir) -> None:
    journal = Journal(run_dir, token=1)
    journal.begin_stage(StageName.TRAIN, 1)
    journal.begin_stage(StageName.ALLOCATE, 2)
    assert [stage.state for stage in journal.record.stages] == [StageState.FAILED, StageState.RUNNING]
    assert [stage.index for stage in journal.record.stages] == [0, 1]


def test_a_controller_with_an_older_lease_may_not_open_the_journal(run_dir: RunDir) -> None:
    Journal(run_dir, token=5).move_run(RunState.PREFLIGHT, "started")
    with pytest.raises(LeaseLost, match="under lease 5"):
        Journal(run_dir, token=4)


def test_a_controller_finds_out_that_another_one_writes_under_a_newer_lease(run_dir: RunDir) -> None:
    """Its own database does not show that lease if the other one uses a restored copy. Before, both drove the run."""
    old = Journal(run_dir, token=1)
    old.move_run(RunState.PREFLIGHT, "started")
    new = Journal(run_dir, token=2)
    old.move_run(RunState.QUEUED, "the new one has written nothing yet")
    new.append(RunMoved(state=RunState.QUEUED, cause="attempt 1"))
    before = run_dir.control.read_bytes()
    for _ in range(2):
        with pytest.raises(LeaseLost, match="under lease 2"):
            old.move_run(RunState.TRAINING, "the old one did not know")
    assert run_dir.control.read_bytes() == before
    new.move_run(RunState.TRAINING, "the new one continues")


def test_lines_of_an_older_lease_do_not_stop_a_controller(run_dir: RunDir) -> None:
    new = Journal(run_dir, token=2)
    new.move_run(RunState.PREFLIGHT, "started")
    late(run_dir, token=1, event=RunMoved(state=RunState.FAILED, cause="the old one did not know"))
    new.move_run(RunState.QUEUED, "attempt 1")
    assert read_record(run_dir).state is RunState.QUEUED


def test_a_controller_continues_after_damage_to_its_journal(run_dir: RunDir) -> None:
    journal = Journal(run_dir, token=1)
    with run_dir.control.open("ab") as file:
        file.write(b"{}\n")
    journal.move_run(RunState.PREFLIGHT, "started")
    assert journal.record.state is RunState.PREFLIGHT


def test_lines_of_a_controller_that_lost_its_lease_do_not_count(run_dir: RunDir) -> None:
    """One that was written at the same moment as the first line of the new lease, for instance."""
    new = Journal(run_dir, token=2)
    new.move_run(RunState.PREFLIGHT, "started")
    new.move_run(RunState.QUEUED, "attempt 1")
    late(run_dir, token=1, event=RunMoved(state=RunState.FAILED, cause="the old one did not know"))
    assert read_record(run_dir).state is RunState.QUEUED


def test_without_fencing_the_stale_line_would_count(run_dir: RunDir) -> None:
    """Negative control: the same lines with equal tokens."""
    journal = Journal(run_dir, token=1)
    journal.move_run(RunState.PREFLIGHT, "started")
    journal.move_run(RunState.QUEUED, "attempt 1")
    journal.append(RunMoved(state=RunState.FAILED, cause="the old one did not know"))
    assert read_record(run_dir).state is RunState.FAILED


def test_a_resume_by_the_user_renews_the_budget(run_dir: RunDir) -> None:
    journal = Journal(run_dir, token=1)
    journal.move_run(RunState.PREFLIGHT, "started")
    journal.append(AttemptPlanned(placement=placement(1)))
    assert journal.record.first_attempt == 1
    journal.move_run(RunState.FAILED, "broken")
    journal.move_run(RunState.PREFLIGHT, "resumed")
    assert journal.record.first_attempt == 2
    assert fold(lines(run_dir)).first_attempt == 2


class FullDisk:
    """A line writer on a disk that is full until the reserve is released."""

    def __init__(self, path: Path) -> None:
        self._inner = LineWriter(path)
        self._path = path
        self._reserve = path.with_name("control.reserve")

    def write(self, line: JournalLine) -> None:
        if self._reserve.exists():
            with self._path.open("ab") as file:
                file.write(b'{"version":1,"seque')  # as much as fits
            raise OSError(errno.ENOSPC, "No space left on device")
        self._inner.write(line)

    @property
    def end(self) -> int:
        return self._inner.end

    def sync(self) -> None:
        self._inner.sync()

    def close(self) -> None:
        self._inner.close()


def test_the_end_can_be_written_on_a_full_disk(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_core.launch.journal.LineWriter", FullDisk)
    journal = Journal(run_dir, token=1)
    assert run_dir.control_reserve.stat().st_size > 0
    journal.move_run(RunState.PREFLIGHT, "started")
    journal.move_run(RunState.FAILED, "the disk is full")
    assert read_record(run_dir).state is RunState.FAILED


def test_without_a_reserve_the_full_disk_is_an_error_with_advice(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the reserve."""

    class AlwaysFull(FullDisk):
        def write(self, line: JournalLine) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rlhf_core.launch.journal.LineWriter", AlwaysFull)
    journal = Journal(run_dir, token=1)
    with pytest.raises(RunDirError, match="Make room"):
        journal.move_run(RunState.PREFLIGHT, "started")
    assert journal.record.state is RunState.PENDING


def test_the_reserve_is_released_unless_another_process_owns_it(run_dir: RunDir) -> None:
    lost = Journal(run_dir, token=1)
    lost.close(lease_lost=True)
    assert run_dir.control_reserve.exists()
    Journal(run_dir, token=2).close()
    assert not run_dir.control_reserve.exists()


# ---------------------------------------------------------------------------------------------------------------------
# Unreadable lines


def completed(run_dir: RunDir) -> Path:
    """The journal of a completed run, whose last line records the end."""
    journal = Journal(run_dir, token=1)
    for state in (RunState.PREFLIGHT, RunState.QUEUED, RunState.TRAINING, RunState.EVALUATING, RunState.COMPLETED):
        journal.move_run(state, "so it went")
    journal.close()
    return run_dir.control


def damage(path: Path, number: int, change: Callable[[bytes], bytes]) -> None:
    """Change one line of a file; lines are numbered from 1."""
    texts = path.read_bytes().splitlines(keepends=True)
    texts[number - 1] = change(texts[number - 1][:-1]) + b"\n"
    path.write_bytes(b"".join(texts))


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a flipped bit": lambda text: bytes([text[0] ^ 1]) + text[1:],
    "another state": lambda text: text.replace(b'"so it went"', b"7"),
    "zeros after a power cut": lambda text: bytes(len(text)),
    "nothing": lambda text: b"",
    "cut short and closed off": lambda text: text[: len(text) // 2],
    "a key that is not known": lambda text: text[:-1] + b',"extra":1}',
    "a newer version": lambda text: text.replace(b'"version":1', b'"version":99'),
}


@pytest.mark.parametrize("number", [3, 6], ids=["in the middle", "the last"])
@pytest.mark.parametrize("kind", DAMAGES)
def test_an_unreadable_complete_line_is_an_error_that_names_it(run_dir: RunDir, kind: str, number: int) -> None:
    path = completed(run_dir)
    damage(path, number, DAMAGES[kind])
    with pytest.raises(JournalDamaged, match=rf"control\.jsonl, line {number} cannot be read: .*sed -i {number}d"):
        read_record(run_dir)
    with pytest.raises(JournalDamaged):
        Journal(run_dir, token=2)
    assert path.read_bytes().count(b"\n") == 6, "nothing was written behind it"


def test_skipped_lines_would_make_a_completed_run_one_that_evaluates(run_dir: RunDir) -> None:
    """Negative control: a reader that skips lines it cannot parse."""
    damage(completed(run_dir), 6, DAMAGES["a flipped bit"])
    assert fold(lines(run_dir)).state is RunState.EVALUATING


def test_a_newer_version_is_reported_as_such(run_dir: RunDir) -> None:
    damage(completed(run_dir), 6, DAMAGES["a newer version"])
    with pytest.raises(JournalDamaged, match=r"found version 99 .* a newer rlhf-flows wrote it"):
        read_record(run_dir)


def test_every_line_has_a_version(run_dir: RunDir) -> None:
    path = completed(run_dir)
    assert all(json.loads(text)["version"] == JOURNAL_VERSION for text in path.read_text().splitlines())


def as_written_by_0_1(path: Path) -> None:
    """Lines without a version; a line torn by a killed controller was terminated with a newline."""
    texts = [text.replace(b'"version":1,', b"") for text in path.read_bytes().splitlines(keepends=True)]
    assert all(b"version" not in text for text in texts)
    path.write_bytes(b"".join([*texts[:3], texts[3][:40] + b"\n", *texts[3:]]))


def test_a_journal_of_0_1_is_read_and_continued(run_dir: RunDir) -> None:
    as_written_by_0_1(completed(run_dir))
    assert read_record(run_dir).state is RunState.COMPLETED
    journal = Journal(run_dir, token=2)
    assert journal.record.next_sequence == 6
    journal.append(RunMoved(state=RunState.PREFLIGHT, cause="resumed"))
    assert read_record(run_dir).state is RunState.PREFLIGHT
    assert [found.line.sequence for found in scan_journal(run_dir.control)] == [0, 1, 2, 3, 4, 5, 6]


def test_a_torn_line_before_one_with_a_version_is_damage(run_dir: RunDir) -> None:
    """Negative control: only the controllers of 0.1 left such lines behind."""
    path = completed(run_dir)
    as_written_by_0_1(path)
    damage(path, 5, lambda text: b'{"version":1,' + text[1:])
    with pytest.raises(JournalDamaged, match="line 4 "):
        read_record(run_dir)


def test_the_line_after_one_cut_short_is_found_in_the_next_block(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_written_by_0_1(completed(run_dir))
    whole = [found.line for found in scan_journal(run_dir.control)]
    monkeypatch.setattr("rlhf_core.files.appended.read_lines.__defaults__", (0, 1))  # a block for each line
    assert [found.line for found in scan_journal(run_dir.control)] == whole
