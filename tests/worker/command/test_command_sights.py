"""Detection abilities of the progress sources: `rlhf check` prints what their modules declare."""

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from watched_programs import STEPS, Polls, Start, watched

from rlhf_core.schemas.command_trainer import SIGHTS, ProgressSource
from rlhf_core.worker.command.sources.activity import Activity
from rlhf_core.worker.command.sources.checkpoints import Checkpoints
from rlhf_core.worker.command.sources.stacks import Stacks
from rlhf_core.worker.command.sources.stdout import Stdout
from rlhf_core.worker.command.sources.tensorboard import TensorBoard
from rlhf_core.worker.command.sources.trainer_log import TrainerLog

FROM_OUTSIDE: tuple[Any, ...] = (TrainerLog, TensorBoard, Stdout, Checkpoints, Activity, Stacks)

WRITER = """
import itertools, sys, time
from torch.utils.tensorboard import SummaryWriter
writer = SummaryWriter(sys.argv[1])
for step in itertools.count(1):
    writer.add_scalar("train/loss", 1 / step, step)
    writer.flush()
    time.sleep(0.02)
"""
WRITING: dict[Any, tuple[str, str, list[str]]] = {
    TrainerLog: (STEPS, "logging.jsonl", ["lines", '{"loss": 1.0, "global_step/max_steps": "STEP/9"}\n']),
    Stdout: (STEPS, "log", ["lines", "step STEP loss 1.0\n"]),
    Checkpoints: (STEPS, "", ["checkpoints"]),
    TensorBoard: (WRITER, "runs", []),
}
"""A program that makes steps for each source that reads what a program writes: code, place and arguments."""


@pytest.mark.parametrize("make", FROM_OUTSIDE)
def test_a_module_declares_what_its_source_detects(make: Any) -> None:
    text = " ".join((inspect.getmodule(make).__doc__ or "").split())
    assert f"Detects {SIGHTS[make.kind].sees}" in text


def test_each_source_accepts_an_output_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    for make in FROM_OUTSIDE:
        reading = make(watched(tmp_path / "missing", logs=[tmp_path / "missing.log"])).poll(0.0)
        assert (reading.moved, reading.step, reading.problem) == (False, None, "")


def test_the_kinds_differ() -> None:
    assert len({make.kind for make in FROM_OUTSIDE}) == len(FROM_OUTSIDE)
    assert set(ProgressSource) - {make.kind for make in FROM_OUTSIDE} == {
        ProgressSource.CALLBACK,
        ProgressSource.COLLECTIVES,
    }


def test_none_of_them_loads_torch() -> None:
    """Otherwise each rank's worker would hold half a GiB and start seconds later."""
    names = [inspect.getmodule(make).__name__ for make in FROM_OUTSIDE]
    names += ["rlhf_core.diagnosis.health.metric_judge", "rlhf_core.worker.command.metric_names"]
    code = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules or 'tensorboard' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("make", [TrainerLog, Checkpoints])
def test_an_unreadable_output_folder_is_reported(make: Any, tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    reading = make(watched(loop)).poll(0.0)
    assert (reading.moved, "expected an output folder that the job can read" in reading.problem) == (False, True)


by_what_is_written = pytest.mark.parametrize(
    "make", [pytest.param(make, marks=pytest.mark.training) if make is TensorBoard else make for make in WRITING]
)


def read_by(make: Any, folder: Path, *pids: int) -> Polls:
    """A source that reads what the ranks write into this folder."""
    return Polls(make(watched(folder, logs=[folder / "log"], pids=pids, stdout_patterns=[r"step (?P<step>\d+)"])))


@by_what_is_written
def test_it_detects_a_program_that_stops_writing(make: Any, tmp_path: Path, start: Start) -> None:
    code, place, arguments = WRITING[make]
    polls = read_by(make, tmp_path)
    program = start(code, tmp_path / place, *arguments)
    polls.until_moved()
    polls.until_moved_again()
    program.stop()
    polls.polls(2)  # what was written earlier
    assert not any(reading.moved for reading in polls.polls(3))


@by_what_is_written
def test_it_is_blind_to_a_rank_that_writes_nothing(make: Any, tmp_path: Path, start: Start) -> None:
    code, place, arguments = WRITING[make]
    start(code, tmp_path / place, *arguments)
    other = start(STEPS, tmp_path / "rank-1.txt", "lines", "STEP\n")
    polls = read_by(make, tmp_path, other.pid)
    polls.until_moved()
    other.stop()
    polls.until_moved_again()
