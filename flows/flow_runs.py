"""What Prefect says of the flow runs of a site, and what it is told: the reconciler's only way to it."""

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

import psutil
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterName,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType, TaskRun
from prefect.exceptions import ObjectNotFound

from flows import task_runs
from rlhf_core.diagnosis.reconcile import FlowRunFacts, FlowState, ProcessState
from rlhf_core.launch.lease import Owner
from rlhf_core.run_dir import is_run_id

__all__ = ["RESUME_DEPLOYMENT", "ObjectNotFound", "Seen", "adopt", "end", "facts", "look"]

RUN_FLOW = "rlhf-run"
"""The flow of one run."""

RESUME_DEPLOYMENT = "rlhf-run/resume"
"""The deployment that goes on with a run, given its id."""

ADOPTED_TAG = "rlhf-adopted"
"""Tag of the flow runs that the reconciler starts: nobody asked for them, so budgets of retries go on as they were."""

FLOW_RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"
"""Environment variable by which the process of a flow run knows which it is."""

_PAGE = 200
_AT_WORK = [StateType.PENDING, StateType.RUNNING, StateType.PAUSED, StateType.CANCELLING]


@dataclass(frozen=True)
class Seen:
    """Flow runs as Prefect has them, and what is known of the processes on this machine after that."""

    flow_runs: Sequence[FlowRun]
    processes: frozenset[str]
    """Ids of the flow runs that have a process here."""
    attended: frozenset[str] = frozenset()
    """Those whose process a worker has, which can cancel it."""
    task_runs: Sequence[TaskRun] = ()
    """Task runs that Prefect takes for alive although their flow runs have ended."""


def look(run_ids: Collection[str], flow_run_ids: Collection[str]) -> Seen:
    """Flow runs that Prefect takes for alive, those named after a run, and those that are named; in a few questions.

    Raises whatever Prefect raises when it does not answer.
    """
    with get_client(sync_client=True) as client:
        found = {one.id: one for one in _pages(client, FlowRunFilter(state=_state_filter()))}
        for names in _chunks(sorted(run_ids)):
            named = FlowRunFilter(name=FlowRunFilterName(any_=names))
            found |= {one.id: one for one in _pages(client, named)}
        for ids in _chunks(sorted(flow_run_ids)):
            identified = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(one) for one in ids]))
            found |= {one.id: one for one in _pages(client, identified)}
        left_open = task_runs.left_open(client, RUN_FLOW, found.keys())
    # Processes last: what is alive now was not dead when Prefect was asked.
    processes = dict(_flow_run_processes())
    attended = frozenset(one for one, is_attended in processes.items() if is_attended)
    return Seen(list(found.values()), frozenset(processes), attended, left_open)


def facts(seen: Seen, controllers: Mapping[str, tuple[str, str]], pool: str, now: datetime) -> list[FlowRunFacts]:
    """What was seen, as the reconciler wants it.

    Args:
        controllers: run and controller of each flow run that the history knows.
        pool: work pool whose worker is on this machine.
        now: the present.
    """
    return [_facts(one, seen, controllers, pool, now) for one in seen.flow_runs if one.state is not None]


def _facts(
    flow_run: FlowRun,
    seen: Seen,
    controllers: Mapping[str, tuple[str, str]],
    pool: str,
    now: datetime,
) -> FlowRunFacts:
    assert flow_run.state is not None
    flow_run_id = str(flow_run.id)
    run_id, controller = controllers.get(flow_run_id, ("", ""))
    state = FlowState(flow_run.state.type.value)
    changed_at = flow_run.state.timestamp
    return FlowRunFacts(
        flow_run_id=flow_run_id,
        run_id=run_id or _named_run(flow_run),
        state=state,
        changed_at=changed_at,
        state_s=(now - changed_at).total_seconds(),
        created_at=flow_run.created or datetime.min.replace(tzinfo=UTC),
        process=_process(flow_run, flow_run_id in seen.processes, controller, pool),
        suspended=state is FlowState.PAUSED and flow_run.state.name == "Suspended",
        attended=flow_run_id in seen.attended or flow_run_id not in seen.processes,
    )


def _named_run(flow_run: FlowRun) -> str:
    asked = str((flow_run.parameters or {}).get("run_id") or "")
    return next((one for one in (asked, flow_run.name or "") if is_run_id(one)), "")


def _process(flow_run: FlowRun, is_here: bool, controller: str, pool: str) -> ProcessState:
    if is_here:
        return ProcessState.ALIVE
    owner = Owner.parse(controller)
    if owner is not None:
        if not owner.is_here():
            return ProcessState.UNKNOWN
        return ProcessState.GONE if owner.is_known_dead() else ProcessState.ALIVE
    # Of this machine's worker, which starts all flow runs of the pool; it had a process once, and has none now.
    started = bool(flow_run.infrastructure_pid) or flow_run.start_time is not None
    return ProcessState.GONE if flow_run.work_pool_name == pool and started else ProcessState.UNKNOWN


def _flow_run_processes() -> Iterator[tuple[str, bool]]:
    """Ids of the flow runs that have a living process of this user here, and whether a worker has it.

    It is known by its command line too: jobs inherit the environment of the flow run that submitted them.
    """
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real != os.getuid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            flow_run_id = process.environ().get(FLOW_RUN_VARIABLE, "")
            if flow_run_id and any(word.startswith("prefect.") for word in process.cmdline()):
                parent = process.parent()
                yield flow_run_id, parent is not None and "worker" in parent.cmdline()


# ---------------------------------------------------------------------------------------------------------------------
# What Prefect is told


def adopt(run_id: str, key: str) -> str:
    """Start a flow run that goes on with a run; its id. The same key makes no second one.

    Raises whatever Prefect raises; ``ObjectNotFound`` where the deployment is not registered.
    """
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name(RESUME_DEPLOYMENT)
        made = client.create_flow_run_from_deployment(
            deployment.id, parameters={"run_id": run_id}, name=run_id, tags=[ADOPTED_TAG], idempotency_key=key
        )
        return str(made.id)


def end(flow_run_id: str, state: FlowState, changed_at: datetime, why: str) -> bool:
    """Give a flow run a last state; False, with nothing done, where its state has changed since it was looked at."""
    with get_client(sync_client=True) as client:
        try:
            present = client.read_flow_run(UUID(flow_run_id)).state
        except ObjectNotFound:
            return False
        if present is None or present.timestamp != changed_at:
            return False
        last: State[None] = State(type=StateType(state.value), name=state.value.capitalize(), message=why)
        client.set_flow_run_state(UUID(flow_run_id), last, force=True)
        return True


# ---------------------------------------------------------------------------------------------------------------------
# Pages and chunks


def _state_filter() -> FlowRunFilterState:
    return FlowRunFilterState(type=FlowRunFilterStateType(any_=_AT_WORK))


def _pages(client: SyncPrefectClient, which: FlowRunFilter) -> Iterator[FlowRun]:
    flow = FlowFilter(name=FlowFilterName(any_=[RUN_FLOW]))
    offset = 0
    while True:
        page = client.read_flow_runs(flow_filter=flow, flow_run_filter=which, limit=_PAGE, offset=offset)
        yield from page
        if len(page) < _PAGE:
            return
        offset += _PAGE


def _chunks(ids: Sequence[str]) -> Iterator[list[str]]:
    for start in range(0, len(ids), _PAGE):
        yield list(ids[start : start + _PAGE])
