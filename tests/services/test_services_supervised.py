"""Services under a real supervisord: killed, stopped, orphaned, of an earlier version. They only hold locks."""

import errno
import io
import os
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from process_tools import command_of, kill_all, processes_of, until

from rlhf_core.errors import BadInput, ServiceFailed
from rlhf_core.machine.process_identity import started_ticks
from rlhf_core.services import health, lifecycle, presence, supervisord
from rlhf_core.services.lifecycle import Lifecycle, Service, restart_supervisord
from rlhf_core.services.presence import ServiceFiles, ServiceState, holding, service_status
from rlhf_core.services.supervisord import Supervisord
from rlhf_core.worker.processes import process_state

ROOT = Path(__file__).parents[2]
NAMES = ("server", "worker", "daemon")

PROGRAM = Path(__file__).with_name("idle_service.py")


class House:
    """A home folder with idle services."""

    def __init__(self, home: Path, interval_s: float = 0.1) -> None:
        self.home = home
        self.message: list[str] = []
        self.supervisord = Supervisord(home)
        services = [Service(name, 10 * number, stop_timeout_s=2) for number, name in enumerate(NAMES, start=1)]
        self.lifecycle = Lifecycle(home, services, interval_s, self.message.append)

    def up(self, *names: str) -> dict[str, str]:
        return {one.name: one.what for one in self.lifecycle.up(names or NAMES)}

    def pids(self) -> dict[str, int]:
        found = [service_status(self.home, name) for name in NAMES]
        return {one.name: one.pid for one in found if one.state is ServiceState.RUNNING}

    def processes(self) -> list[psutil.Process]:
        """All processes that carry this home folder, services or not."""
        return processes_of(self.home)

    def kill_all(self) -> None:
        """Send SIGKILL to every process until none is left."""
        kill_all(self.home)

    def num_of(self, name: str) -> int:
        """Number of processes that are a service or about to become one."""
        commands = [command_of(one) for one in self.processes()]
        return sum(words[-1:] == [name] or words[-2:] == [name, "deaf"] for words in commands)

    def health_pid(self) -> int:
        return self.supervisord.process("health")[1]

    def settled(self) -> dict[str, int]:
        """The services, once all are running."""
        until(lambda: len(self.pids()) == len(NAMES))
        return self.pids()


def program(name: str, *more: str) -> list[str]:
    return [sys.executable, "-P", str(PROGRAM), name, *more]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle programs in place of `rlhf serve NAME`."""
    ours = supervisord._command

    def command(module: str, *arguments: str) -> str:
        return ours(module, *arguments) if "health" in module else shlex.join(program(arguments[-1]))

    monkeypatch.setattr(supervisord, "_command", command)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def ended(house: House) -> Iterator[House]:
    """A house whose processes are ended with the fixture, or the loop, that it is made for."""
    try:
        yield house
    finally:
        house.kill_all()


HOME = "a-long-name-with 100% of what means something;#" * 3
"""Name of a folder whose path is longer than a Unix socket path may be."""


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    yield from ended(House(tmp_path / HOME))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A home folder shared by tests that call ``up`` first and leave all services running: a start takes seconds."""
    yield from ended(House(tmp_path_factory.mktemp("running") / HOME))


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not any(lives(pid) for pid in pids))


def lives(pid: int) -> bool:
    """False even if this process, the parent, has not reaped it yet."""
    return started_ticks(pid) is not None


def test_up_twice_starts_nothing_twice_and_down_leaves_nothing(house: House) -> None:
    assert house.up() == dict.fromkeys(NAMES, "started")
    before = house.pids()
    assert house.up() == dict.fromkeys(NAMES, "was running")
    assert house.pids() == before
    assert house.lifecycle.down(NAMES) == list(reversed(NAMES)), "in the order in which they are ended"
    assert house.processes() == []
    assert house.lifecycle.down(NAMES) == []


