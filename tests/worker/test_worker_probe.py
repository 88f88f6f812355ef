"""Start of the probe's processes: forked from a server that has imported torch, or new ones without a server."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from agent_runs import make_spec
from made_reports import stored_spec

from rlhf_core.files.whole import write_model
from rlhf_core.run_dir.run import RunDir, new_run_id
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.resources import Placement
from rlhf_core.worker import processes
from rlhf_core.worker.groups.fork_server import ForkServer
from rlhf_core.worker.nodes import probe as probe_module
from rlhf_core.worker.nodes.membership import Nodes
from rlhf_core.worker.nodes.probe import Probe
from rlhf_core.worker.roles import WARM_PROBE
from rlhf_core.worker.worker_process import AGENT_VARIABLE

NUM_RANKS = 2


def make_probe(folder: Path, probe_s: float = 60.0) -> tuple[RunDir, Probe]:
    """A probe of one node with two ranks."""
    run_dir = RunDir.of(folder, new_run_id("toy"))
    spec = make_spec(preflight={"probe_s": probe_s}, resources={"ranks_per_node": NUM_RANKS})
    write_model(run_dir.spec, stored_spec(run_dir.run_id, spec))
    placement = Placement(attempt=1, num_nodes=1, phases=())
    return run_dir, Probe(run_dir, 1, Nodes(("n1",), ("127.0.0.1",), 0), spec, placement, "")


class Starter:
    """Starter of the test's programs that becomes ready after some time."""

    def __init__(self, program: str, importing_s: float = 0.0) -> None:
        self._program = program
        self._until_s = time.monotonic() + importing_s
        self.commands: list[Sequence[str]] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.has_waited = True
        """False once a process was started during the imports."""

    @property
    def is_importing(self) -> bool:
        return time.monotonic() < self._until_s

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        self.has_waited &= not self.is_importing
        self.commands.append(command)
        words = [sys.executable, "-c", self._program, *command]
        self.processes.append(subprocess.Popen(words, env=environment, start_new_session=True))
        return self.processes[-1]


SAYS_ITS_SPEED = """
import json, sys
rank, output = json.loads(sys.argv[6])["local_rank"], sys.argv[sys.argv.index("--output") + 1]
lines = [{"step": "started", "device": "a core"}, {"step": "done", "tflops": 2.0 + rank}]
open(output, "w").write("".join(json.dumps(line) + chr(10) for line in lines))
"""


def never() -> bool:
    return False


def test_ranks_start_after_the_imports_and_report(tmp_path: Path) -> None:
    run_dir, probe = make_probe(tmp_path)
    starter = Starter(SAYS_ITS_SPEED, importing_s=0.3)
    speed = probe.measure(1, starter, never)
    assert speed.reached == ("done", "done")
    assert (speed.device, speed.matmul_tflops, speed.slowest_rank) == ("a core", 2.0, 0)
    assert starter.has_waited
    logs = [command[command.index("--log") + 1] for command in starter.commands]
    folder = run_dir.attempt(1).restart(0)
    assert logs == [str(folder.log(Role.PROBE, "n1", rank)) for rank in range(NUM_RANKS)]


@pytest.mark.parametrize(
    ("importing_s", "is_over"), [(60.0, never), (0.0, never), (60.0, lambda: True)], ids=["imports", "hangs", "ended"]
)
def test_a_measurement_ends_in_time(tmp_path: Path, importing_s: float, is_over: Callable[[], bool]) -> None:
    """Endless imports as well as hanging ranks are cut off, and nothing is left behind."""
    _, probe = make_probe(tmp_path, probe_s=0.5)
    starter = Starter("import time; time.sleep(600)", importing_s)
    speed = probe.measure(1, starter, is_over)
    assert speed.reached == ("", "")
    assert [process.returncode for process in starter.processes] == [-signal.SIGKILL] * NUM_RANKS
    assert starter.has_waited == (importing_s == 0)


def test_many_nodes_have_more_time(tmp_path: Path) -> None:
    run_dir, of_one = make_probe(tmp_path)
    spec = make_spec(resources={"num_nodes": 64})
    names = tuple(f"n{number}" for number in range(64))
    placement = Placement(attempt=1, num_nodes=64, phases=())
    of_many = Probe(run_dir, 1, Nodes(names, ("127.0.0.1",) * 64, 0), spec, placement, "")
    assert of_many.timeout_s - of_one.timeout_s == 63
    starters = [Starter("") for _ in range(2)]
    places = []
    for probe, starter in zip((of_one, of_many), starters, strict=True):
        probe.measure(1, starter, never)
        places.append(json.loads(starter.commands[0][5]))
    assert [place["start_s"] for place in places] == [30.0, 61.5]
    assert [place["timeout_s"] for place in places] == [10.0, 20.5]


def test_ranks_that_end_without_a_word_have_a_problem(tmp_path: Path) -> None:
    """A broken environment, unlike a late rank, fails again in the next attempt."""
    _, probe = make_probe(tmp_path)
    assert probe.measure(1, Starter("import no_such_module"), never).problems == ("it ended with exit code 1",) * 2
    assert probe.measure(1, Starter(SAYS_ITS_SPEED), never).problems == ("", ""), "control"


class Blocked(subprocess.Popen[bytes]):
    """A process that must not be waited for without a limit."""

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is not None
        return super().wait(timeout)


def test_a_rank_that_is_blocked_in_the_kernel_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the driver of a broken GPU: it does not end when it is killed."""
    _, probe = make_probe(tmp_path, probe_s=0.2)
    starter = Starter("import time; time.sleep(600)")
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", Blocked)
        patch.setattr(probe_module, "KILL_TIMEOUT_S", 0.0, raising=False)
        patch.setattr(processes, "kill_group", lambda pid: None)
        assert probe.measure(1, starter, never).reached == ("", "")
    assert [process.poll() for process in starter.processes] == [None] * NUM_RANKS
    for process in starter.processes:
        process.kill()
        process.wait(60)


@pytest.mark.usefixtures("adopting")
def test_forked_ranks_measure_like_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real imports: forked ranks compute, and their collectives are correct."""
    monkeypatch.setenv(AGENT_VARIABLE, str(os.getpid()))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run_dir, probe = make_probe(tmp_path)
    server = ForkServer(print)
    try:
        server.prepare(WARM_PROBE)
        speed = probe.measure(1, server, never)
        assert server.started > server.pids, "the server and its ranks"
        assert len(server.started - server.pids) == NUM_RANKS
    finally:
        server.close()
    assert speed.reached == ("done", "done")
    assert speed.problems == ("", "")
    assert speed.matmul_tflops > 0
    assert run_dir.attempt(1).restart(0).log(Role.PROBE, "n1", 1).exists()
    new = probe.measure(2, ForkServer(print), never)
    assert (new.reached, new.problems) == (speed.reached, speed.problems), "the control: without a server"
