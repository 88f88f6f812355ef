"""Events for automations: their names, text-only payloads, and ids that do not depend on the publisher."""

from collections.abc import Sequence
from datetime import timedelta

from control_fakes import FakeAgent
from harness import ControllerHarness

from flows.publishing.events import MAX_AGE, FlowRunRef, PrefectEvent, events_of
from rlhf_core.control.steps import drive
from rlhf_core.control.views.timeline import read_timeline
from rlhf_core.files.appended import append_lines
from rlhf_core.launch.journal import Journal, read_record
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import PromotionState, RunState
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.journal import ControllerStarted, JournalLine, PromotionMoved, RunMoved

FLOW_RUN = FlowRunRef("0d6f2a5e-0000-0000-0000-000000000000", "a flow run")
ANOTHER = FlowRunRef("1d6f2a5e-0000-0000-0000-000000000000", "another one")


def events(run_dir: RunDir, flow_run: FlowRunRef = FLOW_RUN) -> Sequence[PrefectEvent]:
    return events_of(read_timeline(run_dir), run_dir.read_spec(), flow_run)


def completed(harness: ControllerHarness) -> RunDir:
    run_dir = harness.good_run()
    session = harness.controller(run_dir)
    session.journal.append(ControllerStarted(controller="me", flow_run_id="x", flow_run_url="http://ui/runs/x"))
    drive(session)
    return run_dir


def test_every_state_of_a_run_is_an_event_with_text_only(harness: ControllerHarness) -> None:
    run_dir = completed(harness)
    found = events(run_dir)
    assert [one.name for one in found] == [
        f"rlhf.run.{state}" for state in ("preflight", "queued", "evaluating", "completed")
    ]
    assert found[-1].payload == {
        "run_id": run_dir.run_id,
        "name": "small",
        "owner": run_dir.read_spec().owner,
        "state": "completed",
        "message": "attempt 1 completed",
        "url": "http://ui/runs/x",
        "run_dir": str(run_dir.root),
    }
    assert all(isinstance(value, str) for one in found for value in one.payload.values())


def test_the_event_of_a_promotion_has_its_step_and_its_decider(harness: ControllerHarness) -> None:
    run_dir = completed(harness)
    journal = Journal(run_dir, token=100)
    journal.append(PromotionMoved(state=PromotionState.WAITING, checkpoint_step=10, reason="gained 0.7"))
    journal.append(PromotionMoved(state=PromotionState.PROMOTED, checkpoint_step=10, by="ada", path="/models/a"))
    waiting, promoted = events(run_dir)[-2:]
    assert (waiting.name, promoted.name) == ("rlhf.promotion.waiting", "rlhf.promotion.promoted")
    assert waiting.payload["message"] == "gained 0.7"
    assert (promoted.payload["by"], promoted.payload["path"]) == ("ada", "/models/a")
    assert promoted.payload["checkpoint_step"] == "10"


def test_ids_do_not_depend_on_the_publisher(harness: ControllerHarness) -> None:
    run_dir = completed(harness)
    FakeAgent(run_dir).incident(FailureKind.HANG)
    ids = [one.id for one in events(run_dir)]
    assert len(set(ids)) == len(ids) == 5
    assert [one.id for one in events(run_dir, ANOTHER)] == ids


def test_lines_of_a_controller_that_lost_the_run_cause_no_event(harness: ControllerHarness) -> None:
    run_dir = completed(harness)
    sequence = read_record(run_dir).next_sequence
    moved = RunMoved(state=RunState.FAILED, cause="this must not alert")
    append_lines(run_dir.control, JournalLine(sequence=sequence, token=0, time=utc_now(), event=moved))
    assert events(run_dir)[-1].name == "rlhf.run.completed"


def test_old_events_are_not_published(harness: ControllerHarness) -> None:
    run_dir = completed(harness)
    later = utc_now() + MAX_AGE + timedelta(minutes=1)
    assert events_of(read_timeline(run_dir), run_dir.read_spec(), FLOW_RUN, later) == []
