"""The local scheduler: jobs outlive the submitter, are visible to all processes, and end with all their children."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from amd_node import make_amd_node
from job_requests import job_request, run_id_of
from process_tools import is_alive, until

from rlhf_core.errors import BadInput, SubmissionFailed
from rlhf_core.files.whole import read_model
from rlhf_core.machine import amd_gpus, main_memory
from rlhf_core.scheduler import JobRequest, JobState, get_scheduler
from rlhf_core.scheduler.local import LocalScheduler
from rlhf_core.schemas.cluster import SlurmSpec
from rlhf_core.schemas.resources import JOB_VARIABLE, Submission

pytestmark = pytest.mark.end_to_end

REPOSITORY = Path(__file__).parents[2]

AGENT = """
import os, signal, subprocess, sys, time
folder = sys.argv[1]
def say(name, text):
    open(f"{folder}/{name}.tmp", "w").write(text)
    os.rename(f"{folder}/{name}.tmp", f"{folder}/{name}")
def stop(number, frame): say("asked", signal.Signals(number).name); sys.exit(0)
signal.signal(signal.SIGTERM, stop); signal.signal(signal.SIGUSR2, stop)
if "daemon" in sys.argv:
    # A process that has left its parents and its session, as a reward function's helper may.
    subprocess.run(["sh", "-c", f"setsid sleep 60 >/dev/null 2>&1 & echo $! > {folder}/daemon"], check=True)
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)
print("at work", os.environ["RLHF_JOB"], os.environ.get("RLHF_DATABASE_URL"), os.environ.get("NCCL_DEBUG"), flush=True)
say("ends_at", os.environ.get("RLHF_JOB_ENDS_AT", ""))
say("agent", str(os.getpid()))
time.sleep(0.0 if "short" in sys.argv else 60.0)
"""


def make_request(folder: Path, *ways: str, time_limit_s: int = 600, nodes: int = 1, attempt: int = 1) -> JobRequest:
    return job_request(
        folder / "scheduler",
        *(sys.executable, "-c", AGENT, str(folder), *ways),
        run_id=run_id_of(folder),
        placed={"attempt": attempt, "num_nodes": nodes},
        time_limit_s=time_limit_s,
    )


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[LocalScheduler]:
    """Scheduler; remaining processes of a failed test's job are killed."""
    yield LocalScheduler()
    for process in psutil.process_iter():
        try:
            if process.environ().get(JOB_VARIABLE, "").startswith(run_id_of(tmp_path)):
                process.kill()
        except psutil.Error:
            continue


def _state(scheduler: LocalScheduler, submission: Submission) -> JobState:
    return scheduler.status([submission])[submission.job_id].state


def _pid(folder: Path, name: str) -> int:
    until(lambda: (folder / name).exists() and (folder / name).read_text(encoding="utf-8").strip())
    return int((folder / name).read_text(encoding="utf-8"))


