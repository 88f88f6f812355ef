"""Notifications that the events of a run trigger, and their texts, by the code of Prefect's server and without one."""

import asyncio
import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from uuid import uuid4

import pytest
from control_fakes import FakeAgent
from harness import ControllerHarness
from history_tools import RunFiles, at
from made_reports import decision_of
from prefect.server.events.schemas.automations import EventTrigger
from prefect.server.events.schemas.events import ReceivedEvent
from prefect.server.utilities.user_templates import render_user_template, validate_user_template

from flows import notify
from flows.publishing import events
from flows.publishing.events import DECISION_TIMEOUT, FlowRunRef, PrefectEvent, events_of
from rlhf_core.control.cancel import cancel
from rlhf_core.control.steps import drive
from rlhf_core.control.views.timeline import read_timeline
from rlhf_core.errors import RunCancelled, RunFailed
from rlhf_core.files.whole import write_model
from rlhf_core.launch.journal import Journal, read_record
from rlhf_core.run_dir.run import RunDir
from rlhf_core.scheduler.base import JobState, JobStatus
from rlhf_core.schemas.attempts import PromotionState, RunState
from rlhf_core.schemas.failures import Action, FailureKind
from rlhf_core.schemas.journal import ControllerStarted, PromotionMoved
from rlhf_core.schemas.resources import Submission
from rlhf_core.schemas.site import NotifySite

NOBODY = FlowRunRef("", "")


def published(run_dir: RunDir, now: datetime | None = None) -> list[PrefectEvent]:
    return events_of(read_timeline(run_dir), run_dir.read_spec(), NOBODY, now)


def received(run_dir: RunDir, event: PrefectEvent) -> ReceivedEvent:
    return ReceivedEvent.model_validate(events._as_json(event, run_dir.run_id, NOBODY))


def triggered(run_dir: RunDir, event: PrefectEvent) -> set[str]:
    """Occasions whose automation fires on an event."""
    triggers = {
        occasion: EventTrigger.model_validate(
            notify._automation(occasion, notification, uuid4()).trigger.model_dump(mode="json")
        )
        for occasion, notification in notify.OCCASIONS.items()
    }
    return {occasion for occasion, trigger in triggers.items() if trigger.covers(received(run_dir, event))}


def message(run_dir: RunDir, event: PrefectEvent, occasion: str) -> dict[str, str]:
    template = notify.template(notify.OCCASIONS[occasion])
    validate_user_template(template)
    made = asyncio.run(render_user_template(template, {"event": received(run_dir, event)}))
    content: dict[str, str] = json.loads(made)
    return content


def training(harness: ControllerHarness) -> RunDir:
    run_dir = harness.run()
    harness.trains_for_ever(run_dir)
    return run_dir


def ended_at_the_scheduler(harness: ControllerHarness) -> RunDir:
    run_dir = training(harness)

    def status(submissions: Sequence[Submission]) -> dict[str, JobStatus]:
        return {one.job_id: JobStatus(JobState.ENDED, scheduler_state="CANCELLED") for one in submissions}

    harness.scheduler.status = status  # type: ignore[method-assign]
    with pytest.raises(RunCancelled):
        drive(harness.controller(run_dir))
    return run_dir


def failed_for_good(harness: ControllerHarness) -> RunDir:
    """A run that fails in a way that is not retried."""
    run_dir = harness.run()

    def fail(agent: FakeAgent) -> None:
        agent.start()
        agent.fail(FailureKind.SHAPE)

    harness.runs_well(run_dir, 1, fail)
    controller = harness.controller(run_dir)
    controller.journal.append(ControllerStarted(controller="me", flow_run_id="x", flow_run_url="http://ui/runs/x"))
    with pytest.raises(RunFailed):
        drive(controller)
    return run_dir


