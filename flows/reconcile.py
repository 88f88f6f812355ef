"""``rlhf-reconcile``: the reconciler's rounds as scheduled flow runs, with a table of the actions taken.

No worker runs them, because a dead worker is one of the faults they repair. The daemon polls for due flow runs and runs
them in its own process. Between them it checks more often; a check that finds nothing leaves no flow run. Of the
scheduled rounds that find nothing, only the newest stays: all of them would push other runs off the first page.
"""

import contextlib
from collections.abc import Callable, Sequence
from contextvars import ContextVar, copy_context
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from prefect import State, flow
from prefect.artifacts import create_table_artifact
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterState,
    FlowRunFilterStateName,
)
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.flow_engine import run_flow
from prefect.states import Cancelled, Completed, Failed, Pending
from prefect.utilities.callables import parameter_schema

from flows.server.clients import api_client
from flows.server.settings import server_answers
from rlhf_core.control.reconcile.actions import ROUTINE, ActionResult, Reconciler
from rlhf_core.control.steps import Step
from rlhf_core.diagnosis.reconcile.decisions import ReconcileAction
from rlhf_core.survival import Survived

_Found = TypeVar("_Found")

DEPLOYMENT = "rlhf-reconcile/site"
"""The deployment whose flow runs the site daemon executes."""

ARTIFACT_KEY = "rlhf-reconcile"
"""Key of the table of findings and actions."""

EVERY_S = 600.0
"""Time between two scheduled rounds. Without a daemon, they are late, which Prefect shows."""

AGREED = "Nothing to do"
"""Name of the state of a flow run that found nothing to repair."""

DESCRIPTION = (
    "Compares database, Prefect and scheduler, and repairs what disagrees. The site daemon (`rlhf serve daemon`) "
    "carries it out; *Quick run* has it do a round now."
)


class Turn:
    """One round, executed exactly once, whatever happens to Prefect before, during and after it."""

    def __init__(self, work: Callable[[], Sequence[ActionResult]]) -> None:
        self._work = work
        self._results: Sequence[ActionResult] = ()
        self._step = Step("round", "a round of the reconciler", self._carry_out)

    def __call__(self) -> Sequence[ActionResult]:
        """Execute the round on the first call; return its results, or raise its error, on every call."""
        if not self._step.begun:
            self._step.run()
        self._step.result()  # a flow run may already have consumed the error: raise it for every caller
        return self._results

    def _carry_out(self) -> None:
        self._results = self._work()


_turn: ContextVar[Turn | None] = ContextVar("turn", default=None)


@flow(name="rlhf-reconcile", description=DESCRIPTION, retries=0, persist_result=False)
def rlhf_reconcile() -> State[None]:
    """Compares database, Prefect and scheduler, and repairs disagreements."""
    turn = _turn.get()
    if turn is None:
        # Returned, because Prefect would log the traceback of a raised error.
        return Failed(message="this flow is carried out by the site daemon alone: `rlhf up` starts it")
    results = [result for result in turn() if result.action.kind not in ROUTINE]
    create_table_artifact(table=_table(results), key=ARTIFACT_KEY, description=_summary(results))
    return Completed(name=None if results else AGREED, message=_summary(results))


def register() -> None:
    """Create the deployment and its schedule, of which each server has one; idempotent.

    Raises Prefect's own errors if the server does not answer.
    """
    with api_client() as client:
        client.create_deployment(
            flow_id=client.create_flow(rlhf_reconcile),
            name=DEPLOYMENT.partition("/")[2],
            description=DESCRIPTION,
            schedules=[
                DeploymentScheduleCreate(
                    schedule=IntervalSchedule(
                        interval=timedelta(seconds=EVERY_S), anchor_date=datetime(2026, 1, 1, tzinfo=UTC)
                    ),
                    active=True,
                )
            ],
            parameter_openapi_schema=parameter_schema(rlhf_reconcile).model_dump(),
            tags=["rlhf"],
        )