def test_another_environment_is_named_but_not_shown(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_PREFECT_AUTH", "me:s3cret")
    house.up("server")
    house.up("server")
    assert not [text for text in house.message if "environment" in text]
    monkeypatch.setenv("RLHF_PREFECT_AUTH", "me:an0ther")
    house.up("server")
    assert "which differs in RLHF_PREFECT_AUTH; run `rlhf down`, then `rlhf up`" in house.message[-1]
    assert not [text for text in house.message if "s3cret" in text or "an0ther" in text]
    assert "s3cret" not in house.supervisord.config.read_text()


def test_other_users_have_no_access_and_it_listens_on_no_port(running: House) -> None:
    running.up()
    folder = running.home / "services"
    (socket_file,) = folder.glob("*.sock")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(socket_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(running.supervisord.config.stat().st_mode) == 0o600
    process = psutil.Process(running.supervisord.pid())
    assert process.net_connections(kind="inet") == []
    assert process.net_connections(kind="unix") != [], "negative control"


def test_two_homes_are_independent(running: House, house: House) -> None:
    running.up()
    house.up("server")
    before = running.pids()
    house.lifecycle.down(NAMES)
    assert house.processes() == []
    assert running.pids() == before
    assert running.supervisord.answers()


def test_killed_services_are_restarted_and_stopped_ones_are_not(running: House) -> None:
    running.up()
    before, ends = running.pids(), [running.supervisord.recent_ends(name) for name in NAMES]
    kill(before["server"], before["worker"])
    after = running.settled()
    assert after["daemon"] == before["daemon"]
    assert {after["server"], after["worker"]}.isdisjoint(before.values())
    killed = ["terminated by SIGKILL"]
    assert [running.supervisord.recent_ends(name) for name in NAMES] == [ends[0] + killed, ends[1] + killed, ends[2]]
    running.lifecycle.down(["worker"])
    kill(after["daemon"])
    until(lambda: running.pids().get("daemon", after["daemon"]) != after["daemon"])
    assert service_status(running.home, "worker").state is ServiceState.STOPPED
    assert running.up() == {"server": "was running", "worker": "started", "daemon": "was running"}


def test_without_restarts_killed_services_stay_down(tmp_path: Path) -> None:
    """Negative control of the previous test; `rlhf up` brings the service back."""
    for house in ended(House(tmp_path / "home", interval_s=0)):
        house.up()
        before = house.pids()
        kill(before["server"])
        until(lambda: house.supervisord.process("server")[0] == "FATAL")  # noqa: B023 - called at once
        assert house.supervisord.recent_ends("server") != []
        assert house.up() == {"server": "started", "worker": "was running", "daemon": "was running"}
        with pytest.raises(ServiceFailed):
            house.health_pid()


def test_a_killed_supervisord_comes_back_without_duplicate_services(running: House) -> None:
    running.up()
    old = running.supervisord.pid()
    until(running.health_pid)
    os.kill(old, signal.SIGKILL)
    until(lambda: running.supervisord.pid() not in (0, old) and running.supervisord.answers())
    running.settled()
    assert [running.num_of(name) for name in NAMES] == [1, 1, 1]
    assert set(running.up().values()) == {"was running"}


def test_a_killed_supervisord_does_not_come_back_after_down(house: House) -> None:
    house.up("server")
    house.supervisord.configure([], 0.1)
    kill(house.supervisord.pid())
    until(lambda: not house.processes())
    restart_supervisord(house.home, dict.fromkeys(NAMES, 2.0))
    assert house.processes() == []


def test_after_a_kill_of_everything_the_next_up_starts_all_services(running: House) -> None:
    running.up()
    running.kill_all()
    assert running.up() == dict.fromkeys(NAMES, "started")
    assert [running.num_of(name) for name in NAMES] == [1, 1, 1]


def test_a_service_that_outlives_its_supervisord_is_killed_by_the_next_up(house: House) -> None:
    """A service that ignores SIGTERM, both the kernel's and that of `rlhf up`."""
    environment = {**os.environ, "RLHF_HOME": str(house.home), "RLHF_STARTED_BY": "rlhf up"}
    with subprocess.Popen(program("worker", "deaf"), env=environment) as orphan:
        until(lambda: house.pids().get("worker") == orphan.pid)
        assert house.up()["worker"] == "started"
        assert orphan.wait() == -signal.SIGKILL
    assert [house.num_of(name) for name in NAMES] == [1, 1, 1]


def test_services_of_the_previous_version_are_taken_over(house: House) -> None:
    """They held the same locks under a former name, and started each other through a file."""
    environment = {**os.environ, "RLHF_HOME": str(house.home), "RLHF_STARTED_BY": "rlhf up"}
    earlier = [subprocess.Popen(program(name), env=environment) for name in ("server", "worker", "keeper")]
    wanted = house.home / "services" / "wanted.json"
    until(lambda: service_status(house.home, "keeper").state is ServiceState.RUNNING and len(house.pids()) == 2)
    wanted.write_text('{"services": ["server", "worker", "keeper"]}')
    assert house.up() == dict.fromkeys(NAMES, "started")
    assert [process.wait() for process in earlier] == [-signal.SIGTERM] * 3
    assert not wanted.exists()
    assert house.message[0].startswith("ending the keeper (process ")


def test_services_of_the_previous_version_are_stopped(house: House) -> None:
    environment = {**os.environ, "RLHF_HOME": str(house.home), "RLHF_STARTED_BY": "rlhf up"}
    earlier = [subprocess.Popen(program(name), env=environment) for name in ("server", "keeper")]
    until(lambda: service_status(house.home, "keeper").state is ServiceState.RUNNING and house.pids())
    assert house.lifecycle.down(["daemon"]) == ["keeper"]
    assert earlier[0].poll() is None, "it was not named"
    assert house.lifecycle.down(NAMES) == ["server"]
    assert [process.wait() for process in earlier] == [-signal.SIGTERM] * 2


def test_a_stopped_supervisord_is_replaced(running: House, monkeypatch: pytest.MonkeyPatch) -> None:
    running.up()
    old = running.supervisord.pid()
    monkeypatch.setattr(supervisord, "ANSWER_TIMEOUT_S", 1.0)
    os.kill(old, signal.SIGSTOP)
    until(lambda: process_state(old) == "T")
    running.message.clear()
    assert set(running.up()) == set(NAMES)
    assert running.supervisord.pid() not in (0, old)
    assert "supervisord does not respond and is replaced" in running.message
    assert [running.num_of(name) for name in NAMES] == [1, 1, 1]


def test_a_service_that_is_silent_is_replaced_by_up(running: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "HEARTBEAT_TIMEOUT_S", 3.0)
    monkeypatch.setattr(lifecycle, "ANSWER_TIMEOUT_S", 1.0)
    running.up()
    before = running.pids()
    os.kill(before["worker"], signal.SIGSTOP)
    until(lambda: service_status(running.home, "worker").state is ServiceState.SILENT)
    assert running.up()["worker"] == "replaced"
    assert running.pids()["worker"] != before["worker"]
    assert not lives(before["worker"])


def test_a_service_that_does_not_start_is_an_error_with_its_log_and_is_removed(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.home.mkdir()
    (house.home / "fails").touch()
    with pytest.raises(ServiceFailed, match=r"(?s)the server ended with exit code 1; its log is .*it cannot start"):
        house.up()
    assert house.processes() == []
    assert house.supervisord.programs() == ()
    monkeypatch.setattr(lifecycle, "FULL_BYTES", 1 << 62)  # on a full disk
    with pytest.raises(ServiceFailed, match=r"exit code 1; RLHF_HOME, .*MiB free: make room there, then run `rlhf up`"):
        house.up("server")


def test_a_full_disk_is_named_though_the_error_of_a_write_names_no_file(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(house.supervisord, "configure", full)
    monkeypatch.setattr(house.lifecycle, "_supervisord", house.supervisord)
    with pytest.raises(ServiceFailed, match=f"cannot write in RLHF_HOME, {house.home}: No space left on device. Make"):
        house.up("server")


def test_a_service_that_does_not_start_does_not_affect_the_others(house: House) -> None:
    house.up("server")
    before = house.pids()
    (house.home / "fails").touch()
    with pytest.raises(ServiceFailed, match="the worker ended"):
        house.up("worker")
    assert house.pids() == before
    assert house.supervisord.programs() == ("server",)


def test_a_service_that_waits_for_its_next_start_is_started_by_up_at_once(running: House) -> None:
    running.up()
    (running.home / "fails").touch()
    kill(running.pids()["worker"])
    until(lambda: running.supervisord.process("worker")[0] == "BACKOFF" or not running.pids().get("worker"))
    (running.home / "fails").unlink()
    assert set(running.up()) == set(NAMES)
    assert running.num_of("worker") == 1


# ---------------------------------------------------------------------------------------------------------------------
# Health check


def checks(house: House, clock: Sequence[float]) -> health.HealthCheck:
    return health.HealthCheck(house.home, dict.fromkeys(NAMES, 2.0), 0.1, lambda: clock[0])


def test_a_service_that_is_silent_for_long_is_restarted(running: House, monkeypatch: pytest.MonkeyPatch) -> None:
    running.up()
    before = running.pids()
    os.kill(before["daemon"], signal.SIGSTOP)
    clock = [0.0]
    check = checks(running, clock)
    check.check()
    monkeypatch.setattr(presence, "HEARTBEAT_TIMEOUT_S", 3.0)
    until(lambda: service_status(running.home, "daemon").state is ServiceState.SILENT)
    check.check()
    clock[0] = health.SILENCE_TIMEOUT_S - 1
    check.check()
    assert lives(before["daemon"]), "a machine may be busy"
    clock[0] = health.SILENCE_TIMEOUT_S
    check.check()
    until(lambda: running.pids().get("daemon") not in (None, before["daemon"]))
    assert {running.pids()[name] for name in ("server", "worker")} == {before[name] for name in ("server", "worker")}


def test_a_silent_service_that_ignores_signals_is_killed(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {**os.environ, "RLHF_HOME": str(house.home), "RLHF_STARTED_BY": "rlhf up"}
    with subprocess.Popen(program("worker", "deaf"), env=environment) as deaf:
        until(lambda: house.pids().get("worker") == deaf.pid)
        monkeypatch.setattr(presence, "HEARTBEAT_TIMEOUT_S", -1.0)
        clock = [0.0]
        check = checks(house, clock)
        for clock[0] in (0.0, health.SILENCE_TIMEOUT_S):
            check.check()
        assert deaf.poll() is None
        clock[0] = health.SILENCE_TIMEOUT_S + 2.0
        check.check()
        assert deaf.wait() == -signal.SIGKILL


def test_a_service_that_hangs_before_its_first_heartbeat_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_STARTED_BY", "rlhf up")
    signals: list[int] = []
    monkeypatch.setattr(health.os, "kill", lambda _, number: signals.append(number))
    clock = [0.0]
    check = checks(House(tmp_path), clock)
    with holding(tmp_path, "server"):
        assert service_status(tmp_path, "server").state is ServiceState.STARTING
        for clock[0] in (0.0, health.START_TIMEOUT_S - 1):
            check.check()
        assert signals == [], "it may migrate a large database"
        for clock[0] in (health.START_TIMEOUT_S, health.START_TIMEOUT_S + 2.0):
            check.check()
    assert signals == [signal.SIGTERM, signal.SIGCONT, signal.SIGKILL, signal.SIGCONT]


def test_a_silent_service_of_systemd_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_STARTED_BY", "systemd")
    monkeypatch.setattr(health.os, "kill", lambda *_: pytest.fail("it is signalled"))
    monkeypatch.setattr(presence, "HEARTBEAT_TIMEOUT_S", -1.0)
    clock = [0.0]
    check = checks(House(tmp_path), clock)
    with holding(tmp_path, "worker") as beat:
        beat()
        for clock[0] in (0.0, 1000.0):
            check.check()


def test_the_health_check_runs_until_supervisord_is_gone() -> None:
    answers, seen = io.StringIO(), []

    def on_tick() -> None:
        seen.append(len(seen))
        if len(seen) == 1:
            raise OSError("no space left")

    event = "ver:3.0 server:supervisor serial:1 pool:health poolserial:1 eventname:TICK_5 len:15\nwhen:1201063880"
    health.listen(io.StringIO((event + " " * (15 - len("when:1201063880"))) * 2), answers, on_tick)
    assert seen == [0, 1], "a failed start is retried"
    assert answers.getvalue() == "READY\nRESULT 2\nOKREADY\nRESULT 2\nOKREADY\n"


@pytest.mark.parametrize("killed", ["before the first event", "during a check"])
def test_a_supervisord_that_does_not_accept_the_answer_is_gone(killed: str) -> None:
    """Its end also ends the event stream; an error here would end the process that restarts it."""
    reader, writer = os.pipe()
    if killed == "before the first event":
        os.close(reader)
    checked = []

    def on_tick() -> None:
        checked.append(True)
        os.close(reader)

    with io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True) as answers:
        health.listen(io.StringIO("eventname:TICK_5 len:4\nwhen" * 2), answers, on_tick)
    assert len(checked) == (killed == "during a check")


def test_checks_keep_their_interval(tmp_path: Path) -> None:
    clock, made = [0.0], []
    check = health.HealthCheck(tmp_path, {}, 5.0, lambda: clock[0])
    check.check = lambda: made.append(clock[0])  # type: ignore[method-assign]
    for clock[0] in (0.0, 4.0, 5.0, 9.0, 11.0):
        check.check_if_due()
    assert made == [0.0, 5.0, 11.0]


def test_a_service_of_systemd_is_not_stopped(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as around:
        around.setenv("RLHF_STARTED_BY", "systemd")
        around.setenv("RLHF_HOME", str(house.home))
        process = subprocess.Popen(program("worker"))
    with process:
        until(lambda: house.pids().get("worker") == process.pid)
        with pytest.raises(BadInput, match="managed by systemd"):
            house.lifecycle.down(NAMES)
        assert house.up() == {"server": "started", "worker": "was running", "daemon": "started"}
        house.lifecycle.down(["server", "daemon"])
        assert process.poll() is None
        assert ServiceFiles(house.home, "worker").lock.exists()
        process.terminate()


def test_the_log_of_a_service_that_does_not_start_is_shown_without_frames() -> None:
    log = """      ^^^^^^^^
  File "selectors.py", line 674, in connect
    raise OSError(err)
ConnectionRefusedError: [Errno 111] Connect call failed

ERROR:    Application startup failed. Exiting.
"""
    assert lifecycle._without_frames(log).splitlines() == [
        "ConnectionRefusedError: [Errno 111] Connect call failed",
        "ERROR:    Application startup failed. Exiting.",
    ]
