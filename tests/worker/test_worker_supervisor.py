"""The supervising thread keeps working on a full disk, after an error, and over a pause of its own."""

import contextlib
import errno
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from agents_in_memory import GivenProcess, lone_channel
from process_tools import until

from rlhf_core.diagnosis.hangs.liveness import GapTracker
from rlhf_core.run_dir.attempt import AttemptDir
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.reports import AgentCommand
from rlhf_core.schemas.supervision import SuperviseSpec
from rlhf_core.worker.channel.messages import AgentChannel
from rlhf_core.worker.event_log import EventLog
from rlhf_core.worker.groups.base import Started
from rlhf_core.worker.liveness.heartbeat import SlotFile
from rlhf_core.worker.signals import SignalInbox
from rlhf_core.worker.supervision.exit_deadline import ExitDeadline
from rlhf_core.worker.supervision.supervisor import Supervisor

ALONE = lone_channel()


@pytest.fixture
def inbox() -> Iterator[SignalInbox]:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    yield SignalInbox()
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def silent_worker() -> Iterator["subprocess.Popen[bytes]"]:
    """A worker that never takes its slot."""
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


class NoDeadline(ExitDeadline):
    """Never ends the process of the tests."""

    def __init__(self) -> None:
        super().__init__(lambda why: None)
        self.has_left = False

    def set(self, seconds: float, why: str) -> None:
        pass

    def leave_now(self) -> None:
        self.has_left = True


def _supervise(
    folder: Path,
    inbox: SignalInbox,
    tracker: GapTracker,
    channel: AgentChannel = ALONE,
    deadline: ExitDeadline | None = None,
    is_superseded: Callable[[], bool] = lambda: False,
) -> Supervisor:
    restart_dir = AttemptDir(folder, 1).restart(0)
    events, spec, deadline = EventLog("here", restart_dir), SuperviseSpec(), deadline or NoDeadline()
    supervisor = Supervisor(channel, inbox, tracker, events, list, spec, folder, deadline, is_superseded, tuple)
    supervisor.enter(Role.TRAINER, restart_dir)
    return supervisor


def _watch(supervisor: Supervisor, folder: Path, slots: SlotFile, pid: int) -> GivenProcess:
    group = GivenProcess(slots, AttemptDir(folder, 1).restart(0), pid=pid, clock=ALONE.clock)
    group.start()
    supervisor.supervise(group, 0)
    return group


def test_a_hang_is_found_although_nothing_can_be_written(
    tmp_path: Path, slots: SlotFile, inbox: SignalInbox, silent_worker: "subprocess.Popen[bytes]"
) -> None:
    folder = tmp_path / "no-folder"
    folder.write_text("every write below this path fails", encoding="utf-8")
    supervisor = _supervise(folder, inbox, GapTracker(SuperviseSpec(floor_s=0.5, setup_floor_s=0.5)))
    watch = _watch(supervisor, folder, slots, silent_worker.pid)
    supervisor.start()
    until(lambda: watch.poll() or watch.exits, timeout_s=10.0)
    supervisor.stop()
    assert watch.hang is not None
    assert watch.hang.verdict.kind is FailureKind.HANG
    assert watch.exits[0].by_agent
    assert silent_worker.wait() == -signal.SIGKILL


