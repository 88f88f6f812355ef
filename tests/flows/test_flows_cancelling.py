"""`rlhf cancel` from another process: with a live controller, without one, and with one that does not respond."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from control_fakes import FakeAgent
from desk import Desk
from kill_points import Killed

from rlhf_core.control.attempts.jobs import CANCEL_TIMEOUT_S
from rlhf_core.control.cancel import Cancelled, cancel, cancel_run
from rlhf_core.control.steps import drive
from rlhf_core.errors import RunDirError, SchedulerError
from rlhf_core.files.whole import read_model
from rlhf_core.launch.journal import read_record
from rlhf_core.run_dir.run import RunDir
from rlhf_core.scheduler.base import JobState
from rlhf_core.schemas.attempts import AttemptState, RunState
from rlhf_core.schemas.reports import AgentCommand


def cancelled(desk: Desk, run_dir: RunDir, **options: Any) -> tuple[Cancelled, list[str]]:
    said: list[str] = []
    clock, sleep = desk.clock, desk.clock.sleep
    found = cancel_run(
        run_dir,
        desk.site,
        desk.store,
        "enough",
        say=said.append,
        **{"clock": clock, "sleep": sleep, **options},
    )
    return found, said


@pytest.fixture
def follows_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make agents obey orders at once."""
    monkeypatch.setattr("rlhf_core.control.cancel.CANCEL_TIMEOUT_S", 0.0)


@pytest.mark.usefixtures("follows_orders")
def test_without_a_controller_the_command_cancels_the_run_itself(desk: Desk) -> None:
    run_dir = desk.killed_in_training()
    found, said = cancelled(desk, run_dir)
    assert (found.state, found.job_ended) == (RunState.CANCELLED, True)
    assert "from here" in said[0]
    record = read_record(run_dir)
    assert record.attempts[1].state is AttemptState.CANCELLED
    assert record.cause == "enough"
    assert desk.scheduler.cancelled == ["101"]
    assert not run_dir.cancel_request.exists()


def test_a_living_controller_is_asked(desk: Desk) -> None:
    run_dir = desk.killed_in_training()
    desk.store.acquire_lease(run_dir.run_id, "b@elsewhere:1:1.00", 3600)
    asked = []

    def obeys(seconds: float) -> None:
        request = read_model(run_dir.cancel_request, AgentCommand)
        asked.append(request)
        with run_dir.control.open("a") as journal:
            journal.write(
                '{"sequence":90,"token":9,"time":"2026-01-01T00:00:00Z",'
                '"event":{"kind":"run_moved","state":"cancelled","cause":"enough"}}\n'
            )
        desk.scheduler.end_all()

    found, _ = cancelled(desk, run_dir, sleep=obeys)
    assert asked[0].reason == "enough"
    assert found.state is RunState.CANCELLED
    assert desk.scheduler.cancelled == [], "its controller did it"


def test_an_unresponsive_controller_does_not_keep_the_job_alive(desk: Desk) -> None:
    run_dir = desk.killed_in_training()
    desk.store.acquire_lease(run_dir.run_id, "b@elsewhere:1:1.00", 3600)
    found, _ = cancelled(desk, run_dir)
    assert desk.scheduler.cancelled == ["101"]
    assert found.job_ended
    assert "does not respond" in found.message


def test_a_submitted_but_unrecorded_job_is_found(desk: Desk) -> None:
    """Its controller is frozen after the submission and keeps its lease."""
    run_dir = desk.run()

    def killed(request: object) -> None:
        raise Killed

    desk.scheduler.on_submit = killed
    with pytest.raises(Killed):
        drive(desk.controller(run_dir))
    desk._stack.close()
    assert read_record(run_dir).attempts[1].submission is None
    desk.store.acquire_lease(run_dir.run_id, "b@elsewhere:1:1.00", 3600)
    desk.scheduler.stubborn = True
    with pytest.raises(SchedulerError, match="could not be ended"):
        cancelled(desk, run_dir)
    desk.scheduler.stubborn = False
    found, _ = cancelled(desk, run_dir)
    assert desk.scheduler.cancelled == ["101", "101"]
    assert found.job_ended
    assert "none of its jobs is running" in found.message


