"""Removal or move of the run directory while its controller is at work, and conditions that only look like it."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from control_fakes import FakeAgent
from harness import ControllerHarness

from rlhf_core.control import controller as session_module
from rlhf_core.control.steps import drive
from rlhf_core.errors import RunDirError, RunDirGone, SchedulerError
from rlhf_core.history import queries
from rlhf_core.launch.journal import read_record
from rlhf_core.run_dir.run import RunDir
from rlhf_core.scheduler.base import JobState
from rlhf_core.schemas.attempts import AttemptState, Role, RunState
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.watchdog.gone_run import AWAY_S, GONE_S


def trains(harness: ControllerHarness, happens: Callable[[int], None]) -> RunDir:
    """A run whose job trains; ``happens`` is called with the number of each poll."""
    run_dir = harness.run()
    harness.scheduler.on_submit = lambda request: FakeAgent(run_dir).role(Role.TRAINER)
    polls = 0

    def poll() -> None:
        nonlocal polls
        polls += 1
        happens(polls)

    harness.scheduler.on_status = poll
    return run_dir


def job_ends(harness: ControllerHarness) -> None:
    """Make the agents of the job fail to write, and end."""
    harness.scheduler.jobs["101"].state = JobState.ENDED


@pytest.mark.parametrize("moved", [False, True], ids=["removed", "moved away"])
def test_the_job_is_ended_and_the_history_closes_the_run(
    harness: ControllerHarness, moved: bool, tmp_path: Path
) -> None:
    def happens(poll: int) -> None:
        if poll == 5 and moved:
            run_dir.root.rename(tmp_path / "aside")
        elif poll == 5:
            shutil.rmtree(run_dir.root)
        elif poll > 5:
            # Agents recreate the folders that they write into, and report the errors that they run into.
            FakeAgent(run_dir).status(sequence=poll)
            FakeAgent(run_dir).incident(FailureKind.CONFIG)

    run_dir = trains(harness, happens)
    with pytest.raises(RunDirGone) as raised:
        drive(harness.controller(run_dir))
    assert not run_dir.root.exists(), "its place is free for the directory to be moved back"
    message = str(raised.value)
    assert f"{run_dir.spec} has been missing for" in message
    assert "Its job 101 was ended" in message
    assert f"move it back, then run `rlhf resume {run_dir.run_id}`" in message
    assert "start over: `rlhf run small.toml`" in message
    assert harness.scheduler.cancelled == ["101"]
    shown = queries.show_run(harness.store, run_dir.run_id)
    assert shown.run["state"] == "failed"
    assert shown.run["ended_at"] is not None
    assert "the run directory is gone" in shown.run["message"]
    assert [(one["state"], one["failure_kind"]) for one in shown.attempts] == [("lost", "file_system")]
    assert [one["state"] for one in shown.stages] == ["completed", "completed", "failed"]
    assert [(one["action"], one["reason"]) for one in shown.decisions] == [
        ("stop", "there is no directory to resume from")
    ]
    assert [one["suspect_nodes"] for one in shown.incidents] == [[]], "no node caused it"


def test_a_run_that_was_moved_back_explains_its_end_and_can_be_resumed(
    harness: ControllerHarness, tmp_path: Path
) -> None:
    def happens(poll: int) -> None:
        if poll == 5:
            run_dir.root.rename(tmp_path / "aside")

    run_dir = trains(harness, happens)
    with pytest.raises(RunDirGone):
        drive(harness.controller(run_dir))
    (tmp_path / "aside").rename(run_dir.root)
    record = read_record(run_dir)
    assert (record.state, record.attempts[1].state) == (RunState.FAILED, AttemptState.LOST)
    harness.scheduler.on_submit = lambda request: FakeAgent(run_dir, attempt=request.placement.attempt).whole_run()
    drive(harness.controller(run_dir, resumed=True))
    shown = queries.show_run(harness.store, run_dir.run_id)
    assert shown.run["state"] == "completed"
    assert [one["state"] for one in shown.attempts] == ["lost", "completed"]
    assert "the run directory is gone" in shown.attempts[0]["message"]


def test_reports_of_agents_without_the_run_directory_do_not_count(harness: ControllerHarness) -> None:
    """The errors with which they end are no diagnosis. Nothing is submitted again."""

    def happens(poll: int) -> None:
        if poll == 5:
            shutil.rmtree(run_dir.root)
        if poll == 7:
            job_ends(harness)

    run_dir = trains(harness, happens)
    with pytest.raises(RunDirGone):
        drive(harness.controller(run_dir))
    assert len(harness.scheduler.submitted) == 1
    assert "the run directory is gone" in queries.show_run(harness.store, run_dir.run_id).run["message"]


def test_a_briefly_missing_directory_changes_nothing(harness: ControllerHarness, tmp_path: Path) -> None:
    """Control: a file system that is being remounted looks like this; also if the job ends meanwhile."""
    aside = tmp_path / "aside"

    def happens(poll: int) -> None:
        if poll == 5:
            run_dir.root.rename(aside)
            job_ends(harness)
        if poll == 5 + int(GONE_S) - 5:
            aside.rename(run_dir.root)
            FakeAgent(run_dir).role(Role.EVALUATOR)
            FakeAgent(run_dir).end(AttemptState.COMPLETED)

    run_dir = trains(harness, happens)
    drive(harness.controller(run_dir))
    assert read_record(run_dir).state is RunState.COMPLETED
    assert queries.show_run(harness.store, run_dir.run_id).run["state"] == "completed"
    assert any("making no decisions until it is back" in text for text in harness.notes.messages)
    assert harness.scheduler.cancelled == []


def test_an_unmounted_file_system_is_awaited_and_closes_no_run(harness: ControllerHarness, tmp_path: Path) -> None:
    """The folder of all runs is a different one, like the mount point of an unmounted file system."""
    runs = harness.site.runs_dir

    def happens(poll: int) -> None:
        if poll == 5:
            runs.rename(tmp_path / "unmounted")
            runs.mkdir()

    run_dir = trains(harness, happens)
    began = harness.clock.now
    with pytest.raises(RunDirError, match="has been unavailable for") as raised:
        drive(harness.controller(run_dir))
    assert not isinstance(raised.value, RunDirGone)
    assert "The run is unchanged" in str(raised.value)
    assert harness.clock.now - began > AWAY_S, "it ends, but not soon"
    assert harness.scheduler.cancelled == []
    assert queries.show_run(harness.store, run_dir.run_id).run["state"] == "training"


@pytest.mark.parametrize("part", ["", "outcome.json"], ids=["everything", "one file"])
@pytest.mark.parametrize("for_ever", [False, True])
def test_a_file_system_that_fails_is_awaited(
    harness: ControllerHarness, part: str, for_ever: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NFS mount with the option ``soft`` answers with errors while its server is away."""
    fails_until = 0.0

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            text = str(path)
            if harness.clock.now < fails_until and text.startswith(str(run_dir.root)) and text.endswith(part):
                raise OSError(errno.EIO, "Input/output error", text)
            return function(path, *arguments, **options)

        return call

    def happens(poll: int) -> None:
        nonlocal fails_until
        if poll == 5:
            FakeAgent(run_dir).role(Role.EVALUATOR)
            FakeAgent(run_dir).end(AttemptState.COMPLETED)
            fails_until = harness.clock.now + (2 * AWAY_S if for_ever else 60)
            for name in ("open", "stat", "scandir", "listdir"):
                monkeypatch.setattr(os, name, failing(getattr(os, name)))

    run_dir = trains(harness, happens)
    controller = harness.controller(run_dir)
    if for_ever:
        with pytest.raises(RunDirError, match=r"could not be read \(Input/output error\) for 60. s. The run is un"):
            drive(controller)
        return
    drive(controller)
    assert read_record(run_dir).state is RunState.COMPLETED
    (said,) = [text for text in harness.notes.messages if "making no decisions until" in text]
    assert "could not be read (Input/output error)" in said


