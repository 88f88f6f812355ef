"""`rlhf cancel` from another process: with a live controller, without one, and with one that does not respond."""

import errno
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from control_fakes import FakeAgent, make_spec
from harness import ControllerHarness
from kill_points import Killed

from rlhf_core.control.attempts.jobs import CANCEL_TIMEOUT_S, order_to_end
from rlhf_core.control.cancel import Cancelled, cancel, cancel_run
from rlhf_core.control.controller import close
from rlhf_core.control.steps import drive
from rlhf_core.errors import RunCancelled, RunDirError, SchedulerError
from rlhf_core.files.whole import read_model, write_model
from rlhf_core.launch.journal import read_record
from rlhf_core.run_dir.run import RunDir
from rlhf_core.scheduler.base import JobState
from rlhf_core.schemas.attempts import AttemptState, RunState, StageState
from rlhf_core.schemas.journal import CancelStarted
from rlhf_core.schemas.reports import AgentCommand


def cancelled(harness: ControllerHarness, run_dir: RunDir, **options: Any) -> tuple[Cancelled, list[str]]:
    messages: list[str] = []
    clock, sleep = harness.clock, harness.clock.sleep
    found = cancel_run(
        run_dir,
        harness.site,
        harness.store,
        "enough",
        log=messages.append,
        **{"clock": clock, "sleep": sleep, **options},
    )
    return found, messages


