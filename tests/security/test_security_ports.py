"""Strangers at the ports of a run: they reach listening sockets, forge orders and plant a pickle, without effect.

Agents and workers are real processes, started as a scheduler would start them. The stranger is a client of torch's own
store.
"""

import base64
import contextlib
import os
import pickle
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from process_tools import is_alive, until

sys.path.insert(0, str(Path(__file__).parents[1] / "worker"))
from agent_runs import AgentRun, MakeRun, toy_runs

from rlhf_core.schemas.agent_messages import AgreedStep, GroupOrders, NodeState, Orders
from rlhf_core.schemas.attempts import AttemptState, Role
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.resources import job_marker
from rlhf_core.weight_sync.links import answers, listen, reach
from rlhf_core.worker.channel.signing import MessageSigner
from rlhf_core.worker.channel.store import candidate_ports
from rlhf_core.worker.liveness.heartbeat import slots_folder

pytestmark = [pytest.mark.end_to_end, pytest.mark.training]

TARGETS = Path(__file__).parent / "targets"
CREDULOUS = """
from rlhf_core.worker.channel.signing import MessageSigner
MessageSigner.verify = lambda self, key, sender, message: message.rpartition("\\n")[2]
"""
"""Makes an agent obey unverified messages."""


@pytest.fixture
def agent_run(tmp_path: Path) -> Iterator[MakeRun]:
    """Factory of toy runs; processes that they leave behind are ended after the test."""
    with toy_runs(tmp_path / "runs") as make:
        yield make


def listening(run: AgentRun) -> list[tuple[str, int]]:
    """Addresses on which the agents of a run and all their descendants listen."""
    found = []
    for agent in run.agents:
        process = psutil.Process(agent.pid)
        for one in [process, *process.children(recursive=True)]:
            places = one.net_connections(kind="inet")
            found += [(place.laddr.ip, place.laddr.port) for place in places if place.status == psutil.CONN_LISTEN]
    return found


def stores_at(places: list[tuple[str, int]]) -> list[Any]:
    """Clients of torch's stores; a port without a store blocks a client forever, in a thread that is left behind."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    found: list[Any] = []

    def connect(host: str, port: int) -> None:
        with contextlib.suppress(RuntimeError):
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2))
            store.set("stranger", "here")
            found.append(store)

    threads = [threading.Thread(target=connect, args=place, daemon=True) for place in places]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 3.0
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return found


class Bomb:
    """Object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


# ---------------------------------------------------------------------------------------------------------------------
# One node


def test_a_run_on_one_node_listens_on_loopback_only_and_has_no_store_there(agent_run: MakeRun) -> None:
    run = agent_run(train={"num_steps": 5})
    run.roles = "meeting_roles"
    run.start(PYTHONPATH=os.pathsep.join([str(TARGETS), str(Path(__file__).parents[2])]), GLOO_SOCKET_IFNAME="eth0")
    until(lambda: (run.run_dir.root / "met").exists() or run.agents[0].poll() is not None)
    places = listening(run)
    assert [place for place in places if place[0] != "127.0.0.1"] == []
    # The sockets of gloo remain. They accept no orders and list no keys.
    assert places, "negative control: gloo does listen, so the search can find sockets"
    assert stores_at(places) == []
    (run.run_dir.root / "go").touch()
    assert run.finish()[0] == 0, run.printed(0)
    assert run.outcome().state is AttemptState.COMPLETED


def test_the_store_for_weights_listens_only_at_the_address_of_its_node() -> None:
    """By default, torch's store is reachable on all interfaces, and lets every client read, overwrite and delete."""
    store = listen("127.0.0.1")
    places = psutil.Process().net_connections(kind="inet")
    assert {place.laddr.ip for place in places if place.laddr and place.laddr.port == store.port} == {"127.0.0.1"}
    assert answers(reach("127.0.0.1", store.port, "the trainer"))


def test_files_of_workers_on_a_node_lie_where_no_other_user_reaches_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, another user could plant a file there that would be read as, say, a worker's outcome."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda *anything: False)  # no /dev/shm
    usual = slots_folder()
    usual.chmod(0o777)
    assert slots_folder() == usual
    assert stat.S_IMODE(usual.stat().st_mode) == 0o700
    # Another user was there first, with a link to their own folder, or with a folder of their own.
    usual.rmdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    usual.symlink_to(elsewhere)
    own = slots_folder()
    assert own not in (usual, elsewhere)
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    if os.geteuid() == 0:
        usual.unlink()
        usual.mkdir()
        os.chown(usual, 65534, 65534)
        assert slots_folder() != usual


# ---------------------------------------------------------------------------------------------------------------------
# Several nodes


def store_of(run: AgentRun) -> Any:
    """The store of the agents, as a stranger can reach it."""
    ports = candidate_ports(job_marker(run.run_dir.run_id, run.attempt))
    (port,) = until(lambda: [port for host, port in listening(run) if port in ports])
    (store,) = stores_at([("127.0.0.1", port)])
    return store