@pytest.mark.usefixtures("follows_orders")
def test_a_job_that_does_not_end_is_an_error(desk: Desk) -> None:
    run_dir = desk.killed_in_training()
    desk.scheduler.stubborn = True
    with pytest.raises(SchedulerError, match="could not be ended"):
        cancelled(desk, run_dir)
    assert read_record(run_dir).state is RunState.TRAINING, "it must not be called cancelled while its job runs"


def read_only(*_given: object, **_named: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_job_is_ended_even_if_the_run_directory_is_read_only(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = desk.killed_in_training()
    monkeypatch.setattr("rlhf_core.control.cancel.write_model", read_only)
    found, _ = cancelled(desk, run_dir)
    assert desk.scheduler.cancelled == ["101"]
    assert (found.state, found.job_ended) == (RunState.TRAINING, True)
    assert f"{run_dir.root} cannot be written (Read-only file system)" in found.message
    assert f"mark the run with `rlhf cancel {run_dir.run_id}`" in found.message


def test_a_run_of_another_user_is_left_to_that_user(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, this said that the scheduler had ended the job."""
    run_dir = desk.killed_in_training()

    def refused(*_given: object, **_named: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("rlhf_core.control.cancel.write_model", refused)
    monkeypatch.setattr("rlhf_core.control.cancel.os.geteuid", lambda: run_dir.root.stat().st_uid + 1)
    with pytest.raises(RunDirError, match=rf"{run_dir.root} belongs to .* can end this run\. If it was requested in"):
        cancelled(desk, run_dir)
    assert desk.scheduler.cancelled == []


def test_an_ended_run_may_be_read_only(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = desk.completed()
    desk._stack.close()
    desk.scheduler.end_all()
    monkeypatch.setattr(Path, "unlink", read_only)
    found, _ = cancelled(desk, run_dir)
    assert "had already ended" in found.message


def test_a_run_that_has_ended_is_left_alone(desk: Desk) -> None:
    run_dir = desk.completed()
    desk._stack.close()
    desk.scheduler.end_all()
    before = run_dir.control.read_bytes()
    found, _ = cancelled(desk, run_dir)
    assert "had already ended" in found.message
    assert found.job_ended
    assert run_dir.control.read_bytes() == before


def test_a_live_job_is_never_reported_as_gone(desk: Desk) -> None:
    """Negative control of the proof, which comes from the scheduler and not from the request itself."""
    run_dir = desk.completed()
    desk._stack.close()
    found, _ = cancelled(desk, run_dir)
    assert not found.job_ended
    assert "may still be running" in found.message


@pytest.mark.usefixtures("follows_orders")
@pytest.mark.parametrize("save", [True, False])
def test_a_checkpoint_is_written_first_on_request(desk: Desk, save: bool) -> None:
    run_dir = desk.killed_in_training()
    agent = FakeAgent(run_dir)

    def obeys() -> None:
        order = read_model(run_dir.attempt(1).commands / "1.json", AgentCommand)
        if order is not None and order.kind == "stop_after_step":
            agent.checkpoint(5)
            agent.end(AttemptState.PREEMPTED)

    desk.scheduler.on_status = obeys
    found, _ = cancelled(desk, run_dir, save=save)
    assert (found.state, found.job_ended) == (RunState.CANCELLED, True)
    assert [checkpoint.step for checkpoint in run_dir.checkpoints()] == ([5] if save else [])
    assert read_record(run_dir).attempts[1].state is AttemptState.CANCELLED


def test_a_job_that_still_waits_for_nodes_has_nothing_to_save(desk: Desk) -> None:
    """The cancellation must not wait for a checkpoint of such a job."""
    run_dir = desk.killed_in_training()
    desk.scheduler.jobs["101"].state = JobState.PENDING
    began = desk.clock.now
    session = desk.controller(run_dir)
    cancel(session, "enough", save=True)
    assert desk.clock.now - began < 2 * CANCEL_TIMEOUT_S
    assert read_record(run_dir).state is RunState.CANCELLED
