"""Fixtures for the worker tests."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_runs import MakeRun, toy_runs
from small_disk import small_disk

from rlhf_core.machine.parent_death import adopt_orphans
from rlhf_core.run_dir.attempt import RestartDir
from rlhf_core.run_dir.run import RunDir, new_run_id
from rlhf_core.worker.event_log import EventLog
from rlhf_core.worker.liveness.heartbeat import SlotFile


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB; toy runs that use it are placed there."""
    with small_disk(tmp_path / "runs", "512k") as mount:
        yield mount


@pytest.fixture
def agent_run(tmp_path: Path) -> Iterator[MakeRun]:
    """Factory of toy runs with two trainer ranks per node; remaining processes are killed after the test."""
    with toy_runs(tmp_path / "runs") as make:
        yield make


@pytest.fixture
def adopting() -> Iterator[None]:
    """Let this process adopt orphans, as an agent does."""
    adopt_orphans()
    yield
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


@pytest.fixture
def restart_dir(tmp_path: Path) -> RestartDir:
    """The folder of the first start of a run."""
    return RunDir(tmp_path / "run").attempt(1).restart(0)


@pytest.fixture
def events(restart_dir: RestartDir) -> Iterator[EventLog]:
    """Events of this node."""
    log = EventLog("here", restart_dir)
    yield log
    log.close()


@pytest.fixture
def slots() -> Iterator[SlotFile]:
    """The heartbeats of two workers on this node."""
    file = SlotFile(new_run_id("toy"), 1, "here", 2)
    yield file
    file.remove()
