"""The exit deadline: an agent whose main thread waits forever is killed, along with everything that it has started."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from process_tools import is_alive

pytestmark = pytest.mark.timeout(120)

AGENT = textwrap.dedent(
    """
    import os, subprocess, sys, threading, time
    from pathlib import Path
    from rlhf_core.worker.supervision.exit_deadline import ExitDeadline

    def record_exit(why):
        Path(sys.argv[1]).write_text(why)
        if sys.argv[3] == "stuck":
            time.sleep(600)   # as on a file system that does not answer

    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    deadline = ExitDeadline(record_exit)
    if sys.argv[2] == "set":
        deadline.set(60.0, "too late to matter")
        deadline.set(0.5, "it has not ended within 0.5 s")
        deadline.set(30.0, "later ones change nothing")
    print(child.pid, flush=True)
    os.read(os.pipe()[0], 1)  # nothing ever comes
    """
)


@pytest.mark.parametrize("words", ["written", "stuck"])
def test_an_agent_that_does_not_end_is_killed(tmp_path: Path, words: str) -> None:
    output = tmp_path / "output"
    command = [sys.executable, "-c", AGENT, str(output), "set", words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        child = int(agent.stdout.readline())
        assert agent.wait(60) == 1
    assert not is_alive(child)
    assert output.read_text() == "it has not ended within 0.5 s"


def test_without_a_deadline_it_waits_forever(tmp_path: Path) -> None:
    """Negative control."""
    command = [sys.executable, "-c", AGENT, str(tmp_path / "output"), "unset", "written"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        child = int(agent.stdout.readline())
        with pytest.raises(subprocess.TimeoutExpired):
            agent.wait(3)
        agent.kill()
    subprocess.run(["kill", "-9", str(child)], check=True)
