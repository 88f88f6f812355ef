"""Jobs of the Slurm scheduler on a real, throw-away cluster.

They are submitted once, observed correctly, and ended with all their children.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from job_requests import job_request, run_id_of
from process_tools import until
from slurm_cluster import Cluster, needs_slurm

from rlhf_core.errors import SchedulerError, SchedulerUnavailable, SubmissionFailed
from rlhf_core.launch.journal import Journal
from rlhf_core.launch.start import record_plan, submit_once
from rlhf_core.run_dir.run import RunDir
from rlhf_core.scheduler import JobRequest, JobState, JobStatus
from rlhf_core.scheduler.passed_environment import PassedEnvironment
from rlhf_core.scheduler.slurm import queue
from rlhf_core.scheduler.slurm import scheduler as slurm_scheduler
from rlhf_core.scheduler.slurm.scheduler import SlurmScheduler
from rlhf_core.schemas.cluster import SlurmSpec
from rlhf_core.schemas.resources import Submission

pytestmark = [pytest.mark.end_to_end, needs_slurm]


WAIT = "until [ -e {} ]; do sleep 0.1; done"
"""Has a job wait for a file. On a busy machine, it would otherwise end before it is observed."""


@pytest.fixture
def scheduler(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmScheduler]:
    """Scheduler with its own queue cache; remaining jobs of a failed test are cancelled."""
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield SlurmScheduler()
    cluster.command("scancel", f"--name={run_id_of(tmp_path)}", check=False)


def make_request(folder: Path, shell: str, slurm: SlurmSpec | None = None, **placed: object) -> JobRequest:
    run_dir = RunDir.of(folder / "runs", run_id_of(folder))
    return job_request(
        run_dir.attempt(int(str(placed.get("attempt", 1)))).scheduler_dir,
        *("sh", "-c", shell),
        run_id=run_dir.run_id,
        placed=placed,
        time_limit_s=3600,
        slurm=slurm or SlurmSpec(),
    )


def status(scheduler: SlurmScheduler, submission: Submission) -> JobStatus:
    return scheduler.status([submission])[submission.job_id]


def state(scheduler: SlurmScheduler, submission: Submission) -> JobState:
    return status(scheduler, submission).state


def output(job: JobRequest) -> str:
    return "\n".join(path.read_text() for path in sorted(job.scheduler_dir.glob("*_log.out")))


def test_inventory_counts_nodes_cores_memory_and_gpus(scheduler: SlurmScheduler) -> None:
    found = scheduler.inventory()
    assert found.node_names == ("node1", "node2", "node3")
    assert (found.cpus_per_node, found.gpus_per_node) == (8, 2)
    assert found.node_gpus == dict.fromkeys(found.node_names, 2)
    assert found.memory_gb == pytest.approx(8000 / 1024)
    assert {name: one.time_limit_s for name, one in found.partition_settings.items()} == {"main": 0, "first": 0}


def test_agents_get_their_node_and_all_addresses_and_no_secret_of_the_site(
    tmp_path: Path, scheduler: SlurmScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The excluded node is left out, and addresses are numeric: node names need not resolve."""
    monkeypatch.setenv("RLHF_DATABASE_URL", "postgresql://user:secret@host/db")
    variables = "$RLHF_NODES|$EXTRA|$MORE|$RLHF_JOB|$CUDA_VISIBLE_DEVICES|$RLHF_DATABASE_URL|"
    slurm = SlurmSpec(environment={"EXTRA": "hello 'you'"}, setup=("export MORE=c",))
    shell = f'echo "{variables}" > {tmp_path}/$SLURM_NODEID'
    request = make_request(tmp_path, shell, slurm, num_nodes=2, gpus_per_node=2, excluded_nodes=("node1",))
    submission = scheduler.submit(request)
    until(lambda: state(scheduler, submission) is JobState.ENDED)
    end = status(scheduler, submission)
    assert (end.scheduler_state, end.nodes) == ("COMPLETED", ("node2", "node3"))
    expected = f"node2=127.0.0.1,node3=127.0.0.1|hello 'you'|c|{run_id_of(tmp_path)}/1|0,1||\n"
    assert [(tmp_path / index).read_text() for index in ("0", "1")] == [expected, expected]