def test_a_job_that_was_cancelled_outside_is_told_apart(harness: ControllerHarness) -> None:
    run_dir = ended_at_the_scheduler(harness)
    end = published(run_dir)[-1]
    assert triggered(run_dir, end) == {"cancelled", "cancelled_outside"}
    assert "cancelled_outside" in NotifySite().on, "nobody asked for it, so somebody has to know"
    text = message(run_dir, end, "cancelled_outside")["text"]
    assert text.splitlines()[0] == (
        f"run {run_dir.run_id} of {run_dir.read_spec().owner} was cancelled, and not by rlhf-flows: its job was "
        "cancelled at the scheduler"
    )
    assert f"rlhf resume {run_dir.run_id}" in text


def test_a_requested_cancellation_notifies_only_those_who_want_all(harness: ControllerHarness) -> None:
    run_dir = ended_at_the_scheduler(harness)
    controller = harness.controller(run_dir, resumed=True)
    controller.journal.move_run(RunState.PREFLIGHT, "resumed")
    cancel(controller, "ada asked for it")
    ends = [one for one in published(run_dir) if one.name == "rlhf.run.cancelled"]
    assert [triggered(run_dir, one) for one in ends] == [{"cancelled", "cancelled_outside"}, {"cancelled"}]


def test_a_failure_that_is_not_retried_says_so_and_what_to_do(harness: ControllerHarness) -> None:
    run_dir = failed_for_good(harness)
    end = published(run_dir)[-1]
    assert triggered(run_dir, end) == {"failed", "stopped"}
    decision = read_record(run_dir).attempts[1].decision
    assert decision is not None
    said = message(run_dir, end, "failed")
    assert said["text"].splitlines() == [
        f"run {run_dir.run_id} of {run_dir.read_spec().owner} failed: {end.payload['message']}",
        f"decision: stop ({decision.reason})",
        f"rlhf show {run_dir.run_id} tells more; once it is fixed: rlhf resume {run_dir.run_id}",
        "http://ui/runs/x",
    ]
    assert (said["action"], said["reason"], said["name"]) == ("stop", decision.reason, "small")


def test_a_run_that_its_checks_refuse_is_not_stopped(harness: ControllerHarness) -> None:
    run_dir = failed_for_good(harness)
    journal = harness.controller(run_dir, resumed=True).journal
    journal.move_run(RunState.PREFLIGHT, "resumed")
    journal.move_run(RunState.FAILED, "the model folder is missing")
    end = published(run_dir)[-1]
    assert triggered(run_dir, end) == {"failed"}
    assert "decision" not in message(run_dir, end, "failed")["text"]


def test_an_incident_says_whose_it_is_and_what_was_decided(harness: ControllerHarness) -> None:
    run_dir = failed_for_good(harness)
    (incident,) = [one for one in published(run_dir) if one.name.startswith("rlhf.incident.")]
    assert triggered(run_dir, incident) == {"incident"}
    said = message(run_dir, incident, "incident")
    assert {name: said[name] for name in ("name", "owner", "url", "action")} == {
        "name": "small",
        "owner": run_dir.read_spec().owner,
        "url": "http://ui/runs/x",
        "action": "stop",
    }
    assert said["text"].endswith(f"rlhf resume {run_dir.run_id}\nhttp://ui/runs/x")
    assert "incident" not in NotifySite().on, "most are retried; those that are not make the run fail"