def carry_out_round(reconciler: Reconciler, may: Callable[[], bool], retention: bool) -> Sequence[ActionResult]:
    """Carry out one round: as the due flow run, as a new flow run if there is something to do, or without one.

    Raises:
        HistoryError: the history does not answer.
    """
    due = _quietly(_due)
    if due is not None:
        # The round checks again, so that its flow run shows the state at its start.
        whole = Turn(lambda: reconciler.carry_out(reconciler.poll(retention=retention), may))
        results = _as_flow_run(due, whole)
        _quietly(lambda: _remove_uneventful(due))
        return results
    actions = reconciler.poll(retention=retention)
    turn = Turn(lambda: reconciler.carry_out(actions, may))
    made = _quietly(_new_flow_run) if any(one.kind not in ROUTINE for one in actions) else None
    return _as_flow_run(made, turn) if made is not None else turn()


def _as_flow_run(flow_run: FlowRun, turn: Turn) -> Sequence[ActionResult]:
    context = copy_context()
    context.run(_turn.set, turn)
    with contextlib.suppress(Exception):
        # return_type: the flow run shows the outcome; an error of the round itself is raised by the turn, below.
        context.run(run_flow, rlhf_reconcile, flow_run=flow_run, parameters={}, return_type="state")
    return turn()


def _due() -> FlowRun | None:
    """The newest due flow run; older ones, left from a time without a daemon, are cancelled."""
    with api_client() as client:
        deployment = client.read_deployment_by_name(DEPLOYMENT)
        waiting = client.get_scheduled_flow_runs_for_deployments([deployment.id], scheduled_before=datetime.now(UTC))
        dated = [(one.next_scheduled_start_time or datetime.max.replace(tzinfo=UTC), one.id) for one in waiting]
        ids = [flow_run_id for _, flow_run_id in sorted(dated)]
        for missed in ids[:-1]:
            client.set_flow_run_state(missed, Cancelled(message="missed: a later round does its work"))
        return client.read_flow_run(ids[-1]) if ids else None


def _new_flow_run() -> FlowRun:
    with api_client() as client:
        deployment = client.read_deployment_by_name(DEPLOYMENT)
        # No longer scheduled: it runs now, and the next round must not find it due as well.
        made = client.create_flow_run_from_deployment(deployment.id, state=Pending())
        return client.read_flow_run(made.id)


def _remove_uneventful(newest: FlowRun) -> None:
    """Delete the flow runs of earlier rounds that found nothing to do."""
    uneventful = FlowRunFilter(
        deployment_id=FlowRunFilterDeploymentId(any_=[newest.deployment_id]),
        state=FlowRunFilterState(name=FlowRunFilterStateName(any_=[AGREED])),
    )
    with api_client() as client:
        for one in client.read_flow_runs(flow_run_filter=uneventful):
            if one.id != newest.id:
                client.delete_flow_run(one.id)


def _quietly(query: Callable[[], _Found | None]) -> _Found | None:
    """Prefect's answer; None if there is none, in which case the round goes ahead without a flow run."""
    if not server_answers():
        return None
    with Survived():  # the deployment may not be registered, for example; on any error the round goes ahead
        return query()
    return None


def _table(results: Sequence[ActionResult]) -> list[dict[str, str]]:
    return [
        {
            "run": result.action.run_id,
            "done": result.action.kind.value.replace("_", " ") if result.done else f"{result.action.kind.value} FAILED",
            "about": _about(result.action),
            "why": result.action.reason,
            "how it went": result.message,
        }
        for result in results
    ] or [{"run": "", "done": "nothing", "about": "", "why": "all three agree", "how it went": ""}]


def _about(action: ReconcileAction) -> str:
    named = {
        "job": action.job_id,
        "flow run": action.flow_run_id,
        "task run": action.task_run_id,
        "attempt": str(action.attempt or ""),
        "checkpoint": str(action.step or ""),
    }
    return ", ".join(f"{name} {value}" for name, value in named.items() if value)


def _summary(results: Sequence[ActionResult]) -> str:
    if not results:
        return "database, Prefect and scheduler agree"
    failed = sum(not result.done for result in results)
    return f"{len(results) - failed} done" + (f", {failed} failed and tried again in the next round" if failed else "")