@pytest.mark.parametrize("export", ["", "NONE"], ids=["everything is exported", "nothing is exported"])
def test_a_secret_reaches_the_job_and_nothing_readable_by_others(
    scheduler: SlurmScheduler, cluster: Cluster, export: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = f"c4nary-{export or 'ALL'}"
    monkeypatch.setenv("WANDB_API_KEY", canary)
    if export:
        monkeypatch.setenv("SBATCH_EXPORT", export)
    seen = tmp_path / "seen"
    # In two pieces, so that the command line does not contain it.
    shell = f'test "$WANDB_API_KEY" = "$0$1" && echo "it got the value"; {WAIT.format(seen)}'
    job_request = make_request(tmp_path, shell, num_nodes=2)
    job_request = replace(
        job_request,
        passed=PassedEnvironment(("WANDB_API_KEY",)),
        command=(*job_request.command, canary[:4], canary[4:]),
    )
    job = scheduler.submit(job_request)
    shown = [cluster.command("scontrol", "show", "job", job.job_id, "--details")]
    shown += [cluster.command("scontrol", "write", "batch_script", job.job_id, "-"), scheduler.script(job_request)]

    def at_work() -> list[str]:
        found = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
        return found if any(str(seen) in line for line in found) else []

    lines = until(at_work)
    kept = [path for path in cluster.folder.rglob("*") if path.is_file() and canary.encode() in path.read_bytes()]
    seen.touch()
    until(lambda: state(scheduler, job) is JobState.ENDED)
    assert sorted(line for line in output(job_request).splitlines() if "it got" in line) == ["it got the value"] * 2
    assert not any(canary in text for text in (*shown, *lines))
    assert "WANDB_API_KEY" in shown[1], "the control: this is the script"
    assert kept, "the control: Slurm's controller keeps the environment of a job"
    assert {path.stat().st_mode & 0o077 for path in kept} == {0}
    left = [path for path in tmp_path.rglob("*") if path.is_file() and canary.encode() in path.read_bytes()]
    assert left == []


def test_variables_and_the_folder_of_the_users_shell_neither_change_a_job_nor_hide_it(
    scheduler: SlurmScheduler, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables of a site that exports nothing, of an enclosing allocation, and of queries; and a temporary folder that
    is removed, like that of a flow run of a Prefect worker.

    With the control: squeue itself no longer shows the job.
    """
    variables = {"SBATCH_EXPORT": "NONE", "SLURM_MEM_PER_CPU": "64", "SBATCH_TIMELIMIT": "1", "SBATCH_REQUEUE": "1"}
    filters = {"SQUEUE_NAMES": "x", "SQUEUE_PARTITION": "nosuch", "SINFO_PARTITION": "nosuch", "LOGNAME": "daemon"}
    for name, value in (variables | filters).items():
        monkeypatch.setenv(name, value)
    gone, seen = tmp_path / "temporary", tmp_path / "seen"
    gone.mkdir()
    monkeypatch.chdir(gone)
    shell = f'{WAIT.format(seen)}; echo "$SLURM_NODEID|$RLHF_NODES|$(pwd -P)"'
    job_request = make_request(tmp_path, shell, num_nodes=2)
    job = scheduler.submit(replace(job_request, memory_gb=0.25, time_limit_s=600))
    monkeypatch.chdir(tmp_path)
    gone.rmdir()
    assert scheduler.inventory().node_names
    assert scheduler.find(run_id_of(tmp_path), 1) == job.model_copy(update={"command": ()})
    assert cluster.command("squeue", "--noheader").strip() == "", "the control"
    details = cluster.command("scontrol", "show", "job", job.job_id)
    assert "TimeLimit=00:10:00" in details
    assert "Requeue=0" in details
    seen.touch()
    until(lambda: state(scheduler, job) is JobState.ENDED)
    assert status(scheduler, job).scheduler_state == "COMPLETED", output(job_request)
    lines = sorted(line for line in output(job_request).splitlines() if "|" in line)
    # Any node: one that other tests used may still be completing.
    words = cluster.command("scontrol", "show", "job", job.job_id).split()
    (taken,) = [word.removeprefix("NodeList=") for word in words if word.startswith("NodeList=")]
    names = cluster.command("scontrol", "show", "hostnames", taken).split()
    nodes = ",".join(f"{name}=127.0.0.1" for name in names)
    assert len(names) == 2
    assert lines == [f"{index}|{nodes}|{job_request.scheduler_dir.resolve()}" for index in range(2)]


def test_one_dead_agent_ends_the_job(tmp_path: Path, scheduler: SlurmScheduler) -> None:
    shell = 'test "$SLURM_NODEID" = 0 && exit 3; sleep 300'
    submission = scheduler.submit(make_request(tmp_path, shell, num_nodes=2))
    until(lambda: state(scheduler, submission) is JobState.ENDED)
    assert status(scheduler, submission).scheduler_state == "FAILED"


def test_a_job_that_ignores_sigterm_is_cancelled_anyway(tmp_path: Path, scheduler: SlurmScheduler) -> None:
    shell = f"trap '' TERM; echo $$ > {tmp_path}/pid; while :; do sleep 1; done"
    submission = scheduler.submit(make_request(tmp_path, shell))
    until((tmp_path / "pid").exists)
    until(lambda: state(scheduler, submission) is JobState.RUNNING)
    assert scheduler.cancel(submission)
    assert state(scheduler, submission) is JobState.ENDED
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()
    assert scheduler.cancel(submission)  # harmless


def test_a_waiting_job_has_a_reason(tmp_path: Path, cluster: Cluster, scheduler: SlurmScheduler) -> None:
    first = scheduler.submit(make_request(tmp_path, "sleep 300", num_nodes=3, gpus_per_node=2))
    until(lambda: state(scheduler, first) is JobState.RUNNING)
    second = scheduler.submit(make_request(tmp_path, "true", num_nodes=3, gpus_per_node=2, attempt=2))
    until(lambda: re.search("Resources|Priority", status(scheduler, second).reason))
    assert [state(scheduler, one) for one in (first, second)] == [JobState.RUNNING, JobState.PENDING]
    cluster.command("scontrol", "suspend", first.job_id)
    until(lambda: status(scheduler, first).scheduler_state == "SUSPENDED")
    assert state(scheduler, first) is JobState.RUNNING  # it has not ended, and will continue
    cluster.command("scontrol", "resume", first.job_id)
    assert scheduler.cancel(second)
    assert scheduler.cancel(first)


def test_a_forgotten_job_has_ended_and_a_new_one_is_not_forgotten(scheduler: SlurmScheduler, tmp_path: Path) -> None:
    """With the control: a job newer than the shared answer is queried instead of taken for forgotten."""
    queue.listing()
    job = scheduler.submit(make_request(tmp_path, "sleep 300"))
    assert job.job_id not in queue.listing(max_age_s=60.0).rows
    assert state(scheduler, job) in (JobState.PENDING, JobState.RUNNING)
    gone = status(scheduler, job.model_copy(update={"job_id": "999999999"}))
    assert (gone.state, gone.reason) == (JobState.ENDED, "Slurm no longer has a record of the job")
    assert scheduler.cancel(job)


def test_a_lost_node_is_named(scheduler: SlurmScheduler, cluster: Cluster, tmp_path: Path) -> None:
    job = scheduler.submit(make_request(tmp_path, "sleep 300", num_nodes=2))
    until(lambda: state(scheduler, job) is JobState.RUNNING)
    cluster.command("scontrol", "update", "nodename=node2", "state=down", "reason=test")
    until(lambda: state(scheduler, job) is JobState.ENDED)
    try:
        assert status(scheduler, job).scheduler_state == "NODE_FAIL"
        assert status(scheduler, job).lost_nodes == ("node2",)
    finally:
        # The node may have come back by itself.
        cluster.command("scontrol", "update", "nodename=node2", "state=resume", check=False)


def test_a_job_of_another_cluster_is_unknown_and_neither_cancelled_nor_submitted_again(
    tmp_path: Path, cluster: Cluster, scheduler: SlurmScheduler
) -> None:
    """A controller that continues a run on a host of another cluster.

    Control: without the recorded name, the job counts as ended and is submitted a second time.
    """
    here = scheduler.inventory().cluster
    assert here == cluster.command("scontrol", "show", "config").partition("ClusterName")[2].split()[1]
    gone = Submission(attempt=1, scheduler="slurm", job_id="999999999", command=(), marker="x/1", cluster="east")
    found = status(scheduler, gone)
    expected = f"the job belongs to the Slurm cluster east, but this host belongs to the cluster {here}"
    assert (found.state, found.reason) == (JobState.UNKNOWN, expected)
    assert state(scheduler, gone.model_copy(update={"cluster": here})) is JobState.ENDED

    # A job here with the number of one there is neither taken for it nor cancelled.
    ours = scheduler.submit(make_request(tmp_path, "sleep 300"))
    assert ours.cluster == here
    theirs = gone.model_copy(update={"job_id": ours.job_id})
    until(lambda: state(scheduler, ours) is JobState.RUNNING)
    assert state(scheduler, theirs) is JobState.UNKNOWN
    with pytest.raises(SchedulerError, match=expected):
        scheduler.cancel(theirs)
    assert state(scheduler, ours) is JobState.RUNNING

    request = make_request(tmp_path, "sleep 300", attempt=2, cluster="east")
    run_dir, journal = planned(tmp_path, request)
    with pytest.raises(SchedulerError, match=expected):
        submit_once(run_dir, request, scheduler, journal)
    assert jobs_of(cluster, tmp_path) == [ours.job_id]
    unnamed = make_request(tmp_path, "sleep 300", attempt=2)
    second = submit_once(run_dir, unnamed, scheduler, journal)
    assert second is not None
    assert sorted(jobs_of(cluster, tmp_path)) == sorted([ours.job_id, second.job_id])
    assert scheduler.cancel(ours)
    assert scheduler.cancel(second)


def test_without_slurmctld_jobs_are_unknown_and_nothing_is_submitted(
    tmp_path: Path, cluster: Cluster, scheduler: SlurmScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    submission = scheduler.submit(make_request(tmp_path, "sleep 300"))
    until(lambda: state(scheduler, submission) is JobState.RUNNING)
    cluster.stop("slurmctld")
    try:
        until(lambda: state(scheduler, submission) is JobState.UNKNOWN)
        with pytest.raises(SchedulerUnavailable, match="controller does not respond"):
            scheduler.find(run_id_of(tmp_path), 2)
        with pytest.raises(SchedulerUnavailable, match="controller does not respond"):
            scheduler.submit(make_request(tmp_path, "true", attempt=2))
        with pytest.raises(SchedulerUnavailable, match="controller does not respond"):
            scheduler.inventory()
        with monkeypatch.context() as hurry:
            hurry.setattr(slurm_scheduler, "CANCEL_S", 1.0)
            with pytest.raises(SchedulerUnavailable, match=r"is unknown: .*controller does not respond"):
                scheduler.cancel(submission)
    finally:
        cluster.start("slurmctld")
    until(lambda: state(scheduler, submission) is JobState.RUNNING)
    assert scheduler.cancel(submission)


def test_refusals_of_slurm_are_reported_verbatim(tmp_path: Path, scheduler: SlurmScheduler) -> None:
    with pytest.raises(SubmissionFailed, match="invalid partition specified: nowhere"):
        scheduler.submit(make_request(tmp_path, "true", SlurmSpec(partition="nowhere")))
    assert scheduler.find(run_id_of(tmp_path), 1) is None


# ---------------------------------------------------------------------------------------------------------------------
# Once only


def planned(folder: Path, request: JobRequest) -> tuple[RunDir, Journal]:
    """Directory and journal of a run with a planned attempt."""
    run_dir = RunDir.of(folder / "runs", request.run_id)
    run_dir.root.mkdir(parents=True, exist_ok=True)
    journal = Journal(run_dir, token=1)
    record_plan(run_dir, request.placement, journal)
    return run_dir, journal


def wrap_program(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str) -> None:
    """Put a shell script in the place of a program; ``{real}`` in it is the program's own path."""
    real = subprocess.check_output(["sh", "-c", f"command -v {name}"], text=True).strip()
    wrapper = folder / "bin" / name
    wrapper.parent.mkdir()
    wrapper.write_text("#!/bin/sh\n" + script.replace("{real}", real))
    wrapper.chmod(0o755)
    path = subprocess.check_output(["sh", "-c", 'printf %s "$PATH"'], text=True)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{path}")


def lose_the_answer(folder: Path, monkeypatch: pytest.MonkeyPatch, *, first: str) -> None:
    """Make sbatch fail as if the controller's answer were lost, after the job was accepted by ``first``, if any."""
    error = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    wrap_program(folder, monkeypatch, "sbatch", f"{first}\necho '{error}' >&2\nexit 1\n")


def jobs_of(cluster: Cluster, folder: Path) -> list[str]:
    return cluster.command("squeue", "--noheader", f"--name={run_id_of(folder)}", "--format=%i").split()


@pytest.mark.parametrize(
    "first",
    ['{real} "$@" >/dev/null', '{real} --comment=ours/1 "$@" >/dev/null', ""],
    ids=["accepted", "accepted with the comment of a plug-in", "control: not accepted"],
)
def test_a_lost_answer_never_makes_two_jobs(
    tmp_path: Path, cluster: Cluster, scheduler: SlurmScheduler, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """The next controller adopts an existing job, and submits one if there is none."""
    request = make_request(tmp_path, "sleep 300")
    run_dir, journal = planned(tmp_path, request)
    with monkeypatch.context() as broken:
        lose_the_answer(tmp_path, broken, first=first)
        with pytest.raises(SchedulerError, match="did not confirm"):
            submit_once(run_dir, request, scheduler, journal)
    before = jobs_of(cluster, tmp_path)
    assert len(before) == bool(first)
    submission = submit_once(run_dir, request, scheduler, journal)
    assert submission is not None
    assert jobs_of(cluster, tmp_path) == [submission.job_id]
    assert before in ([], [submission.job_id])
    # Negative control: without the search there would be two jobs.
    scheduler.submit(request)
    assert len(jobs_of(cluster, tmp_path)) == 2


# ---------------------------------------------------------------------------------------------------------------------
# The shared queue


def test_many_watchers_share_one_query_of_the_queue(
    tmp_path: Path, scheduler: SlurmScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three processes, many queries, one squeue; as a control, a query that needs a fresh answer runs squeue again."""
    count = tmp_path / "count"
    wrap_program(tmp_path, monkeypatch, "squeue", f'echo 1 >> {count}\nexec {{real}} "$@"\n')
    age = 600.0  # seconds, so that a slow machine cannot make it two
    code = f"from rlhf_core.scheduler.slurm import queue as q\nfor _ in range(20): assert not q.listing({age}).problem"
    watchers = [subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2]) for _ in range(3)]
    assert [watcher.wait(120) for watcher in watchers] == [0, 0, 0]
    assert count.read_text() == "1\n"
    queue.listing(max_age_s=0.0)
    assert count.read_text() == "1\n1\n"


def test_a_torn_cache_is_ignored(tmp_path: Path, scheduler: SlurmScheduler) -> None:
    assert not queue.listing(600.0).problem
    for file in (tmp_path / "cache" / "rlhf").glob("squeue-*.json"):
        file.write_text('{"asked_at": 9e9, "rows"')
    assert not queue.listing(600.0).problem