def test_a_run_whose_nodes_do_not_start_reminds_of_itself_once_a_day(harness: ControllerHarness) -> None:
    """Control: the attempts in between are incidents like others. One that had its nodes begins another wait."""
    run = RunFiles(harness.site.runs_dir)
    for attempt, hours in enumerate((0, 1, 23, 25, 48, 50, 51, 52), start=1):
        kind = FailureKind.NODE_LOST if attempt == 7 else FailureKind.NO_NODES
        run.without_nodes(attempt, 3600 * hours, kind)
    run_dir = run.dir
    incidents = [one for one in published(run_dir, at(52 * 3600)) if one.name == "rlhf.incident.no_nodes"]
    reminders = [one for one in incidents if "no_nodes" in triggered(run_dir, one)]
    assert len(incidents) == 7
    assert all("incident" in triggered(run_dir, one) for one in incidents)
    assert [int(one.payload["attempt"]) for one in reminders] == [1, 4, 6, 8]
    assert "no_nodes" in NotifySite().on, "without an end, no message about one would ever come"
    assert message(run_dir, reminders[0], "no_nodes")["text"].splitlines() == [
        f"the nodes of run {run_dir.run_id} of {run_dir.read_spec().owner} do not start: down~",
        "decision: new attempt (it waits)",
        f"the run goes on asking for them; rlhf cancel {run_dir.run_id} ends it",
    ]


def test_a_model_that_could_not_be_promoted_says_so_and_what_to_do(harness: ControllerHarness) -> None:
    run_dir = harness.completed()
    journal = Journal(run_dir, token=100)
    for state, reason in ((PromotionState.APPROVED, "better"), (PromotionState.FAILED, "the disk is full")):
        journal.append(PromotionMoved(state=state, checkpoint_step=10, reason=reason))
    approved, failed = published(run_dir)[-2:]
    assert (triggered(run_dir, approved), triggered(run_dir, failed)) == (set(), {"promotion_failed"})
    assert "promotion_failed" in NotifySite().on, "the run stays completed, so nothing else tells anybody"
    assert message(run_dir, failed, "promotion_failed")["text"].splitlines() == [
        f"the model of run {run_dir.run_id} of {run_dir.read_spec().owner} could not be promoted: the disk is full",
        f"rlhf show {run_dir.run_id} tells more; once it is fixed: rlhf approve {run_dir.run_id}",
    ]


def test_a_model_that_nobody_approved_in_time_says_that_it_still_can_be(harness: ControllerHarness) -> None:
    run_dir = harness.completed()
    journal = Journal(run_dir, token=100)
    for state in (PromotionState.WAITING, PromotionState.EXPIRED):
        journal.append(PromotionMoved(state=state, checkpoint_step=10))
    waiting, expired = published(run_dir)[-2:]
    assert (triggered(run_dir, waiting), triggered(run_dir, expired)) == ({"approval"}, {"approval_expired"})
    assert "approval_expired" in NotifySite().on, "who was asked may have been away"
    owner = run_dir.read_spec().owner
    assert message(run_dir, expired, "approval_expired")["text"].splitlines() == [
        f"nobody answered in time whether to promote the model of run {run_dir.run_id} of {owner}",
        f"it is still possible: rlhf approve {run_dir.run_id} or rlhf refuse {run_dir.run_id}",
    ]


def test_an_incident_waits_a_minute_for_its_decision(harness: ControllerHarness) -> None:
    run_dir = training(harness)
    Journal(run_dir, 1).move_run(RunState.PREFLIGHT, "started")
    incident = FakeAgent(run_dir).incident(FailureKind.HANG)

    def at(after: timedelta) -> list[PrefectEvent]:
        found = events_of(read_timeline(run_dir), run_dir.read_spec(), NOBODY, incident.seen_at + after)
        return [one for one in found if one.name == "rlhf.incident.hang"]

    assert at(timedelta(seconds=5)) == []
    assert len(at(timedelta(hours=-1))) == 1, "of a node whose clock is ahead"
    (undecided,) = at(DECISION_TIMEOUT)
    assert undecided.payload["action"] == ""
    decision = decision_of(Action.RESTART_IN_PLACE, number=incident.number, reason="restart in place 1 of 3")
    write_model(run_dir.attempt(1).restart(0).decision(incident.number), decision)
    (decided,) = at(timedelta(seconds=5))
    text = message(run_dir, decided, "incident")["text"]
    assert "decision: restart in place (restart in place 1 of 3)" in text
    assert "resume" not in text, "it is retried by itself"
