"""The Slurm scheduler on a real, throw-away cluster."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from job_requests import job_request
from process_tools import until
from slurm_cluster import WHY_NOT, Cluster, missing_programs

from rlhf_core.scheduler import slurm_queue
from rlhf_core.scheduler.base import JobRequest, JobState, JobStatus
from rlhf_core.scheduler.passed_environment import PassedEnvironment
from rlhf_core.scheduler.slurm import SlurmScheduler
from rlhf_core.schemas.cluster import SlurmSpec
from rlhf_core.schemas.resources import Submission

pytestmark = [pytest.mark.skipif(bool(missing_programs()), reason=WHY_NOT)]


@pytest.fixture
def slurm(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SlurmScheduler]:
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield SlurmScheduler()
    if cluster.pid("slurmctld") is None:
        cluster.start("slurmctld")
    cluster.command("scancel", "--user=root", check=False)


def request(folder: Path, shell: str, num_nodes: int = 1, run_id: str = "toy-1", **slurm: object) -> JobRequest:
    return job_request(
        folder / run_id / "attempts" / "1" / "scheduler",
        *("/bin/sh", "-c", shell),
        run_id=run_id,
        placed={"num_nodes": num_nodes},
        slurm=SlurmSpec.model_validate({"environment": {"GREETING": "hello 'you'"}, **slurm}),
    )


def status(slurm: SlurmScheduler, job: Submission) -> JobStatus:
    return slurm.status([job])[job.job_id]


def ended(slurm: SlurmScheduler, job: Submission) -> bool:
    return status(slurm, job).state is JobState.ENDED


def output(job: JobRequest) -> str:
    return "\n".join(path.read_text() for path in sorted(job.scheduler_dir.glob("*_log.out")))


def test_inventory_counts_nodes_cores_memory_and_gpus(slurm: SlurmScheduler) -> None:
    found = slurm.inventory()
    assert found.node_names == ("node1", "node2", "node3")
    assert (found.cpus_per_node, found.gpus_per_node) == (8, 2)
    assert found.node_gpus == dict.fromkeys(found.node_names, 2)
    assert found.memory_gb == pytest.approx(8000 / 1024)


def test_every_node_knows_all_nodes_and_no_secrets(
    slurm: SlurmScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_DATABASE_URL", "postgresql://user:secret@host/db")
    job_request = request(tmp_path, 'echo "$SLURM_NODEID|$RLHF_NODES|$RLHF_JOB|$GREETING|$RLHF_DATABASE_URL|"', 3)
    job = slurm.submit(job_request)
    until(lambda: ended(slurm, job))
    nodes = "node1=127.0.0.1,node2=127.0.0.1,node3=127.0.0.1"
    lines = sorted(line for line in output(job_request).splitlines() if "|" in line)
    assert lines == [f"{index}|{nodes}|toy-1/1|hello 'you'||" for index in range(3)]
    end = status(slurm, job)
    assert (end.scheduler_state, end.nodes) == ("COMPLETED", ("node1", "node2", "node3"))


@pytest.mark.parametrize("export", ["", "NONE"], ids=["everything is exported", "nothing is exported"])
def test_a_secret_reaches_the_job_and_nothing_readable_by_others(
    slurm: SlurmScheduler, cluster: Cluster, export: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = f"c4nary-{export or 'ALL'}"
    monkeypatch.setenv("WANDB_API_KEY", canary)
    if export:
        monkeypatch.setenv("SBATCH_EXPORT", export)
    # In two pieces, so that the command line does not contain it.
    job_request = request(tmp_path, 'test "$WANDB_API_KEY" = "$0$1" && echo "it got the value"; sleep 3', 2)
    job_request = replace(
        job_request,
        passed=PassedEnvironment(("WANDB_API_KEY",)),
        command=(*job_request.command, canary[:4], canary[4:]),
    )
    job = slurm.submit(job_request)
    shown = [cluster.command("scontrol", "show", "job", job.job_id, "--details")]
    shown += [cluster.command("scontrol", "write", "batch_script", job.job_id, "-"), slurm.script(job_request)]
    lines = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    kept = [path for path in cluster.folder.rglob("*") if path.is_file() and canary.encode() in path.read_bytes()]
    until(lambda: ended(slurm, job))
    assert sorted(line for line in output(job_request).splitlines() if "it got" in line) == ["it got the value"] * 2
    assert not any(canary in text for text in (*shown, *lines))
    assert "WANDB_API_KEY" in shown[1], "the control: this is the script"
    assert kept, "the control: Slurm's controller keeps the environment of a job"
    assert {path.stat().st_mode & 0o077 for path in kept} == {0}
    left = [path for path in tmp_path.rglob("*") if path.is_file() and canary.encode() in path.read_bytes()]
    assert left == []


def test_a_forgotten_job_has_ended_and_a_new_one_is_not_forgotten(slurm: SlurmScheduler, tmp_path: Path) -> None:
    """With the control: a job newer than the shared answer is queried instead of taken for forgotten."""
    slurm_queue.listing()
    job = slurm.submit(request(tmp_path, "sleep 300"))
    assert job.job_id not in slurm_queue.listing(max_age_s=60.0).rows
    assert status(slurm, job).state in (JobState.PENDING, JobState.RUNNING)
    gone = job.model_copy(update={"job_id": "1"})
    assert status(slurm, gone).state is JobState.ENDED
    assert "no longer has a record" in status(slurm, gone).reason
    assert slurm.cancel(job)


def test_a_lost_node_is_named(slurm: SlurmScheduler, cluster: Cluster, tmp_path: Path) -> None:
    job = slurm.submit(request(tmp_path, "sleep 300", 2))
    until(lambda: status(slurm, job).state is JobState.RUNNING)
    cluster.command("scontrol", "update", "nodename=node2", "state=down", "reason=test")
    until(lambda: ended(slurm, job))
    try:
        assert status(slurm, job).scheduler_state == "NODE_FAIL"
        assert status(slurm, job).lost_nodes == ("node2",)
    finally:
        # The node may have come back by itself.
        cluster.command("scontrol", "update", "nodename=node2", "state=resume", check=False)


def test_variables_of_the_users_shell_neither_change_a_job_nor_hide_it(
    slurm: SlurmScheduler, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables of a site that exports nothing, of an enclosing allocation, and of queries.

    With the control: squeue itself no longer shows the job.
    """
    variables = {"SBATCH_EXPORT": "NONE", "SLURM_MEM_PER_CPU": "64", "SBATCH_TIMELIMIT": "1", "SBATCH_REQUEUE": "1"}
    filters = {"SQUEUE_NAMES": "x", "SQUEUE_PARTITION": "nosuch", "SINFO_PARTITION": "nosuch", "LOGNAME": "daemon"}
    for name, value in (variables | filters).items():
        monkeypatch.setenv(name, value)
    seen = tmp_path / "seen"  # the job waits for this file: on a busy machine it would otherwise end before the search
    shell = f'echo "$SLURM_NODEID|$RLHF_NODES|"; until [ -e {seen} ]; do sleep 0.1; done'
    job_request = request(tmp_path, shell, 2)
    job = slurm.submit(replace(job_request, memory_gb=0.25, time_limit_s=600))
    assert slurm.inventory().node_names
    assert slurm.find("toy-1", 1) == job.model_copy(update={"command": ()})
    assert cluster.command("squeue", "--noheader").strip() == "", "the control"
    details = cluster.command("scontrol", "show", "job", job.job_id)
    assert "TimeLimit=00:10:00" in details
    assert "Requeue=0" in details
    seen.touch()
    until(lambda: ended(slurm, job))
    assert status(slurm, job).scheduler_state == "COMPLETED", output(job_request)
    lines = sorted(line for line in output(job_request).splitlines() if "|" in line)
    # Any node: one that other tests used may still be completing.
    words = cluster.command("scontrol", "show", "job", job.job_id).split()
    (taken,) = [word.removeprefix("NodeList=") for word in words if word.startswith("NodeList=")]
    names = cluster.command("scontrol", "show", "hostnames", taken).split()
    nodes = ",".join(f"{name}=127.0.0.1" for name in names)
    assert len(names) == 2
    assert lines == [f"{index}|{nodes}|" for index in range(2)]


ASKS = """
import sys, time
from rlhf_core.scheduler.slurm_queue import listing
end = time.time() + 3.0
while time.time() < end:
    assert not listing().problem
    time.sleep(0.05)
"""


def test_a_job_runs_in_its_own_folder_whatever_it_was_submitted_from(
    slurm: SlurmScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flow run of a Prefect worker is in a temporary folder that is removed with it."""
    gone = tmp_path / "temporary"
    gone.mkdir()
    monkeypatch.chdir(gone)
    job_request = request(tmp_path, "sleep 1; pwd -P", run_id="toy-cwd")
    job = slurm.submit(job_request)
    monkeypatch.chdir(tmp_path)
    gone.rmdir()
    until(lambda: ended(slurm, job))
    assert str(job_request.scheduler_dir.resolve()) in output(job_request)
