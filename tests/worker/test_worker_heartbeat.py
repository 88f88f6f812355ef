"""Heartbeat slots: the agent reads exactly what the worker wrote, and only the main thread counts."""

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from agents_in_memory import GivenProcess

from rlhf_core.diagnosis.hangs.liveness import GapTracker, overdue
from rlhf_core.run_dir.attempt import RestartDir
from rlhf_core.run_dir.run import new_run_id
from rlhf_core.schemas.reports import Phase
from rlhf_core.schemas.supervision import SuperviseSpec
from rlhf_core.training.types import Reporter
from rlhf_core.worker.liveness.heartbeat import MAX_REPRESENTED, WARM_BEATS, Beat, SlotFile, memory_folder, slots_folder


def test_the_agent_reads_what_the_worker_wrote(slots: SlotFile) -> None:
    reporter: Reporter = Beat(slots.path, local_rank=1)
    reporter.beat(Phase.ROLLOUT, 12)
    with reporter.collective():
        inside = slots.read(1)
    after = slots.read(1)
    assert inside.pid == os.getpid()
    assert (inside.step, inside.phase, inside.entered, inside.left) == (12, Phase.ROLLOUT, 1, 0)
    assert (after.entered, after.left) == (1, 1)
    assert after.sequence > inside.sequence > 0
    assert time.monotonic_ns() - after.beat_ns < 1e9
    assert slots.read(0).pid == 0


def test_a_full_shared_memory_ends_no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that memory has no room for would kill the process that writes to it, here at the first beat."""
    run = new_run_id("full")
    whole = SlotFile(run, 1, "here", 500)
    found = whole.path.stat()
    assert found.st_blocks * 512 >= found.st_size
    whole.remove()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    elsewhere = SlotFile(run, 2, "here", 2)
    assert memory_folder(elsewhere.path) is None
    Beat(elsewhere.path, 0).beat(Phase.TRAIN, 3)
    assert elsewhere.read(0).step == 3
    elsewhere.remove()


def test_a_phase_is_warm_once_it_was_left_or_after_some_beats(slots: SlotFile) -> None:
    """Even if a visit was short, or the agent did not read in the meantime."""
    beat = Beat(slots.path, 0)
    warm = []
    for phase in (Phase.ROLLOUT, Phase.CHECKPOINT, Phase.ROLLOUT, Phase.TRAIN, Phase.CHECKPOINT):
        beat.beat(phase, 1)
        warm.append(slots.read(0).warm)
    assert warm == [False, False, True, False, True]
    beat = Beat(slots.path, 0)
    for _ in range(2 * WARM_BEATS):
        beat.beat(Phase.SETUP, 0)
    assert not slots.read(0).warm, "silences while data and weights are read are not those of a step"
    for _ in range(WARM_BEATS):
        beat.beat(Phase.EVALUATE, 1)
    assert not slots.read(0).warm
    beat.beat(Phase.EVALUATE, 1)
    assert slots.read(0).warm


def test_a_collective_that_raises_has_been_left(slots: SlotFile) -> None:
    beat = Beat(slots.path, 0)
    with pytest.raises(RuntimeError, match="reset"), beat.collective():
        raise RuntimeError("Connection reset by peer")
    assert slots.read(0).left == 1


def test_a_request_to_stop_outlives_the_workers(slots: SlotFile) -> None:
    beat = Beat(slots.path, 0)
    assert beat.request() == ""
    slots.request_stop()
    assert beat.request() == "stop"
    slots.clear()
    assert Beat(slots.path, 0).request() == "stop"


def test_a_restart_finds_no_worker_of_the_previous_one(slots: SlotFile) -> None:
    beat = Beat(slots.path, 0)
    beat.beat(Phase.TRAIN, 9)
    slots.show_step(9)
    assert beat.step_of_group() == 9
    slots.clear()
    assert (slots.read(0).pid, Beat(slots.path, 0).step_of_group()) == (0, 0)


def test_another_process_beats_into_the_same_slot(slots: SlotFile) -> None:
    code = (
        "import sys; from pathlib import Path; from rlhf_core.worker.liveness.heartbeat import Beat, Phase\n"
        "Beat(Path(sys.argv[1]), 1).beat(Phase.REWARD, 3)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(slots.path)], cwd=Path(__file__).parents[2])
    assert process.wait(timeout=30) == 0
    assert (slots.read(1).pid, slots.read(1).phase) == (process.pid, Phase.REWARD)


WRITER = """
import struct, sys, time
from pathlib import Path
from rlhf_core.worker.liveness.heartbeat import HEADER_WORDS, WORD_BYTES, Beat, Phase
beat = Beat(Path(sys.argv[1]), 0)
print("ready", flush=True)
if sys.argv[2] == "words":
    while True:
        beat.beat(Phase.TRAIN, 1)