@pytest.fixture
def follows_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make agents obey orders at once."""
    monkeypatch.setattr("rlhf_core.control.cancel.CANCEL_TIMEOUT_S", 0.0)


@pytest.mark.usefixtures("follows_orders")
def test_without_a_controller_the_command_cancels_the_run_itself(harness: ControllerHarness) -> None:
    run_dir = harness.killed_in_training()
    found, messages = cancelled(harness, run_dir)
    assert (found.state, found.job_ended) == (RunState.CANCELLED, True)
    assert "from here" in messages[0]
    record = read_record(run_dir)
    assert record.attempts[1].state is AttemptState.CANCELLED
    assert record.cause == "enough"
    assert harness.scheduler.cancelled == ["101"]
    assert not run_dir.cancel_request.exists()


def test_the_job_of_an_attempt_that_was_given_up_is_ended(harness: ControllerHarness) -> None:
    """Its agents were silent, and its controller could not end the job, or was killed before."""
    run_dir = harness.run()
    harness.trains_for_ever(run_dir)
    harness.scheduler.stubborn = True
    with pytest.raises(SchedulerError, match="could not be ended"):
        drive(harness.controller(run_dir))
    harness._stack.close()
    assert read_record(run_dir).attempts[1].state is AttemptState.LOST
    with pytest.raises(SchedulerError, match="could not be ended"):
        cancelled(harness, run_dir)
    assert read_record(run_dir).state is not RunState.CANCELLED, "the next `rlhf cancel` tries again"
    harness.scheduler.stubborn = False
    found, _ = cancelled(harness, run_dir)
    assert (found.state, found.job_ended) == (RunState.CANCELLED, True)
    assert harness.scheduler.jobs["101"].state is JobState.ENDED


def test_a_living_controller_is_asked(harness: ControllerHarness) -> None:
    run_dir = harness.killed_in_training()
    harness.store.acquire_lease(run_dir.run_id, "b@elsewhere:1:1.00", 3600)
    requests = []

    def obeys(seconds: float) -> None:
        request = read_model(run_dir.cancel_request, AgentCommand)
        requests.append(request)
        with run_dir.control.open("a") as journal:
            journal.write(
                '{"sequence":90,"token":9,"time":"2026-01-01T00:00:00Z",'
                '"event":{"kind":"run_moved","state":"cancelled","cause":"enough"}}\n'
            )
        harness.scheduler.end_all()

    found, _ = cancelled(harness, run_dir, sleep=obeys)
    assert requests[0].reason == "enough"
    assert found.state is RunState.CANCELLED
    assert harness.scheduler.cancelled == [], "its controller did it"


def test_an_unresponsive_controller_does_not_keep_the_job_alive(harness: ControllerHarness) -> None:
    run_dir = harness.killed_in_training()
    harness.store.acquire_lease(run_dir.run_id, "b@elsewhere:1:1.00", 3600)
    found, _ = cancelled(harness, run_dir)
    assert harness.scheduler.cancelled == ["101"]
    assert found.job_ended
    assert "does not respond" in found.message


def test_a_request_outlasts_an_outage_of_the_scheduler(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = harness.killed_in_training()
    harness.store.acquire_lease(run_dir.run_id, "b@elsewhere:1:1.00", 3600)

    def away(submission: object) -> bool:
        raise SchedulerError("Slurm's controller does not respond")

    monkeypatch.setattr(harness.scheduler, "cancel", away)
    with pytest.raises(SchedulerError, match=r"does not respond\. The request to end run .* stays"):
        cancelled(harness, run_dir)
    assert run_dir.cancel_request.is_file()


def test_a_submitted_but_unrecorded_job_is_found(harness: ControllerHarness) -> None:
    """Its controller is frozen after the submission and keeps its lease."""
    run_dir = harness.run()

    def killed(request: object) -> None:
        raise Killed

    harness.scheduler.on_submit = killed
    with pytest.raises(Killed):
        drive(harness.controller(run_dir))
    harness._stack.close()
    assert read_record(run_dir).attempts[1].submission is None
    harness.store.acquire_lease(run_dir.run_id, "b@elsewhere:1:1.00", 3600)
    harness.scheduler.stubborn = True
    with pytest.raises(SchedulerError, match="could not be ended"):
        cancelled(harness, run_dir)
    harness.scheduler.stubborn = False
    found, _ = cancelled(harness, run_dir)
    assert harness.scheduler.cancelled == ["101", "101"]
    assert found.job_ended
    assert "none of its jobs is running" in found.message


@pytest.mark.usefixtures("follows_orders")
def test_a_job_that_does_not_end_is_an_error(harness: ControllerHarness) -> None:
    run_dir = harness.killed_in_training()
    harness.scheduler.stubborn = True
    with pytest.raises(SchedulerError, match="could not be ended"):
        cancelled(harness, run_dir)
    assert read_record(run_dir).state is RunState.TRAINING, "it must not be called cancelled while its job runs"


def read_only(*_given: object, **_named: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_job_is_ended_even_if_the_run_directory_is_read_only(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = harness.killed_in_training()
    monkeypatch.setattr("rlhf_core.control.cancel.write_model", read_only)
    found, _ = cancelled(harness, run_dir)
    assert harness.scheduler.cancelled == ["101"]
    assert (found.state, found.job_ended) == (RunState.TRAINING, True)
    assert f"{run_dir.root} cannot be written (Read-only file system)" in found.message
    assert f"mark the run with `rlhf cancel {run_dir.run_id}`" in found.message


def test_a_run_of_another_user_is_left_to_that_user(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, this said that the scheduler had ended the job."""
    run_dir = harness.killed_in_training()

    def refused(*_given: object, **_named: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("rlhf_core.control.cancel.write_model", refused)
    monkeypatch.setattr("rlhf_core.control.cancel.os.geteuid", lambda: run_dir.root.stat().st_uid + 1)
    with pytest.raises(RunDirError, match=rf"{run_dir.root} belongs to .* can end this run\. If it was requested in"):
        cancelled(harness, run_dir)
    assert harness.scheduler.cancelled == []


def test_an_ended_run_may_be_read_only(harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = harness.completed()
    harness._stack.close()
    harness.scheduler.end_all()
    monkeypatch.setattr(Path, "unlink", read_only)
    found, _ = cancelled(harness, run_dir)
    assert "had already ended" in found.message


def test_a_run_that_has_ended_is_left_alone(harness: ControllerHarness) -> None:
    run_dir = harness.completed()
    harness._stack.close()
    harness.scheduler.end_all()
    before = run_dir.control.read_bytes()
    found, _ = cancelled(harness, run_dir)
    assert "had already ended" in found.message
    assert found.job_ended
    assert run_dir.control.read_bytes() == before


@pytest.mark.usefixtures("follows_orders")
def test_a_run_whose_job_completed_first_is_completed(harness: ControllerHarness) -> None:
    """Before, its stage was left running, and the command called the run cancelled."""
    run_dir = harness.killed_in_training()
    FakeAgent(run_dir).whole_run()
    found, _ = cancelled(harness, run_dir)
    assert (found.state, found.job_ended) == (RunState.COMPLETED, True)
    assert "had completed before its job was told to end (completed)" in found.message
    assert {stage.state for stage in read_record(run_dir).stages} == {StageState.COMPLETED}


def test_a_live_job_is_never_reported_as_gone(harness: ControllerHarness) -> None:
    """Negative control of the proof, which comes from the scheduler and not from the request itself."""
    run_dir = harness.completed()
    harness._stack.close()
    found, _ = cancelled(harness, run_dir)
    assert not found.job_ended
    assert "may still be running" in found.message


@pytest.mark.usefixtures("follows_orders")
@pytest.mark.parametrize("save", [True, False])
def test_a_checkpoint_is_written_first_on_request(harness: ControllerHarness, save: bool) -> None:
    run_dir = harness.killed_in_training()
    agent = FakeAgent(run_dir)

    def obeys() -> None:
        order = read_model(run_dir.attempt(1).commands / "1.json", AgentCommand)
        if order is not None and order.kind == "stop_after_step":
            agent.checkpoint(5)
            agent.end(AttemptState.PREEMPTED)

    harness.scheduler.on_status = obeys
    found, _ = cancelled(harness, run_dir, save=save)
    assert (found.state, found.job_ended) == (RunState.CANCELLED, True)
    assert [checkpoint.step for checkpoint in run_dir.checkpoints()] == ([5] if save else [])
    assert read_record(run_dir).attempts[1].state is AttemptState.CANCELLED


@pytest.mark.parametrize(
    ("step_s", "most_s", "hurry_s", "saved"),
    [(1500, 3600, 9999, True), (1500, 900, 9999, False), (1500, 3600, 300, False)],
    ids=["within the limit", "longer than the limit", "a second request does not wait"],
)
def test_a_long_step_is_finished_and_saved_within_the_limit(
    harness: ControllerHarness, step_s: float, most_s: float, hurry_s: float, saved: bool
) -> None:
    run_dir = harness.killed_in_training(make_spec(supervise={"save_timeout_s": most_s}))
    agent, began = FakeAgent(run_dir), harness.clock.now

    def train() -> None:
        harness.clock.sleep(30.0)
        agent.status(sequence=2 + round(harness.clock.now))
        if harness.clock.now - began >= step_s:
            agent.checkpoint(5)
            agent.end(AttemptState.PREEMPTED)
        elif harness.clock.now - began >= hurry_s:
            write_model(run_dir.cancel_request, order_to_end("at once", save=False))

    harness.scheduler.on_status = train
    cancel(harness.controller(run_dir), "enough", save=True)
    assert [checkpoint.step for checkpoint in run_dir.checkpoints()] == ([5] if saved else [])
    assert read_record(run_dir).state is RunState.CANCELLED
    assert harness.clock.now - began < min(step_s, most_s, hurry_s) + 300.0


def test_a_controller_that_takes_over_does_not_wait_anew_for_a_checkpoint(harness: ControllerHarness) -> None:
    run_dir = harness.killed_in_training(make_spec(supervise={"save_timeout_s": 900}))
    agent, began = FakeAgent(run_dir), harness.clock.now

    def train() -> None:
        harness.clock.sleep(30.0)
        agent.status(sequence=2 + round(harness.clock.now))

    harness.scheduler.on_status = train
    order = order_to_end("enough", save=True)
    write_model(run_dir.cancel_request, order.model_copy(update={"time": order.time - timedelta(seconds=800)}))
    cancel(harness.controller(run_dir), "enough", save=True)
    assert read_record(run_dir).state is RunState.CANCELLED
    assert harness.clock.now - began < 300.0


def test_a_job_that_still_waits_for_nodes_has_nothing_to_save(harness: ControllerHarness) -> None:
    """The cancellation must not wait for a checkpoint of such a job."""
    run_dir = harness.killed_in_training()
    harness.scheduler.jobs["101"].state = JobState.PENDING
    began = harness.clock.now
    session = harness.controller(run_dir)
    cancel(session, "enough", save=True)
    assert harness.clock.now - began < 2 * CANCEL_TIMEOUT_S
    assert read_record(run_dir).state is RunState.CANCELLED


@pytest.mark.usefixtures("follows_orders")
@pytest.mark.parametrize("save", [True, False])
def test_a_job_is_ended_even_if_its_agent_cannot_be_told(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch, save: bool
) -> None:
    """On a full disk, the run stayed "cancelling", and each new controller failed in the same way."""
    run_dir = harness.killed_in_training()

    def full(path: Path, model: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("rlhf_core.control.attempts.jobs.write_model", full)
    began = harness.clock.now
    cancel(harness.controller(run_dir), "enough", save=save)
    assert read_record(run_dir).state is RunState.CANCELLED
    assert harness.scheduler.cancelled == ["101"]
    assert harness.clock.now - began < 60.0, "nothing is waited for that nobody was told to save"


def test_a_job_is_ended_even_if_its_files_cannot_be_read(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = harness.killed_in_training()
    session = harness.controller(run_dir)

    def stale() -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(session.watcher(1), "poll", stale)
    cancel(session, "enough")
    assert read_record(run_dir).state is RunState.CANCELLED
    assert harness.scheduler.cancelled == ["101"]


@pytest.mark.usefixtures("follows_orders")
def test_a_controller_that_takes_over_still_saves(harness: ControllerHarness) -> None:
    """The first one died after it had begun to cancel and before a checkpoint was written."""
    run_dir = harness.killed_in_training()
    write_model(run_dir.cancel_request, order_to_end("enough", save=True))
    harness.controller(run_dir).journal.append(CancelStarted(reason="enough"))
    with pytest.raises(RunCancelled):
        drive(harness.controller(run_dir))
    order = read_model(run_dir.attempt(1).commands / "1.json", AgentCommand)
    assert order is not None
    assert order.kind == "stop_after_step"


def test_a_run_whose_history_cannot_be_updated_is_released(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = harness.run()
    session = harness.controller(run_dir)

    def gone() -> str:
        raise RunDirError("gone")

    monkeypatch.setattr(session, "record", gone)
    with pytest.raises(RunDirError, match="gone"):
        close(session)
    harness.store.acquire_lease(run_dir.run_id, "b@elsewhere:1:1.00", 60)
    monkeypatch.undo()
