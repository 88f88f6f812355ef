"""Submission of an attempt: exactly once, even after a kill between submission and record."""

from pathlib import Path

import pytest
from control_fakes import FakeAgent, FakeScheduler, make_run, make_spec
from kill_points import Killed

from rlhf_core.allocation.planner import plan
from rlhf_core.config.site import load_site
from rlhf_core.files.whole import read_model
from rlhf_core.launch.journal import Journal
from rlhf_core.launch.start import agent_command, job_request, record_plan, submit_once
from rlhf_core.run_dir.run import RunDir
from rlhf_core.scheduler.base import JobRequest
from rlhf_core.schemas.attempts import AttemptState
from rlhf_core.schemas.changes import with_changes
from rlhf_core.schemas.resources import Submission


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "runs")


def planned(run_dir: RunDir, journal: Journal, scheduler: FakeScheduler) -> JobRequest:
    placement = record_plan(run_dir, plan(make_spec(), scheduler.inventory(), attempt=1), journal)
    return job_request(run_dir, make_spec(), placement, load_site())


def test_the_interface_to_agents_is_a_command_line(run_dir: RunDir) -> None:
    command = agent_command(run_dir, 3, "/opt/python")
    assert command == (
        "/opt/python",
        "-P",
        "-m",
        "rlhf_core.worker",
        "agent",
        "--run-dir",
        str(run_dir.root),
        "--attempt",
        "3",
    )


def test_plan_and_submission_are_recorded_in_order(run_dir: RunDir) -> None:
    scheduler, journal = FakeScheduler(), Journal(run_dir, token=1)
    request = planned(run_dir, journal, scheduler)
    assert request.cpus_per_node == 2
    submission = submit_once(run_dir, request, scheduler, journal)
    record = journal.record.attempts[1]
    assert record.state is AttemptState.SUBMITTED
    assert record.submission == submission == read_model(run_dir.attempt(1).submission, Submission)


def test_a_smaller_attempt_has_cores_for_all_engines(run_dir: RunDir) -> None:
    spec = make_spec(rollout={"engines": 4}, resources={"num_nodes": 4, "min_nodes": 1})
    for num_nodes, num_processes in ((4, 2 + 1), (1, 2 + 4)):
        smaller = with_changes(spec, {"resources.num_nodes": num_nodes})
        placement = plan(smaller, FakeScheduler(nodes=tuple("abcd")).inventory(), attempt=1)
        assert job_request(run_dir, spec, placement, load_site()).cpus_per_node == num_processes


def test_an_existing_plan_is_kept(run_dir: RunDir) -> None:
    """The job may have been submitted with it."""
    scheduler, journal = FakeScheduler(), Journal(run_dir, token=1)
    first = plan(make_spec(), scheduler.inventory(), attempt=1)
    record_plan(run_dir, first, journal)
    other = first.model_copy(update={"resumed_from_step": 5})
    assert record_plan(run_dir, other, journal) == first


def killed_after_submission(run_dir: RunDir, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch) -> JobRequest:
    """A controller that is killed after the scheduler has accepted the job and before anything is recorded."""

    def die(path: Path, model: object) -> None:
        raise Killed

    journal = Journal(run_dir, token=1)
    request = planned(run_dir, journal, scheduler)
    with monkeypatch.context() as patch:
        patch.setattr("rlhf_core.launch.start.write_model", die)
        with pytest.raises(Killed):
            submit_once(run_dir, request, scheduler, journal)
    assert len(scheduler.submitted) == 1
    assert not run_dir.attempt(1).submission.exists()
    return request


def test_an_attempt_that_ran_and_ended_unrecorded_is_not_started_again(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = FakeScheduler()
    request = killed_after_submission(run_dir, scheduler, monkeypatch)
    FakeAgent(run_dir).begin()
    scheduler.end_all()
    journal = Journal(run_dir, token=2)
    assert submit_once(run_dir, request, scheduler, journal) is None
    assert len(scheduler.submitted) == 1
    assert journal.record.attempts[1].state is AttemptState.SUBMITTED


def test_without_its_claim_the_unrecorded_attempt_would_be_started_again(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: a vanished job that never started may be submitted again; two never run."""
    scheduler = FakeScheduler()
    request = killed_after_submission(run_dir, scheduler, monkeypatch)
    scheduler.end_all()
    submit_once(run_dir, request, scheduler, Journal(run_dir, token=2))
    assert len(scheduler.submitted) == 2