pack, target = struct.Struct("<9q").pack_into, beat._words.cast("B")
while True:
    pack(target, HEADER_WORDS * WORD_BYTES, 1, 0, 0, 0, 0, 1, 1, 3, time.monotonic_ns())
"""


@pytest.mark.parametrize("way", ["words", "struct"])
def test_a_reader_never_finds_half_a_beat(slots: SlotFile, way: str) -> None:
    """Negative control: ``struct.pack_into`` writes zeros first, and a zero is read as a very old beat."""
    repository = Path(__file__).parents[2]
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(slots.path), way], cwd=repository, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    zeros = 0
    until = time.monotonic() + (1.0 if way == "words" else 20.0)
    while time.monotonic() < until and not zeros:
        zeros = sum(slots.read(0).beat_ns == 0 for _ in range(10_000))
    writer.kill()
    writer.wait()
    writer.stdout.close()
    assert bool(zeros) is (way == "struct")


def test_files_of_a_killed_agent_are_removed_and_those_of_others_stay() -> None:
    run = new_run_id("toy")
    killed = SlotFile(run, 1, "here", 1)
    elsewhere = SlotFile(run, 1, "there", 1)
    other_run = SlotFile(f"{run}2", 1, "here", 1)
    present = SlotFile(run, 2, "here", 1)
    try:
        found = {path.name for path in slots_folder().glob(f"rlhf-{run}*")}
        assert found == {present.path.name, elsewhere.path.name, other_run.path.name}
        assert killed.path.name not in found
    finally:
        for file in (elsewhere, other_run, present):
            file.remove()


def test_memory_of_a_dead_agent_is_freed_and_that_of_a_living_one_is_kept() -> None:
    """A kill leaves the files behind, but releases the lock on the slot file with the process."""
    living, dead = SlotFile("run-living", 1, "node", 1), SlotFile("run-dead", 1, "node", 1)
    copies = [folder for one in (living, dead) if (folder := memory_folder(one.path)) is not None]
    assert len(copies) == 2, "the tests run where /dev/shm may be written"
    for folder in copies:
        (folder / "model").mkdir(parents=True)
    dead._words = memoryview(bytearray(8)).cast("q")  # as its process ends
    newer = SlotFile("run-newer", 1, "node", 1)
    assert [folder.is_dir() for folder in copies] == [True, False]
    for one in (living, newer):
        one.remove()
    assert not copies[0].exists()
    assert memory_folder(Path("/var/tmp/x.slots")) is None


def test_all_files_of_a_dead_agent_are_removed_by_the_agent_of_another_run() -> None:
    """A kill leaves the files of each group of workers; after a second kill also a store without its slot file."""
    dead = [SlotFile("run-dead", 1, "node", 1, role) for role in ("probe", "trainer", "evaluator")]
    for one in dead:
        one.store(0).write_text("")
        one._words = memoryview(bytearray(8)).cast("q")  # as its process ends
    dead[0].path.unlink()
    living = SlotFile("run-living", 1, "node", 1)
    living.store(0).write_text("")
    newer = SlotFile("run-newer", 1, "node", 1)
    assert [*slots_folder().glob("*run-dead-*")] == []
    assert living.path.exists()
    assert living.store(0).exists()
    for one in (living, newer):
        one.remove()


def test_files_of_an_agent_of_version_0_1_stay() -> None:
    """It does not lock them, and starts workers with them after training: the evaluator, or those of a restart."""
    old = SlotFile("run-old", 1, "node", 1)
    old._words[0] = 0x726C68665F763031
    old.store(0).write_text("")
    old._words = memoryview(bytearray(8)).cast("q")  # as without a lock
    newer = SlotFile("run-newer", 1, "node", 1)
    assert old.path.exists()
    assert old.store(0).exists()
    for one in (old, newer):
        one.remove()


def test_left_over_memory_is_reused_by_the_same_run_and_freed_by_another() -> None:
    run = new_run_id("toy")
    for attempt in (1, 2, 3):
        SlotFile(
            run, attempt, "here", 1, "probe"
        ).remove()  # an agent has several slot files: the first must not free the memory
        file = SlotFile(run, attempt, "here", 1, "trainer")
        memory = memory_folder(file.path)
        assert memory is not None, "the tests run where /dev/shm may be written"
        # The second agent finds the memory of the first, the third does not: another run has freed it.
        assert [path.name for path in memory.glob("*")] == (["1"] if attempt == 2 else [])
        (memory / str(attempt)).mkdir(parents=True)
        file._words = memoryview(bytearray(8)).cast("q")  # its process ends, and the lock with it
        file.remove(keep_memory=attempt < 3)
        assert memory.is_dir() is (attempt < 3)
        if attempt == 2:
            SlotFile(f"{run}-other", 1, "here", 1).remove()
            assert not memory.exists()
    assert not list(slots_folder().glob(f"rlhf-{run}*"))


def test_a_foreign_file_is_refused(tmp_path: Path, slots: SlotFile) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_bytes(bytes(1024))
    with pytest.raises(ValueError, match="not a slot file"):
        Beat(foreign, 0)
    with pytest.raises(ValueError, match="with slot 2"):
        Beat(slots.path, 2)


def test_a_helper_thread_must_not_beat(slots: SlotFile) -> None:
    beat = Beat(slots.path, 0)
    errors: list[str] = []

    def run() -> None:
        try:
            beat.beat(Phase.TRAIN, 1)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "only the thread" in errors[0]


@pytest.mark.parametrize("beats_from_thread", [False, True])
def test_a_thread_that_beats_would_hide_an_endless_loop(
    restart_dir: RestartDir, slots: SlotFile, monkeypatch: pytest.MonkeyPatch, beats_from_thread: bool
) -> None:
    """Negative control: if threads may beat, the agent does not notice that the main thread is in an endless loop."""
    limit_s = 0.3
    beat = Beat(slots.path, 0)
    over = threading.Event()

    def keep_beating() -> None:
        while not over.is_set():
            beat.beat(Phase.TRAIN, 1)
            over.wait(0.01)

    if beats_from_thread:
        monkeypatch.setattr("rlhf_core.worker.liveness.heartbeat._this_thread", lambda: beat._thread)
        threading.Thread(target=keep_beating, daemon=True).start()
    watch = GivenProcess(slots, restart_dir, pid=os.getpid())
    watch.start()
    until = time.monotonic() + 2 * limit_s
    while time.monotonic() < until:
        pass  # the endless loop
    suspects = overdue(watch.living(), GapTracker(SuperviseSpec(floor_s=limit_s, setup_floor_s=limit_s)).limit_s)
    over.set()
    assert bool(suspects) is not beats_from_thread


def test_a_worker_names_the_processes_it_beats_for(slots: SlotFile) -> None:
    """With the controls: none before, none afterwards, and more than the slots hold are refused."""
    beat = Beat(slots.path, local_rank=1)
    assert slots.read(1).represents == ()
    beat.represent(range(100, 100 + MAX_REPRESENTED))
    assert slots.read(1).represents == (*range(100, 100 + MAX_REPRESENTED),)
    assert slots.read(0).represents == (), "the next slot is another worker's"
    beat.represent([])
    assert slots.read(1).represents == ()
    with pytest.raises(ValueError, match=f"expected at most {MAX_REPRESENTED}"):
        beat.represent(range(MAX_REPRESENTED + 1))


def test_a_single_worker_can_be_reset(slots: SlotFile) -> None:
    for local_rank in (0, 1):
        Beat(slots.path, local_rank).beat(Phase.TRAIN, 5)
    slots.clear_worker(1)
    assert (slots.read(0).step, slots.read(1).pid, slots.read(1).step) == (5, 0, 0)


def test_groups_have_slots_of_their_own() -> None:
    """A restarted agent removes the file of its own group and no other."""
    run_id = new_run_id("toy")
    first, other = SlotFile(run_id, 1, "here", 1, "trainer"), SlotFile(run_id, 1, "here", 1, "rollout")
    assert first.path != other.path
    SlotFile(run_id, 2, "here", 1, "trainer").remove()
    assert not first.path.exists()
    assert other.path.exists()
    other.remove()