def forge(store: Any, run: AgentRun, bomb: Path) -> None:
    """Write the messages that a stranger can think of: ends, bad hardware, kills; plain, and signed with a made-up
    key."""
    over = AgreedStep(action="end", state=AttemptState.FAILED, message="forged", kind=FailureKind.NODE_UNFIT)
    groups = {Role.TRAINER: GroupOrders(kill=0)}
    orders = Orders(over=over, cancel="forged", groups=groups, stop="forged").model_dump_json()
    broken = NodeState(wall_s=time.time(), broken="forged", broken_kind=FailureKind.NODE_UNFIT)
    stranger = MessageSigner(b"0" * 64, job_marker(run.run_dir.run_id, run.attempt), 0)
    for key, text in {
        "orders": orders,
        "state/1": broken.model_dump_json(),
        "state/0": broken.model_dump_json(),
        **{f"step/{topic}/{restart}": over.model_dump_json() for topic in ("ready", "end") for restart in (0, 1)},
        **{f"end/{restart}/1": '{"num_workers": 0}' for restart in (0, 1)},
        "evidence/1/1": "{}",
        "farewell/1": "{}",
    }.items():
        store.set(key, text)
        store.set(key, stranger.sign(key, text))
    store.set("pulse/1", b"\xff\x00 no text")
    planted = base64.b64encode(pickle.dumps(Bomb(bomb)))
    for restart in range(4):
        # Torch's dynamic rendezvous keeps its state here, and unpickles it.
        store.set(f"torch.rendezvous.{run.run_dir.run_id}.{run.attempt}.{restart}", planted)


def refusals(run: AgentRun) -> list[str]:
    """Nodes whose agents reported that they refused a message."""
    found = [event for restart in run.dir.restarts() for event in run.events(restart.restart, "peer")]
    return [event.node for event in found if event.data.get("refused")]


def test_forged_orders_and_a_planted_pickle_change_nothing(agent_run: MakeRun, tmp_path: Path) -> None:
    run = agent_run(num_nodes=2, train={"num_steps": 70}, supervise={"floor_s": 30.0, "max_restarts": 3})
    run.start_all(2)
    store, bomb = store_of(run), tmp_path / "exploded"
    assert {place for place, _ in listening(run)} == {"127.0.0.1"}, "the address of the allocation, and no other"
    assert stat.S_IMODE(run.dir.key.stat().st_mode) == 0o600
    until(lambda: len(run.pids(0)) == 4 and run.reached(0, 2))
    keys = store.list_keys()
    assert "orders" in keys, "the stranger can see and reach the store"
    forge(store, run, bomb)
    # A start of the workers, with all its agreements, while the stranger can observe it.
    os.kill(run.pids(0)[0], signal.SIGKILL)
    until(lambda: run.restart(0).incident(1).exists())
    forge(store, run, bomb)
    replay = until(lambda: store.get("state/1"))
    until(lambda: len(run.pids(1)) == 4 and run.reached(1, 2))
    store.set("state/1", replay)
    forge(store, run, bomb)
    assert run.finish_all() == [0, 0], run.printed(0) + run.printed(1)
    outcome = run.outcome()
    assert (outcome.state, outcome.num_restarts, outcome.last_step) == (AttemptState.COMPLETED, 1, 70)
    assert run.incident(0).failure_kind is FailureKind.WORKER_KILLED
    assert not bomb.exists()
    assert sorted(refusals(run)) == ["node1", "node2"], "each agent reports it once"
    assert "was rejected: " in run.printed(0)


def test_agents_that_verify_nothing_obey_the_stranger(agent_run: MakeRun, tmp_path: Path) -> None:
    """Negative control: the same orders, and agents that do not verify the messages."""
    run = agent_run(num_nodes=2, train={"num_steps": 5000}, supervise={"agent_floor_s": 3.0})
    run.change = CREDULOUS
    run.start_all(2)
    store = store_of(run)
    until(lambda: len(run.pids(0)) == 4 and run.reached(0, 2))
    workers = run.pids(0)

    def have_obeyed() -> bool:
        with contextlib.suppress(RuntimeError):  # the store has ended with its agent
            forge(store, run, tmp_path / "exploded")
        return all(agent.poll() is not None for agent in run.agents)

    until(have_obeyed)  # every message of an agent replaces a forged one that has not been read
    assert run.finish_all() == [1, 1]
    assert run.outcome().state is AttemptState.FAILED
    assert ": forged" in run.printed(0) + run.printed(1), "an agent reports its end"
    assert not any(map(is_alive, workers.values()))


def test_no_state_of_a_run_is_read_with_pickle() -> None:
    """The rule applies to code that reads files that others can write; ``torch.load`` reads only weights.

    The processes of reward functions, tools and environments run the user's code anyway, and read from a socket whose
    other end only their trainer has. The trainer never unpickles the answers.
    """
    root = Path(__file__).parents[2] / "rlhf_core"
    training = root / "training"
    for path in sorted([*(root / "worker").rglob("*.py"), *training.rglob("*.py")]):
        text = path.read_text(encoding="utf-8")
        if path == training / "rewards" / "worker.py":
            assert text.count("pickle.loads") == 1
            continue
        if path == training / "rewards" / "process.py":
            text = text.replace("import pickle", "").replace("pickle.dumps(", "").replace("pickle.HIGHEST_PROTOCOL", "")
        for forbidden in (
            "pickle.load",
            "import pickle",
            "all_gather_object",
            "broadcast_object_list",
            "dynamic_rendezvous",
        ):
            assert forbidden not in text, f"{path}: {forbidden}"
        assert text.count("torch.load(") == text.count("weights_only=True"), path
