"""The contract of all schedulers, tested with the fake of the control-plane tests, this machine, and a real Slurm."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from control_fakes import FakeScheduler
from job_requests import job_request, run_id_of
from process_tools import until
from slurm_cluster import Cluster, needs_slurm

from rlhf_core.errors import SubmissionFailed
from rlhf_core.scheduler import JobRequest, JobState, Scheduler
from rlhf_core.scheduler.local import LocalScheduler
from rlhf_core.scheduler.slurm.scheduler import SlurmScheduler
from rlhf_core.schemas.resources import Submission, job_marker

pytestmark = pytest.mark.end_to_end

LONG = "sleep 300"
SHORT = "echo it was here"


@dataclass
class Site:
    """A scheduler, and a folder for the files of its jobs."""

    scheduler: Scheduler
    folder: Path
    submitted: list[Submission] = field(default_factory=list)

    @property
    def run_id(self) -> str:
        return run_id_of(self.folder)

    def request(self, shell: str, attempt: int = 1, num_nodes: int = 1, run_id: str = "") -> JobRequest:
        run_id = run_id or self.run_id
        return job_request(
            self.folder / run_id / "attempts" / str(attempt) / "scheduler",
            *("sh", "-c", shell),
            run_id=run_id,
            placed={"attempt": attempt, "num_nodes": num_nodes},
        )

    def submit(self, shell: str = LONG, attempt: int = 1, run_id: str = "") -> Submission:
        made = self.scheduler.submit(self.request(shell, attempt, run_id=run_id))
        self.submitted.append(made)
        return made

    def state(self, submission: Submission) -> JobState:
        return self.scheduler.status([submission])[submission.job_id].state

    def found(self, attempt: int = 1) -> str:
        """Id of the job found; empty if there is none."""
        found = self.scheduler.find(self.run_id, attempt)
        return found.job_id if found is not None else ""

    def living(self) -> list[str]:
        return sorted(one.submission.job_id for one in self.scheduler.living() if one.run_id == self.run_id)

    def wait_until(self, submission: Submission, state: JobState) -> None:
        until(lambda: self.state(submission) is state)


def fill(site: Site) -> None:
    """Run a job that takes every core of every node, so that further jobs wait."""
    inventory = site.scheduler.inventory()
    request = site.request(LONG, attempt=2, num_nodes=len(inventory.node_names))
    job = site.scheduler.submit(replace(request, cpus_per_node=inventory.cpus_per_node))
    site.submitted.append(job)
    site.wait_until(job, JobState.RUNNING)


def fake_scheduler() -> FakeScheduler:
    """Fake scheduler whose jobs end by themselves at the same points as those of the others."""
    scheduler = FakeScheduler(output="it was here\n")

    def ends(request: JobRequest) -> None:
        if request.command[-1] == SHORT:
            scheduler.jobs[next(reversed(scheduler.jobs))].state = JobState.ENDED

    scheduler.on_submit = ends
    return scheduler


@pytest.fixture(params=["fake", "local", pytest.param("slurm", marks=needs_slurm)])
def site(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A site of each kind; jobs that a test leaves running are ended."""
    scheduler: Scheduler = LocalScheduler()
    if request.param == "fake":
        scheduler = fake_scheduler()
    elif request.param == "slurm":
        cluster: Cluster = request.getfixturevalue("cluster")
        monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        scheduler = SlurmScheduler()
    made = Site(scheduler, tmp_path)
    with ExitStack() as stack:
        stack.callback(lambda: [scheduler.cancel(one) for one in made.submitted])
        yield made


def test_the_inventory_has_a_node(site: Site) -> None:
    found = site.scheduler.inventory()
    assert found.node_names
    assert found.cpus_per_node > 0
    assert found.memory_gb > 0


def test_a_script_names_the_command_and_starts_nothing(site: Site) -> None:
    assert LONG in site.scheduler.script(site.request(LONG))
    assert (site.found(), site.living()) == ("", [])


def test_a_job_is_found_by_its_attempt_and_by_no_other(site: Site) -> None:
    job = site.submit()
    assert (job.attempt, job.scheduler) == (1, site.scheduler.name)
    assert job.marker == job_marker(site.run_id, 1)
    found = site.scheduler.find(site.run_id, 1)
    assert found is not None
    assert (found.job_id, found.attempt, found.scheduler, found.marker) == (job.job_id, 1, job.scheduler, job.marker)
    assert site.found(attempt=2) == ""
    assert site.found(attempt=11) == ""
    assert site.scheduler.find(f"{site.run_id}x", 1) is None
    assert site.living() == [job.job_id]
    # It can be queried and cancelled like the submitted job.
    site.wait_until(found, JobState.RUNNING)
    assert site.scheduler.cancel(found)
    assert site.state(job) is JobState.ENDED


