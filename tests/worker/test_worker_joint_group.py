"""Workers that are started together: their environment, and the ends of a start that not all of them survive."""

import inspect
import os
import re
import subprocess
from collections.abc import Iterator, Mapping

import psutil
import pytest

from rlhf_core.run_dir.attempt import RestartDir
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.resources import GroupPlan
from rlhf_core.worker import processes
from rlhf_core.worker.groups import base, joint
from rlhf_core.worker.groups.base import GroupSeat, StartAbandoned
from rlhf_core.worker.groups.joint import JointGroup, JointStart
from rlhf_core.worker.liveness.heartbeat import SlotFile
from rlhf_core.worker.liveness.pause_clock import PauseClock

SLEEP = ("-c", "import time; time.sleep(600)")


@pytest.fixture
def group(restart_dir: RestartDir, slots: SlotFile) -> Iterator[JointGroup]:
    """Two workers on the second of two nodes, which meet in a store; not started."""
    plan = GroupPlan.on_all_nodes(Role.TRAINER, 2, 2)
    start = JointStart("toy.1.0", "10.0.0.1:4711", SLEEP, restart_dir)
    made = JointGroup(plan, 0, GroupSeat("here", 1, slots, PauseClock()), start)
    yield made
    made.close()


def environments(group: JointGroup) -> list[Mapping[str, str]]:
    """Environments of the running workers, by local rank."""
    found = [psutil.Process(worker.pid).environ() for worker in group.workers.values()]
    assert len(found) == 2
    return found


def test_workers_find_their_place_as_under_torchrun(group: JointGroup) -> None:
    group.start()
    first, second = environments(group)
    assert {name: (first[name], second[name]) for name in first if first[name] != second[name]} == {
        "RANK": ("2", "3"),
        "LOCAL_RANK": ("0", "1"),
        "ROLE_RANK": ("2", "3"),
    }
    expected = {
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "trainer",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4711",
        "TORCHELASTIC_RUN_ID": "toy.1.0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    assert {name: first[name] for name in expected} == expected
    assert [worker.rank for worker in group.workers.values()] == [2, 3]


@pytest.mark.training
def test_no_variable_of_torchrun_is_missing(group: JointGroup) -> None:
    """As the installed version of torch sets them."""
    agent = pytest.importorskip("torch.distributed.elastic.agent.server.local_elastic_agent").LocalElasticAgent
    source = inspect.getsource(agent._start_workers) + inspect.getsource(agent._set_local_rank_env)
    named = set(re.findall(r'"([A-Z][A-Z_]+)"', source))
    assert len(named) > 15
    group.start()
    of_the_agent = {"OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"}
    assert named - of_the_agent <= environments(group)[0].keys()


def test_on_one_node_no_store_is_promised(restart_dir: RestartDir, slots: SlotFile) -> None:
    start = JointStart("toy.1.0", "", SLEEP, restart_dir)
    seat = GroupSeat("here", 0, slots, PauseClock())
    group = JointGroup(GroupPlan.on_all_nodes(Role.TRAINER, 2, 1), 0, seat, start)
    group.start()
    (address, port, promised), second = (
        (one["MASTER_ADDR"], one["MASTER_PORT"], one["TORCHELASTIC_USE_AGENT_STORE"]) for one in environments(group)
    )
    group.close()
    assert (address, promised) == ("127.0.0.1", "False")
    assert int(port) > 0
    assert second == (address, port, promised)


def test_an_order_to_kill_that_comes_first_starts_nothing(group: JointGroup) -> None:
    group.end()
    with pytest.raises(StartAbandoned):
        group.start()
    assert not group._processes


def test_of_a_start_that_fails_half_way_nothing_remains(group: JointGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start_new = base.start_new

    def start(command: tuple[str, ...], environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        if started:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(start_new(command, environment))
        return started[0]

    monkeypatch.setattr(base, "start_new", start)
    with pytest.raises(OSError, match="temporarily unavailable"):
        group.start()
    group.close()
    assert started[0].returncode == -9


def test_a_worker_that_is_blocked_in_the_kernel_is_left_behind(
    group: JointGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not end when it is killed, and must not hold the agent."""
    group.start()
    ended, blocked = group._processes.values()
    kill = processes.kill_group
    with monkeypatch.context() as patch:
        patch.setattr(processes, "kill_group", lambda pid: kill(pid) if pid != blocked.pid else None)
        patch.setattr(joint, "CLOSE_TIMEOUT_S", 1.0)
        group.close()
    assert ended.returncode == -9
    assert processes.process_state(blocked.pid) != "-"
    assert os.getpgid(blocked.pid) == blocked.pid, "its own process group, which is killed as a whole"
