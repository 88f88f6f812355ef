"""Fixtures of the worker's tests."""

import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_runs import AgentRun, make_spec

from rlhf_core.run_dir import RunDir, new_run_id, write_model
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.resources import Placement, Role, RolePlan
from rlhf_core.schemas.run import StoredSpec
from rlhf_core.worker.heartbeat import slots_folder


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB; toy runs made with it lie there."""
    mount = tmp_path / "runs"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(mount)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a small file system")
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


@pytest.fixture
def agent_run(tmp_path: Path) -> Iterator[Callable[..., AgentRun]]:
    """Makes toy runs with two trainer ranks per node; whatever they leave behind is ended with the test."""
    runs: list[AgentRun] = []

    def make(*, evaluator: bool = False, num_nodes: int = 1, **sections: Any) -> AgentRun:
        run_dir = RunDir.of(tmp_path / "runs", new_run_id("toy"))
        spec = StoredSpec(
            run_id=run_dir.run_id,
            created_at=utc_now(),
            owner="tester",
            config_source="",
            package_version="0",
            spec=make_spec(**sections),
        )
        write_model(run_dir.spec, spec)
        roles = [RolePlan(role=Role.TRAINER, workers_per_node=2)]
        if evaluator:
            roles.append(RolePlan(role=Role.EVALUATOR, workers_per_node=2))
        write_model(run_dir.attempt(1).placement, Placement(attempt=1, num_nodes=num_nodes, roles=tuple(roles)))
        runs.append(AgentRun(run_dir))
        return runs[-1]

    yield make
    for run in runs:
        for agent in run.agents:
            if agent.poll() is None:
                agent.send_signal(signal.SIGKILL)
            agent.wait()
        # An agent that was killed leaves its slots behind; the next one of the run would remove them.
        for path in slots_folder().glob(f"rlhf-{run.run_dir.run_id}-*"):
            path.unlink()
