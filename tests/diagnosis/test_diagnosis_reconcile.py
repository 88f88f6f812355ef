"""Decisions of the reconciler: a table of situations, each with the expected actions and a control."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rlhf_core.diagnosis.reconcile.decisions import ActionKind, decide
from rlhf_core.diagnosis.reconcile.facts import (
    FlowRunFacts,
    FlowState,
    JobFacts,
    LeaseState,
    ProcessState,
    RunFacts,
    TaskRunFacts,
    World,
)
from rlhf_core.diagnosis.retention import Scored, removable
from rlhf_core.schemas.attempts import PromotionState, RunState, StageState

NOW = datetime(2026, 5, 1, tzinfo=UTC)
RUN = RunFacts(
    "r",
    RunState.TRAINING,
    "training",
    holder=LeaseState.DEAD,
    owner="anna@n1:1:1.00",
    undriven_s=100.0,
    num_controllers=1,
    controller_started_at=NOW - timedelta(hours=1),
    attempt=2,
    jobs={1: "11", 2: "12"},
)
ENDED = replace(RUN, state=RunState.COMPLETED, recorded="completed", ended_s=100.0, holder=LeaseState.FREE)
WAITS = replace(ENDED, promotion_due=True)
SILENT = replace(RUN, holder=LeaseState.SILENT, undriven_s=1000.0, silent_s=31.0, flow_run_id="f")
DRIVEN = replace(RUN, holder=LeaseState.LIVING, undriven_s=0.0)
FLOW = FlowRunFacts("f", "r", FlowState.RUNNING, NOW, 1000.0, NOW - timedelta(hours=1), ProcessState.GONE)
ALIVE = replace(FLOW, process=ProcessState.ALIVE)
ASKS = replace(FLOW, state=FlowState.PAUSED)


def decided(run: RunFacts | None = RUN, *flow_runs: FlowRunFacts, **world: Any) -> list[str]:
    runs = {} if run is None else {run.run_id: run}
    actions = decide(World(runs, flow_runs, **world))
    return [one.kind.value + (f" {one.flow_state}" if one.flow_state else "") + one.job_id for one in actions]


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (RUN, ["adopt"]),
        (DRIVEN, []),
        (ENDED, []),
        (replace(RUN, undriven_s=0.0), ["adopt"]),
        (replace(RUN, holder=LeaseState.FREE), ["adopt"]),
        (replace(RUN, holder=LeaseState.FREE, undriven_s=29.0), []),
        (replace(RUN, holder=LeaseState.FREE, controller_started_at=None), []),
        (replace(RUN, holder=LeaseState.FREE, controller_started_at=None, undriven_s=121.0), ["adopt"]),
        (SILENT, ["adopt"]),
        (replace(SILENT, undriven_s=29.0), []),
        (replace(SILENT, silent_s=29.0), []),  # such as after an outage of the history
        # A run that keeps losing its controllers waits longer each time.
        (replace(RUN, num_controllers=2, undriven_s=14.0), []),
        (replace(RUN, num_controllers=4, undriven_s=59.0), []),
        (replace(RUN, num_controllers=4, undriven_s=61.0), ["adopt"]),
        (replace(RUN, num_controllers=2000, undriven_s=599.0), []),
        (replace(RUN, num_controllers=2000, undriven_s=601.0), ["adopt"]),
        (replace(RUN, recorded="queued"), ["ingest", "adopt"]),
        # Of another user, whose directory cannot be written.
        (replace(RUN, foreign_owner="ben"), ["note"]),
        (replace(RUN, foreign_owner="ben", recorded="queued"), ["ingest", "note"]),
        (replace(RUN, foreign_owner="ben", cancel_requested="enough"), ["note"]),
        (replace(DRIVEN, foreign_owner="ben"), []),
        (replace(ENDED, recorded="training"), ["ingest"]),
        (replace(RUN, cancel_requested="enough"), ["cancel_run"]),
        (replace(DRIVEN, cancel_requested="enough"), []),
        (replace(ENDED, promotion_due=True), ["adopt"]),
        (replace(ENDED, unpublished=2), ["publish"]),
        (replace(ENDED, unpublished=2, ended_s=29.0), []),
        (replace(ENDED, unpublished=2, holder=LeaseState.LIVING), []),
        (replace(RUN, missing_s=1.0), []),
    ],
)
def test_a_run_without_flow_runs(run: RunFacts, expected: list[str]) -> None:
    assert decided(run) == expected


def test_while_prefect_restarts_no_run_is_adopted() -> None:
    assert decided(prefect_away_s=1.0) == []
    assert decided(prefect_away_s=121.0) == ["adopt"]
    assert decided(prefect_away_s=float("inf")) == ["adopt"], "a site without Prefect"


@pytest.mark.parametrize(
    ("run", "flow_run", "expected"),
    [
        (RUN, FLOW, ["adopt", "end_flow_run CRASHED"]),
        (RUN, ALIVE, []),
        # A controller of this machine that is stopped, or hangs, with and without a flow run that is about to start.
        (SILENT, ALIVE, ["adopt"]),
        (SILENT, replace(ALIVE, flow_run_id="g"), []),
        (SILENT, replace(ALIVE, state=FlowState.SCHEDULED), []),
        (SILENT, replace(ALIVE, state_s=10.0), []),
        (RUN, replace(FLOW, state=FlowState.SCHEDULED, process=ProcessState.UNKNOWN), []),
        (RUN, replace(FLOW, state=FlowState.PENDING, process=ProcessState.UNKNOWN, state_s=10.0), []),
        (RUN, replace(FLOW, state=FlowState.PENDING, process=ProcessState.UNKNOWN), ["adopt", "end_flow_run CRASHED"]),
        (RUN, replace(FLOW, state=FlowState.PAUSED, suspended=True), []),
        # A question that was answered elsewhere is not shown forever, on whichever machine its controller was.
        (ENDED, replace(ASKS, process=ProcessState.UNKNOWN), ["end_flow_run COMPLETED"]),
        (ENDED, ASKS, ["end_flow_run COMPLETED"]),
        (ENDED, replace(ASKS, process=ProcessState.ALIVE), []),
        (ENDED, replace(ASKS, process=ProcessState.UNKNOWN, suspended=True), []),
        # An open question is asked again by another controller: nothing of it is completed.
        (WAITS, ASKS, ["adopt", "end_flow_run CRASHED"]),
        (WAITS, FLOW, ["adopt", "end_flow_run CRASHED"]),
        (WAITS, replace(ASKS, process=ProcessState.ALIVE), []),
        (WAITS, replace(ASKS, process=ProcessState.UNKNOWN, state_s=10.0), []),
        (WAITS, replace(ASKS, process=ProcessState.UNKNOWN), ["adopt"]),
        (WAITS, replace(ASKS, process=ProcessState.UNKNOWN, suspended=True), []),
        (replace(WAITS, holder=LeaseState.LIVING), replace(ASKS, process=ProcessState.UNKNOWN), []),
        (replace(WAITS, holder=LeaseState.LIVING), ASKS, ["end_flow_run CRASHED"]),
        (WAITS, replace(ASKS, state=FlowState.CANCELLING), ["adopt", "end_flow_run CANCELLED"]),
        # A run that is paused in the UI continues training; without a process it is a zombie like any other.
        (RUN, ASKS, ["adopt", "end_flow_run CRASHED"]),
        (DRIVEN, ASKS, ["end_flow_run CRASHED"]),
        (RUN, replace(ASKS, process=ProcessState.UNKNOWN), ["adopt"]),
        (replace(ENDED, holder=LeaseState.LIVING), replace(ASKS, process=ProcessState.UNKNOWN), []),
        # On another machine, only the lease is known, and Prefect is not contradicted.
        (RUN, replace(FLOW, process=ProcessState.UNKNOWN), ["adopt"]),
        (RUN, replace(FLOW, process=ProcessState.UNKNOWN, state_s=10.0), []),
        (RUN, replace(FLOW, state=FlowState.CRASHED), ["adopt"]),
        (RUN, replace(FLOW, state=FlowState.FAILED), ["adopt"]),
        (RUN, replace(FLOW, state=FlowState.CANCELLED), ["cancel_run"]),
        (RUN, replace(FLOW, state=FlowState.CANCELLING), ["cancel_run", "end_flow_run CANCELLED"]),
        (DRIVEN, replace(ALIVE, state=FlowState.CANCELLING, state_s=10.0), []),
        (DRIVEN, replace(ALIVE, state=FlowState.CANCELLING), ["cancel_run"]),
        (DRIVEN, replace(ALIVE, state=FlowState.CANCELLING, state_s=10.0, attended=False), ["cancel_run"]),
        (DRIVEN, replace(ALIVE, state=FlowState.CANCELLING, state_s=4.0, attended=False), []),
        (DRIVEN, replace(FLOW, state=FlowState.CANCELLED), ["cancel_run"]),
        (DRIVEN, FLOW, ["end_flow_run CRASHED"]),
        (DRIVEN, replace(FLOW, state=FlowState.CRASHED), ["note"]),
        (DRIVEN, ALIVE, []),
        (ENDED, FLOW, ["end_flow_run COMPLETED"]),
        (replace(ENDED, state=RunState.FAILED, recorded="failed"), FLOW, ["end_flow_run FAILED"]),
        (replace(ENDED, state=RunState.CANCELLED, recorded="cancelled"), FLOW, ["end_flow_run CANCELLED"]),
        (ENDED, replace(FLOW, state=FlowState.PENDING), ["end_flow_run COMPLETED"]),
        # Cancelled too late: the run had already ended, and its end is reported.
        (ENDED, replace(FLOW, state=FlowState.CANCELLING), ["end_flow_run COMPLETED"]),
        (replace(ENDED, state=RunState.FAILED, recorded="failed"), ASKS, ["end_flow_run FAILED"]),
        (replace(ENDED, state=RunState.CANCELLED, recorded="cancelled"), ASKS, ["end_flow_run CANCELLED"]),
        (ENDED, ALIVE, []),
        (ENDED, replace(FLOW, state=FlowState.CANCELLED), []),
        # The server was unreachable at the end, and the worker reported a crash. Not if another one continued the run.
        (replace(ENDED, flow_run_id="f"), replace(FLOW, state=FlowState.CRASHED), ["end_flow_run COMPLETED"]),
        (
            replace(ENDED, state=RunState.FAILED, recorded="failed", flow_run_id="f"),
            replace(FLOW, state=FlowState.CRASHED, process=ProcessState.UNKNOWN),
            ["end_flow_run FAILED"],
        ),
        (replace(ENDED, flow_run_id="g"), replace(FLOW, state=FlowState.CRASHED), []),
        (replace(ENDED, flow_run_id=""), replace(FLOW, state=FlowState.CRASHED), []),
        (replace(ENDED, flow_run_id="f"), replace(FLOW, state=FlowState.FAILED), []),
        (replace(ENDED, flow_run_id="f"), replace(ALIVE, state=FlowState.CRASHED), []),
        (replace(ENDED, flow_run_id="f", holder=LeaseState.LIVING), replace(FLOW, state=FlowState.CRASHED), []),
        (replace(WAITS, flow_run_id="f"), replace(FLOW, state=FlowState.CRASHED), ["adopt"]),
        (None, replace(FLOW, run_id=""), ["end_flow_run CRASHED"]),
        (None, replace(FLOW, run_id="", state=FlowState.CANCELLING), ["end_flow_run CANCELLED"]),
        (None, replace(ALIVE, run_id=""), []),
    ],
)
def test_a_run_and_its_flow_run(run: RunFacts | None, flow_run: FlowRunFacts, expected: list[str]) -> None:
    assert decided(run, flow_run) == expected


CRASHED = replace(FLOW, state=FlowState.CRASHED)


@pytest.mark.parametrize(
    ("flow_run", "stage", "expected"),
    [
        (CRASHED, StageState.COMPLETED, ["end_task_run COMPLETED"]),
        (CRASHED, StageState.FAILED, ["end_task_run FAILED"]),
        (CRASHED, StageState.CANCELLED, ["end_task_run CANCELLED"]),
        # Stages without an end in the journal end like their flow run.
        (CRASHED, StageState.RUNNING, ["end_task_run CRASHED"]),
        (replace(FLOW, state=FlowState.COMPLETED), None, ["end_task_run COMPLETED"]),
        # Events of Prefect may be late; a running process still reports; another site's flow run is unknown.
        (replace(CRASHED, state_s=10.0), StageState.COMPLETED, []),
        (replace(CRASHED, process=ProcessState.ALIVE), StageState.COMPLETED, []),
        (replace(CRASHED, flow_run_id="g"), StageState.COMPLETED, []),
        (ALIVE, StageState.COMPLETED, []),
    ],
)
def test_a_task_run_that_is_left_open_ends_as_its_stage(
    flow_run: FlowRunFacts, stage: StageState | None, expected: list[str]
) -> None:
    assert decided(ENDED, flow_run, task_runs=[TaskRunFacts("t", "f", stage)]) == expected


def test_a_task_run_that_stands_for_no_stage_ends_as_its_flow_run_is_to_end() -> None:
    ended = replace(ENDED, flow_run_id="f")
    found = decided(ended, CRASHED, task_runs=[TaskRunFacts("t", "f")])
    assert found == ["end_flow_run COMPLETED", "end_task_run COMPLETED"]


def test_a_flow_run_that_lost_its_run_to_a_later_one_does_not_share_its_end() -> None:
    later = replace(FLOW, flow_run_id="g", state=FlowState.COMPLETED, created_at=NOW)
    assert decided(ENDED, FLOW, later) == ["end_flow_run CRASHED"]
    # The controls: one before it, one that did not bring the run to its end, one of another run.
    for other in (
        replace(later, created_at=NOW - timedelta(hours=2)),
        replace(later, state=FlowState.CRASHED),
        replace(later, run_id="s"),
    ):
        assert decided(ENDED, FLOW, other) == ["end_flow_run COMPLETED"]


def test_a_cancelled_flow_run_does_not_end_a_resumed_run() -> None:
    old = replace(FLOW, state=FlowState.CANCELLED, changed_at=NOW - timedelta(minutes=50))
    assert decided(DRIVEN, old) == ["cancel_run"]
    later = replace(DRIVEN, controller_started_at=NOW - timedelta(minutes=10))
    assert decided(later, old) == ["note"]
    newer = replace(ALIVE, flow_run_id="g", created_at=NOW)
    assert decided(DRIVEN, old, newer) == []


def test_a_withdrawn_request_does_not_end_a_run_that_has_a_controller() -> None:
    """A user has resumed the run in a terminal, and then cancels the flow run that was to take it over.

    Controls: the same flow run if it has begun, a cancelled one before it, and a run without a controller.
    """
    withdrawn = replace(FLOW, flow_run_id="g", state=FlowState.CANCELLED, created_at=NOW, begun=False)
    assert decided(DRIVEN, withdrawn) == []
    assert decided(DRIVEN, replace(withdrawn, begun=True)) == ["cancel_run"]
    assert decided(DRIVEN, replace(FLOW, state=FlowState.CANCELLED), withdrawn) == ["cancel_run"]
    assert decided(RUN, withdrawn) == ["cancel_run"]


def test_flow_runs_that_end_before_they_drive_anything_are_started_ever_later() -> None:
    failed = [replace(FLOW, flow_run_id=str(n), state=FlowState.FAILED, state_s=50.0 + n) for n in range(4)]
    assert decided(RUN, *failed) == [], "60 s after the fourth"
    assert decided(RUN, *(replace(one, state_s=one.state_s + 20) for one in failed)) == ["adopt"]
    assert decided(RUN, *failed[:1]) == ["adopt"]


def test_a_flow_run_that_is_to_come_keeps_a_second_one_away() -> None:
    scheduled = replace(FLOW, flow_run_id="g", state=FlowState.SCHEDULED, created_at=NOW)
    assert decided(RUN, replace(FLOW, state=FlowState.CRASHED), scheduled) == []


@pytest.mark.parametrize(
    ("run", "job", "expected"),
    [
        (DRIVEN, JobFacts("12", "r", 2), []),
        (DRIVEN, JobFacts("11", "r", 1), ["cancel_job11"]),
        (ENDED, JobFacts("12", "r", 2), ["cancel_job12"]),
        (replace(ENDED, ended_s=59.0), JobFacts("12", "r", 2), []),
        (replace(DRIVEN, missing_s=601.0), JobFacts("12", "r", 2), ["cancel_job12"]),
        (replace(DRIVEN, missing_s=599.0), JobFacts("12", "r", 2), []),
        (None, JobFacts("12", "r", 2), []),
        (DRIVEN, JobFacts("13", "r", 2), []),
    ],
)
def test_a_job(run: RunFacts | None, job: JobFacts, expected: list[str]) -> None:
    assert decided(run, jobs=[job]) == expected


def test_of_two_jobs_of_an_attempt_the_recorded_one_stays() -> None:
    assert decided(DRIVEN, jobs=[JobFacts("12", "r", 2), JobFacts("13", "r", 2)]) == ["cancel_job13"]


def test_a_trial_is_its_runs_business_until_that_has_ended() -> None:
    trial = replace(RUN, run_id="t", trial_of="r", undriven_s=200.0)
    for parent, expected in ((DRIVEN, []), (ENDED, [ActionKind.CANCEL_RUN])):
        world = World({"r": parent, "t": trial})
        assert [one.kind for one in decide(world)] == expected


# ---------------------------------------------------------------------------------------------------------------------
# Retention

MADE = {step: NOW - timedelta(days=40 - step) for step in (10, 20, 30)}


def removed(**changes: Any) -> list[int]:
    facts: dict[str, Any] = {"ended_at": NOW - timedelta(days=9), "days": 7, "now": NOW}
    evaluations: list[Scored] = changes.pop("evaluations", [])
    promotion, used = changes.pop("promotion", None), changes.pop("used", ())
    return removable(changes.pop("made_at", MADE), evaluations, promotion, used, **{**facts, **changes})


def test_old_checkpoints_go_but_for_the_newest() -> None:
    assert removed() == [10, 20]
    assert removed(days=0) == []
    assert removed(ended_at=None) == [], "a run at work keeps all"
    assert removed(ended_at=NOW - timedelta(days=6)) == []
    assert removed(days=25, ended_at=NOW - timedelta(days=26)) == [10]
    assert removed(made_at={}) == []


def test_the_best_the_promoted_and_those_in_use_stay() -> None:
    scores = [Scored("greedy", 20, 0.9), Scored("greedy", 30, 0.5), Scored("sampled", 10, 0.2)]
    assert removed(evaluations=scores) == []
    assert removed(evaluations=scores[:2]) == [10]
    assert removed(evaluations=[Scored("greedy", 10, 0.5), Scored("greedy", 20, 0.5)]) == [10]
    assert removed(evaluations=[Scored("loss", 10, 0.5), Scored("loss", 20, 0.9)]) == [20], "a lower loss is better"
    assert removed(evaluations=[*scores[:2], Scored("pass@8", 10, 1.0), Scored("pass@8", 30, 0.9)]) == [10]
    assert removed(promotion=(PromotionState.PROMOTED, 10)) == [20]
    assert removed(promotion=(PromotionState.REFUSED, 10)) == [10, 20]
    assert removed(used={10}) == [20]
