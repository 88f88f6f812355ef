"""Workers that are restarted one by one: each start is reported by itself."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_tools import until

from rlhf_core.run_dir.attempt import AttemptDir
from rlhf_core.schemas.agent_messages import NodeEnd
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.resources import GroupPlan
from rlhf_core.worker import processes
from rlhf_core.worker.evidence import exit_reports
from rlhf_core.worker.groups.base import GroupSeat
from rlhf_core.worker.groups.independent import IndependentGroup
from rlhf_core.worker.liveness.heartbeat import SlotFile
from rlhf_core.worker.liveness.pause_clock import PauseClock


@pytest.fixture
def group(tmp_path: Path, slots: SlotFile) -> Iterator[IndependentGroup]:
    """One worker that sleeps; not started."""
    plan = GroupPlan(role=Role.ROLLOUT, nodes=(0,), workers_per_node=1, restart="alone")
    seat = GroupSeat("here", 0, slots, PauseClock())
    made = IndependentGroup(
        plan, 0, seat, AttemptDir(tmp_path, 1), lambda generation: ("-c", "import time; time.sleep(600)")
    )
    yield made
    made.end()
    until(lambda: made.poll() or made.all_ended)


def report_after_kill(group: IndependentGroup) -> NodeEnd:
    """Report of the worker, after a kill from outside."""
    os.kill(group.workers[0].pid, signal.SIGKILL)
    until(group.poll)
    assert group.exits[0].code == -9
    return exit_reports.report(group, "", lambda path, model: True, [0])


def test_an_oom_kill_counts_for_the_start_in_which_it_happened(
    group: IndependentGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later SIGKILL has another origin, however long ago the first start of the group was."""
    kills = [0]
    monkeypatch.setattr(processes, "oom_kills", lambda: kills[0])
    group.start()
    kills[0] = 1
    assert report_after_kill(group).oom_kills == 1
    group.restart(0, 1)
    assert report_after_kill(group).oom_kills == 0