def test_a_job_runs_its_command_and_ends(
    tmp_path: Path, scheduler: LocalScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_DATABASE_URL", "postgresql://user:secret@host/db")
    settings = SlurmSpec(environment={"NCCL_DEBUG": "WARN"})
    submission = scheduler.submit(replace(make_request(tmp_path, "short"), slurm=settings))
    assert (submission.attempt, submission.scheduler, submission.host) == (1, "local", socket.gethostname())
    until(lambda: _state(scheduler, submission) is JobState.ENDED)
    output = (tmp_path / "scheduler" / f"{submission.job_id}_0_log.out").read_text(encoding="utf-8")
    # The marker and the setting are there, the control plane's secret is not.
    assert output == f"at work {run_id_of(tmp_path)}/1 None WARN\n"
    assert scheduler.find(run_id_of(tmp_path), 1) is None
    assert scheduler.cancel(submission)  # harmless


SUBMITTER = """
import sys
sys.path[:0] = {folders!r}
from pathlib import Path
from test_scheduler_local import LocalScheduler, make_request
from rlhf_core.files.whole import write_model
folder = Path({folder!r})
write_model(folder / "submission.json", LocalScheduler().submit(make_request(folder, "daemon")))
import os, signal
{after}
"""


@pytest.mark.parametrize(
    "after",
    ["pass", "os.kill(os.getpid(), signal.SIGKILL)", "os.killpg(0, signal.SIGINT)"],
    ids=["leaves", "is killed", "Ctrl-C"],
)
def test_a_job_outlives_its_submitter_and_is_visible_to_other_processes(
    tmp_path: Path, scheduler: LocalScheduler, after: str
) -> None:
    folders = [str(REPOSITORY), *map(str, Path(__file__).parents[:2])]
    code = SUBMITTER.format(folders=folders, folder=str(tmp_path), after=after)
    subprocess.run([sys.executable, "-c", code], start_new_session=True, capture_output=True, check=False)
    submission = read_model(tmp_path / "submission.json", Submission)
    assert submission is not None
    agent, daemon = _pid(tmp_path, "agent"), _pid(tmp_path, "daemon")
    time.sleep(0.2)
    assert is_alive(agent)
    assert _state(scheduler, submission) is JobState.RUNNING
    assert scheduler.find(run_id_of(tmp_path), 1) == submission
    assert scheduler.find(run_id_of(tmp_path), 2) is None

    assert scheduler.cancel(submission)
    assert (tmp_path / "asked").read_text(encoding="utf-8") == "SIGTERM"  # the agent could write its outcome
    assert not is_alive(agent)
    assert not is_alive(daemon)
    assert _state(scheduler, submission) is JobState.ENDED


def test_a_job_that_ignores_signals_is_killed(
    tmp_path: Path, scheduler: LocalScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_core.scheduler.local.SHUTDOWN_TIMEOUT_S", 0.5)
    submission = scheduler.submit(make_request(tmp_path, "deaf", "daemon"))
    agent, daemon = _pid(tmp_path, "agent"), _pid(tmp_path, "daemon")
    assert scheduler.cancel(submission)
    assert not is_alive(agent)
    assert not is_alive(daemon)


def test_an_orphan_of_a_killed_agent_is_found_by_its_marker(tmp_path: Path, scheduler: LocalScheduler) -> None:
    """The job has ended and its orphan has not; the control shows that it is no longer a descendant of the job."""
    submission = scheduler.submit(make_request(tmp_path, "daemon"))
    agent, daemon = _pid(tmp_path, "agent"), _pid(tmp_path, "daemon")
    os.kill(int(submission.job_id), signal.SIGKILL)
    until(lambda: not is_alive(int(submission.job_id)))  # a killed process remains for a few milliseconds
    assert _state(scheduler, submission) is JobState.RUNNING  # its agent is still alive
    adopted = scheduler.find(run_id_of(tmp_path), 1)
    assert adopted is not None
    assert adopted.job_id == str(agent)
    os.kill(agent, signal.SIGKILL)
    until(lambda: _state(scheduler, submission) is JobState.ENDED)
    assert is_alive(daemon)
    assert scheduler.cancel(submission.model_copy(update={"marker": ""}))
    assert is_alive(daemon)
    assert scheduler.cancel(submission)
    assert not is_alive(daemon)


def test_a_reused_process_id_is_not_taken_for_the_job(tmp_path: Path, scheduler: LocalScheduler) -> None:
    """This process has that id, but started at another time; with its own start time it would be the job."""
    me = psutil.Process()
    stranger = Submission(
        attempt=1,
        scheduler="local",
        job_id=str(me.pid),
        command=("agent",),
        host=socket.gethostname(),
        process_started=me.create_time() - 100.0,
        marker=f"{run_id_of(tmp_path)}/77",
    )
    assert _state(scheduler, stranger) is JobState.ENDED
    assert scheduler.cancel(stranger)
    same = stranger.model_copy(update={"process_started": me.create_time()})
    assert _state(scheduler, same) is JobState.RUNNING


def test_a_job_of_another_machine_is_unknown(scheduler: LocalScheduler) -> None:
    away = Submission(attempt=1, scheduler="local", job_id="1", command=("agent",), host="elsewhere", marker="x/1")
    status = scheduler.status([away])["1"]
    assert status.state is JobState.UNKNOWN
    assert "elsewhere" in status.reason
    assert not scheduler.cancel(away)


def test_the_agent_is_signalled_to_save_before_the_time_limit(tmp_path: Path, scheduler: LocalScheduler) -> None:
    began = time.time()
    submission = scheduler.submit(make_request(tmp_path, time_limit_s=4))
    until(lambda: _state(scheduler, submission) is JobState.ENDED)
    assert (tmp_path / "asked").read_text(encoding="utf-8") == "SIGUSR2"
    assert began + 3 < int((tmp_path / "ends_at").read_text(encoding="utf-8")) < began + 15


def test_a_command_that_cannot_be_started_is_refused(tmp_path: Path, scheduler: LocalScheduler) -> None:
    with pytest.raises(SubmissionFailed, match="has 1 node, the placement asks for 2"):
        scheduler.submit(make_request(tmp_path, nodes=2))
    request = make_request(tmp_path)
    absent = JobRequest(**{**vars(request), "command": ("/no/such/python", "-m", "x")})
    with pytest.raises(SubmissionFailed, match="RLHF_COMPUTE_PYTHON"):
        scheduler.submit(absent)
    assert scheduler.find(run_id_of(tmp_path), 1) is None


def test_the_inventory_is_this_machine(scheduler: LocalScheduler) -> None:
    inventory = scheduler.inventory()
    assert inventory.node_names == (socket.gethostname(),)
    assert inventory.node_gpus == {socket.gethostname(): inventory.gpus_per_node}
    assert 1 <= inventory.cpus_per_node <= (os.cpu_count() or 1)
    assert inventory.memory_gb > 0.1


def test_the_inventory_has_the_amd_gpus_of_this_machine(
    scheduler: LocalScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_core.scheduler.local._num_nvidia_gpus", lambda: 0)
    monkeypatch.setattr(amd_gpus, "SYSFS", make_amd_node(tmp_path))
    monkeypatch.delenv("ROCR_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1,0")
    inventory, name = scheduler.inventory(), socket.gethostname()
    assert (inventory.gpus_per_node, inventory.node_gpus) == (2, {name: 2})
    assert inventory.node_gpu_types == {name: "AMD Instinct MI300X OAM"}
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1,2")
    assert scheduler.inventory().node_gpu_types == {}, "they differ"
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "-1")
    assert scheduler.inventory().gpus_per_node == 0


def test_the_inventory_has_the_memory_of_this_process(
    scheduler: LocalScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of its own control group, for instance a limit of its user's session, and not only that of the root."""
    for name, size in (("memory.max", 256 << 20), ("memory.current", 1 << 20)):
        (tmp_path / name).write_text(f"{size}\n")
    monkeypatch.setattr(main_memory, "control_group", lambda: tmp_path)
    assert scheduler.inventory().memory_gb == 0.25


def test_schedulers_are_found_by_name() -> None:
    assert get_scheduler("local").name == "local"
    assert get_scheduler("slurm").name == "slurm"
    with pytest.raises(BadInput, match="RLHF_SCHEDULER=pbs is not a scheduler"):
        get_scheduler("pbs")


def test_a_job_outlives_the_folder_it_was_submitted_from(
    scheduler: LocalScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flow run of a Prefect worker is in a temporary folder that is removed with it."""
    gone = tmp_path / "temporary"
    gone.mkdir()
    monkeypatch.chdir(gone)
    scheduler.submit(make_request(tmp_path))
    monkeypatch.chdir(tmp_path)
    gone.rmdir()
    until((tmp_path / "agent").exists)
    agent = psutil.Process(int((tmp_path / "agent").read_text()))
    assert agent.cwd() == str(tmp_path / "scheduler")