def test_of_two_jobs_of_an_attempt_the_first_is_found_and_then_the_other(site: Site) -> None:
    """There must never be two. If there are, this machine cannot distinguish their processes, and ends both."""
    first, second = site.submit(), site.submit()
    # A process in the middle of an exec briefly has no environment by which it could be identified.
    until(lambda: site.living() == sorted([first.job_id, second.job_id]))
    until(lambda: site.found() == first.job_id)
    assert site.scheduler.cancel(first)
    left = [] if isinstance(site.scheduler, LocalScheduler) else [second.job_id]
    assert site.living() == left
    assert site.found() == "".join(left)


def test_an_ended_job_has_left_its_output_and_is_not_found(site: Site) -> None:
    """A found job is adopted and awaited, so an ended one must not be found; both queries must agree about it."""
    job = site.submit(SHORT)
    site.wait_until(job, JobState.ENDED)
    assert (site.found(), site.living()) == ("", [])
    assert site.scheduler.cancel(job), "harmless"
    assert site.state(job) is JobState.ENDED
    (log,) = site.request(SHORT).scheduler_dir.glob("*_log.out")
    assert log.name.startswith(job.job_id)
    assert "it was here" in log.read_text()


def test_an_unknown_job_has_ended_and_cancelling_it_is_harmless(site: Site) -> None:
    never = Submission(
        attempt=1,
        scheduler=site.scheduler.name,
        job_id="4194999",  # above the process ids of Linux, and far above the job ids of the cluster
        command=("sh", "-c", LONG),
        process_started=1.0,
        marker=job_marker(site.run_id, 1),
    )
    assert site.state(never) is JobState.ENDED
    assert site.scheduler.cancel(never)
    assert (site.found(), site.living()) == ("", [])


def test_a_cancelled_job_is_gone_and_can_be_cancelled_again(site: Site) -> None:
    job, other = site.submit(), site.submit(attempt=2)
    site.wait_until(job, JobState.RUNNING)
    for _ in range(2):
        assert site.scheduler.cancel(job)
        assert site.state(job) is JobState.ENDED
        assert site.found() == ""
    assert site.found(attempt=2) == other.job_id, "another attempt is left alone"
    assert site.living() == [other.job_id]


def test_a_job_can_be_cancelled_right_after_it_was_submitted(site: Site) -> None:
    job = site.submit(f"sleep 60; touch {site.folder}/began; {LONG}")
    assert site.scheduler.cancel(job)
    assert site.state(job) is JobState.ENDED
    assert (site.found(), site.living()) == ("", [])
    assert not (site.folder / "began").exists()


@pytest.mark.parametrize("site", ["fake", pytest.param("slurm", marks=needs_slurm)], indirect=True)
def test_a_waiting_job_is_found_and_never_starts_once_it_is_cancelled(site: Site) -> None:
    """Not on this machine, whose jobs never wait."""
    if isinstance(site.scheduler, FakeScheduler):
        site.scheduler.first_state = JobState.PENDING
    else:
        fill(site)
    job = site.submit(f"touch {site.folder}/began")
    assert site.state(job) is JobState.PENDING
    assert site.found() == job.job_id
    assert job.job_id in site.living()
    assert site.scheduler.cancel(job)
    assert site.state(job) is JobState.ENDED
    assert site.found() == ""
    assert not (site.folder / "began").exists()


def test_several_jobs_are_distinguished_in_one_answer(site: Site) -> None:
    assert site.scheduler.status([]) == {}
    done, running = site.submit(SHORT), site.submit(attempt=2)
    site.wait_until(done, JobState.ENDED)
    site.wait_until(running, JobState.RUNNING)
    answer = site.scheduler.status([done, running])
    assert {job_id: status.state for job_id, status in answer.items()} == {
        done.job_id: JobState.ENDED,
        running.job_id: JobState.RUNNING,
    }
    assert answer[running.job_id].nodes, "where it is"


def test_a_request_for_too_many_nodes_is_refused_or_waits(site: Site) -> None:
    """Both are correct, depending on the setup of Slurm; a job never runs on fewer nodes."""
    job_request = site.request(LONG, num_nodes=len(site.scheduler.inventory().node_names) + 1)
    try:
        job = site.scheduler.submit(job_request)
    except SubmissionFailed:
        assert (site.found(), site.living()) == ("", [])
    else:
        site.submitted.append(job)
        assert site.state(job) is JobState.PENDING
        assert site.found() == job.job_id