def test_with_its_cluster_gone_too_the_controller_ends_and_names_the_job(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*arguments: object) -> object:
        raise SchedulerError("the controller of the cluster does not answer")

    def happens(poll: int) -> None:
        if poll == 5:
            shutil.rmtree(run_dir.root)
            monkeypatch.setattr(harness.scheduler, "status", gone)
            monkeypatch.setattr(harness.scheduler, "cancel", gone)

    run_dir = trains(harness, happens)
    with pytest.raises(RunDirGone, match=r"Its job 101 could not be ended .* does not answer\): end it at the sched"):
        drive(harness.controller(run_dir))
    assert harness.clock.now < 10 * GONE_S
    assert queries.show_run(harness.store, run_dir.run_id).run["state"] == "failed"


def test_without_the_check_the_run_is_a_bad_config_or_never_ends(
    harness: ControllerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the controller without the check of its run directory."""
    monkeypatch.setattr(session_module.Controller, "lacks_directory", lambda controller: False)

    class Ever(Exception):
        """The controller never ends."""

    def happens(poll: int) -> None:
        if poll == 5:
            shutil.rmtree(run_dir.root)
        if poll == 1000:
            raise Ever

    run_dir = trains(harness, happens)
    with pytest.raises(Ever):
        drive(harness.controller(run_dir))
    assert queries.show_run(harness.store, run_dir.run_id).run["state"] == "training"
