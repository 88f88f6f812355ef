"""Jobs of the Slurm scheduler on a real, throw-away cluster.

They are submitted once, observed correctly, and ended with all their children.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_requests import job_request, run_id_of
from process_tools import until
from slurm_cluster import WHY_NOT, Cluster, missing_programs

from rlhf_core.errors import SchedulerError, SchedulerUnavailable, SubmissionFailed
from rlhf_core.launch.journal import Journal
from rlhf_core.launch.start import record_plan, submit_once
from rlhf_core.run_dir.run import RunDir
from rlhf_core.scheduler import JobRequest, JobState, slurm, slurm_queue
from rlhf_core.scheduler.slurm import SlurmScheduler
from rlhf_core.schemas.cluster import SlurmSpec
from rlhf_core.schemas.resources import Submission

pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.skipif(bool(missing_programs()), reason=WHY_NOT),
]


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
        run_dir.attempt(1).scheduler_dir,
        *("sh", "-c", shell),
        run_id=run_dir.run_id,
        placed=placed,
        time_limit_s=3600,
        slurm=slurm or SlurmSpec(),
    )


def state(scheduler: SlurmScheduler, submission: Submission) -> JobState:
    return scheduler.status([submission])[submission.job_id].state


def test_agents_get_their_node_and_all_addresses(tmp_path: Path, scheduler: SlurmScheduler) -> None:
    """The excluded node is left out, and addresses are numeric: node names need not resolve."""
    shell = f'echo "$RLHF_NODES $EXTRA $MORE $RLHF_JOB $CUDA_VISIBLE_DEVICES" > {tmp_path}/$SLURM_NODEID'
    slurm = SlurmSpec(environment={"EXTRA": "a b", "MORE": "c"}, setup=("export CHECKED=1",))
    request = make_request(tmp_path, shell, slurm, num_nodes=2, gpus_per_node=2, excluded_nodes=("node1",))
    submission = scheduler.submit(request)
    until(lambda: state(scheduler, submission) is JobState.ENDED)
    status = scheduler.status([submission])[submission.job_id]
    assert (status.scheduler_state, status.nodes) == ("COMPLETED", ("node2", "node3"))
    expected = f"node2=127.0.0.1,node3=127.0.0.1 a b c {run_id_of(tmp_path)}/1 0,1\n"
    assert [(tmp_path / index).read_text() for index in ("0", "1")] == [expected, expected]


def test_one_dead_agent_ends_the_job(tmp_path: Path, scheduler: SlurmScheduler) -> None:
    shell = 'test "$SLURM_NODEID" = 0 && exit 3; sleep 300'
    submission = scheduler.submit(make_request(tmp_path, shell, num_nodes=2))
    until(lambda: state(scheduler, submission) is JobState.ENDED)
    assert scheduler.status([submission])[submission.job_id].scheduler_state == "FAILED"


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
    until(lambda: re.search("Resources|Priority", scheduler.status([second])[second.job_id].reason))
    status = scheduler.status([first, second])
    assert [status[one.job_id].state for one in (first, second)] == [JobState.RUNNING, JobState.PENDING]
    cluster.command("scontrol", "suspend", first.job_id)
    until(lambda: scheduler.status([first])[first.job_id].scheduler_state == "SUSPENDED")
    assert state(scheduler, first) is JobState.RUNNING  # it has not ended, and will continue
    cluster.command("scontrol", "resume", first.job_id)
    assert scheduler.cancel(second)
    assert scheduler.cancel(first)


def test_a_forgotten_job_has_ended(tmp_path: Path, scheduler: SlurmScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue no longer lists it. Control: a queue that does not respond is no evidence."""
    gone = Submission(attempt=1, scheduler="slurm", job_id="999999999", command=(), marker="x/1")
    status = scheduler.status([gone])[gone.job_id]
    assert (status.state, status.reason) == (JobState.ENDED, "Slurm no longer has a record of the job")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "no-such.conf"))
    assert state(scheduler, gone) is JobState.UNKNOWN


def test_a_job_of_another_cluster_is_unknown_and_neither_cancelled_nor_submitted_again(
    tmp_path: Path, cluster: Cluster, scheduler: SlurmScheduler
) -> None:
    """A controller that continues a run on a host of another cluster.

    Control: without the recorded name, the job counts as ended and is submitted a second time.
    """
    here = scheduler.inventory().cluster
    assert here == cluster.command("scontrol", "show", "config").partition("ClusterName")[2].split()[1]
    gone = Submission(attempt=1, scheduler="slurm", job_id="999999999", command=(), marker="x/1", cluster="east")
    status = scheduler.status([gone])[gone.job_id]
    expected = f"the job belongs to the Slurm cluster east, but this host belongs to the cluster {here}"
    assert (status.state, status.reason) == (JobState.UNKNOWN, expected)
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
            hurry.setattr(slurm, "CANCEL_S", 1.0)
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


def lose_the_answer(folder: Path, monkeypatch: pytest.MonkeyPatch, *, accept: bool) -> None:
    """Make sbatch fail as if the controller's answer were lost, either after the job was accepted or before."""
    first = '{real} "$@" >/dev/null; ' if accept else ""
    error = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    wrap_program(folder, monkeypatch, "sbatch", f"{first}echo '{error}' >&2\nexit 1\n")


def jobs_of(cluster: Cluster, folder: Path) -> list[str]:
    return cluster.command("squeue", "--noheader", f"--name={run_id_of(folder)}", "--format=%i").split()


@pytest.mark.parametrize("accept", [True, False], ids=["accepted", "control: not accepted"])
def test_a_lost_answer_never_makes_two_jobs(
    tmp_path: Path,
    cluster: Cluster,
    scheduler: SlurmScheduler,
    monkeypatch: pytest.MonkeyPatch,
    accept: bool,
) -> None:
    """The next controller adopts an existing job, and submits one if there is none."""
    request = make_request(tmp_path, "sleep 300")
    run_dir, journal = planned(tmp_path, request)
    with monkeypatch.context() as broken:
        lose_the_answer(tmp_path, broken, accept=accept)
        with pytest.raises(SchedulerError, match="did not confirm"):
            submit_once(run_dir, request, scheduler, journal)
    before = jobs_of(cluster, tmp_path)
    assert len(before) == int(accept)
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
    code = f"from rlhf_core.scheduler import slurm_queue as q\nfor _ in range(20): assert not q.listing({age}).problem"
    watchers = [subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2]) for _ in range(3)]
    assert [watcher.wait(120) for watcher in watchers] == [0, 0, 0]
    assert count.read_text() == "1\n"
    slurm_queue.listing(max_age_s=0.0)
    assert count.read_text() == "1\n1\n"


def test_a_torn_cache_is_ignored(tmp_path: Path, scheduler: SlurmScheduler) -> None:
    assert not slurm_queue.listing(600.0).problem
    for file in (tmp_path / "cache" / "rlhf").glob("squeue-*.json"):
        file.write_text('{"asked_at": 9e9, "rows"')
    assert not slurm_queue.listing(600.0).problem