@pytest.mark.parametrize("hangs", [True, False])
def test_a_file_system_that_holds_the_thread_does_not_hold_the_agent_at_its_end(
    tmp_path: Path, inbox: SignalInbox, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    supervisor = _supervise(tmp_path, inbox, GapTracker(SuperviseSpec(floor_s=60.0, setup_floor_s=60.0)))
    responds, reached, last_lines = threading.Event(), threading.Event(), Mock()

    def write(*_: object) -> None:
        reached.set()
        if hangs:
            responds.wait(60.0)

    monkeypatch.setattr(supervisor._status._series, "add", write)
    monkeypatch.setattr(supervisor._status._series, "stop", last_lines)
    monkeypatch.setattr("rlhf_core.worker.supervision.supervisor.STACK_TIMEOUT_S", -4.0)
    supervisor.start()
    assert reached.wait(60.0)
    supervisor.stop()
    assert last_lines.called is not hangs
    responds.set()
    supervisor.join(60.0)


def test_a_woken_agent_asks_until_it_knows_whether_the_run_went_on_without_it(
    tmp_path: Path, inbox: SignalInbox
) -> None:
    """The file system of a node that was frozen responds only after a while."""
    answers: list[bool | OSError] = [OSError(errno.EIO, "Input/output error"), True]

    def is_superseded() -> bool:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    deadline = NoDeadline()
    channel = lone_channel()
    tracker = GapTracker(SuperviseSpec(floor_s=60.0, setup_floor_s=60.0))
    supervisor = _supervise(tmp_path, inbox, tracker, channel, deadline, is_superseded)
    channel.clock.num_pauses = 1  # a pause that it has not noticed yet
    for _ in range(3):
        with contextlib.suppress(OSError):
            supervisor._tick()
    supervisor._status.stop()
    assert (deadline.has_left, answers) == (True, [])


def test_one_error_does_not_end_supervision(
    tmp_path: Path, slots: SlotFile, inbox: SignalInbox, silent_worker: "subprocess.Popen[bytes]"
) -> None:
    supervisor = _supervise(tmp_path, inbox, GapTracker(SuperviseSpec(floor_s=0.5, setup_floor_s=0.5)))
    calls: list[int] = []

    def stumble() -> list[AgentCommand]:
        calls.append(1)
        if len(calls) == 1:
            raise ZeroDivisionError("a bug")
        return []

    supervisor._new_commands = stumble
    watch = _watch(supervisor, tmp_path, slots, silent_worker.pid)
    supervisor.start()
    until(lambda: watch.hang, timeout_s=10.0)
    supervisor.stop()
    assert (tmp_path / "restarts" / "0" / "agents" / "here.json").exists()


def test_a_worker_that_resumes_while_evidence_is_collected_is_left_alone(
    tmp_path: Path,
    slots: SlotFile,
    inbox: SignalInbox,
    silent_worker: "subprocess.Popen[bytes]",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Suspect, collect evidence, read again: the second reading decides."""
    supervisor = _supervise(tmp_path, inbox, GapTracker(SuperviseSpec(floor_s=0.5, setup_floor_s=0.5)))
    watch = _watch(supervisor, tmp_path, slots, silent_worker.pid)

    def collect(*_: object) -> list[str]:
        # The worker wakes up now, as if its slot had been written.
        watch.workers[0] = Started(0, 0, silent_worker.pid, time.monotonic_ns(), oom_kills_before=0)
        return []

    monkeypatch.setattr("rlhf_core.worker.evidence.collection.collect", collect)
    supervisor.start()
    events = tmp_path / "restarts" / "0" / "events-here.jsonl"
    until(lambda: events.exists() and "withdrawn" in events.read_text(encoding="utf-8"), timeout_s=10.0)
    supervisor.stop()
    assert watch.hang is None
    assert silent_worker.poll() is None


def test_signals_become_orders_while_the_main_thread_is_busy(
    tmp_path: Path, slots: SlotFile, inbox: SignalInbox
) -> None:
    supervisor = _supervise(tmp_path, inbox, GapTracker(SuperviseSpec(floor_s=60.0, setup_floor_s=60.0)))
    supervisor.start()
    os.kill(os.getpid(), signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGTERM)
    until(lambda: supervisor.requests.end, timeout_s=5.0)
    supervisor.stop()
    assert supervisor.requests.end == "SIGTERM"
    assert "SIGUSR2" in supervisor.requests.stop
    assert supervisor.requests.to_end


@pytest.mark.parametrize(
    ("turns", "interval_s", "is_given_up"),
    [("never", 0.25, True), ("always", 0.25, False), ("over", 0.25, False), ("never", 100.0, False)],
    ids=["stuck", "control: at work", "control: between two phases", "control: the second thread was stuck too"],
)
def test_a_node_is_given_up_if_the_main_thread_of_its_agent_is_stuck(
    tmp_path: Path, inbox: SignalInbox, turns: str, interval_s: float, is_given_up: bool
) -> None:
    """It waits in a call for a hung file system, while the supervising thread goes on."""
    supervisor = _supervise(tmp_path, inbox, GapTracker(SuperviseSpec(floor_s=60.0, setup_floor_s=60.0)))
    supervisor.main_thread.take_turn()
    if turns == "over":
        supervisor.main_thread.end_turns()
    now_s, ticks = time.monotonic(), int(1000 / interval_s)
    for tick in range(ticks):
        if turns == "always":
            supervisor.main_thread.take_turn()
        supervisor._watch_main_thread(now_s + tick * interval_s)
    state = supervisor._node.state(0, {})
    supervisor._status.stop()
    assert ("has been stuck for 900 s" in state.broken) == is_given_up, state.broken
    assert supervisor.requests.broken_node == ("here" if is_given_up else "")
    assert not is_given_up or state.broken_kind is FailureKind.NODE_LOST
