"""Fixtures for the worker tests."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agent_runs import AgentRun, toy_runs

from rlhf_core.run_dir.run import new_run_id
from rlhf_core.worker.liveness.heartbeat import SlotFile


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB; toy runs that use it are placed there."""
    mount = tmp_path / "runs"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(mount)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a small file system")
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


@pytest.fixture
def agent_run(tmp_path: Path) -> Iterator[Callable[..., AgentRun]]:
    """Factory of toy runs with two trainer ranks per node; remaining processes are killed after the test."""
    with toy_runs(tmp_path / "runs") as make:
        yield make


@pytest.fixture
def slots() -> Iterator[SlotFile]:
    """The heartbeats of one worker on this node."""
    file = SlotFile(new_run_id("toy"), 1, "here", 1)
    yield file
    file.remove()
