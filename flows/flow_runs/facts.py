"""The flow runs of a site for the reconciler: Prefect behind the interface of :mod:`rlhf_core.control.reconcile`."""

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from uuid import UUID

import psutil
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterName
from prefect.client.schemas.objects import FlowRun, State, StateType, TaskRun
from prefect.exceptions import ObjectNotFound

from flows.flow_runs import task_runs
from flows.publishing.artifacts import Publication, publication_of, publish, unpublished_parts
from flows.publishing.events import FlowRunRef
from flows.queries import PAGE, RUN_FLOW, in_states, of_flow, rows_of_pages
from flows.server.clients import api_client
from flows.server.settings import server_answers
from rlhf_core.config.site import Site
from rlhf_core.control.reconcile.flow_runs import FlowRunSnapshot, NotRegistered, RunsOfFlowRuns
from rlhf_core.diagnosis.reconcile.facts import FlowRunFacts, FlowState, ProcessState
from rlhf_core.history.store import HistoryStore
from rlhf_core.launch.lease import Owner
from rlhf_core.run_dir.journal import read_journal
from rlhf_core.run_dir.run import RunDir, is_run_id
from rlhf_core.schemas.journal import ControllerStarted
from rlhf_core.services.presence import service_status

RESUME = "resume"
RESUME_DEPLOYMENT = f"{RUN_FLOW}/{RESUME}"
"""The deployment that resumes a run; its only parameter is ``run_id``."""

ADOPTED_TAG = "rlhf-adopted"
"""Tag of flow runs that the reconciler starts: no user requested them, so retry budgets are not reset."""

FLOW_RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"
"""Environment variable that holds the id of the flow run in its process."""

_AT_WORK = [StateType.PENDING, StateType.RUNNING, StateType.PAUSED, StateType.CANCELLING]


@dataclass(frozen=True)
class PrefectFlowRuns:
    """The flow runs of a site on the Prefect server that this process is connected to."""

    site: Site

    def answers(self) -> bool:
        """True if the server currently answers."""
        return server_answers()

    def poll(
        self, run_ids: Collection[str], flow_run_ids: Collection[str], runs: RunsOfFlowRuns, now: datetime
    ) -> FlowRunSnapshot:
        """Flow runs that Prefect considers alive, those named after a run, and those given by id."""
        flow_runs, open_task_runs = _poll(run_ids, flow_run_ids)
        # Processes come last: one that is alive now was not dead when Prefect was queried.
        processes = dict(_flow_run_processes())
        pool = self.site.prefect.pool if _worker_is_visible(self.site) else ""
        controllers = runs({str(one.id) for one in flow_runs})
        found = [_facts(one, processes, controllers, pool, now) for one in flow_runs if one.state is not None]
        run_of = {one.flow_run_id: one.run_id for one in found}
        return FlowRunSnapshot(found, task_runs.facts(open_task_runs, run_of, self.site.runs_dir))

    def adopt(self, run_id: str, key: str) -> str:
        """Start a flow run that resumes a run, and return its id. The same key never creates a second one."""
        with api_client() as client:
            try:
                deployment = client.read_deployment_by_name(RESUME_DEPLOYMENT)
            except ObjectNotFound:
                raise NotRegistered(f"the deployment {RESUME_DEPLOYMENT} is not registered") from None
            made = client.create_flow_run_from_deployment(
                deployment.id, parameters={"run_id": run_id}, name=run_id, tags=[ADOPTED_TAG], idempotency_key=key
            )
            return str(made.id)

    def end_flow_run(self, flow_run_id: str, state: FlowState, changed_at: datetime, reason: str) -> bool:
        """Set the final state of a flow run; False, with nothing done, if its state has changed since
        ``changed_at``."""
        with api_client() as client:
            try:
                present = client.read_flow_run(UUID(flow_run_id)).state
            except ObjectNotFound:
                return False
            if present is None or present.timestamp != changed_at:
                return False
            last: State[None] = State(type=StateType(state.value), name=state.value.capitalize(), message=reason)
            client.set_flow_run_state(UUID(flow_run_id), last, force=True)
            return True

    def end_task_run(self, task_run_id: str, state: FlowState, reason: str) -> None:
        """Set the final state of a task run that is still open."""
        task_runs.end(task_run_id, state, reason)

    def num_unpublished(self, run_dir: RunDir, store: HistoryStore, known: Collection[str]) -> int:
        """Number of events and artifacts of an ended run that the server lacks."""
        return len(unpublished_parts(_publication(run_dir, store, known)))

    def publish(self, run_dir: RunDir, store: HistoryStore, known: Collection[str]) -> list[str]:
        """Publish the parts of a run that the server lacks; return their names."""
        return list(publish(_publication(run_dir, store, known)))

    def configs(self) -> Iterator[str]:
        """Configs of deployments, and of flow runs that may still start or be retried: their snapshots must not be
        removed.

        Raises Prefect's own errors if the server does not answer.
        """
        restartable = FlowRunFilter(state=in_states(one for one in StateType if one is not StateType.COMPLETED))
        with api_client() as client:
            deployments = rows_of_pages(client.read_deployments, overlaps=True)
            flow_runs = rows_of_pages(partial(client.read_flow_runs, flow_run_filter=restartable), overlaps=True)
            yield from (str(one.parameters.get("config") or "") for rows in (deployments, flow_runs) for one in rows)


def _publication(run_dir: RunDir, store: HistoryStore, known: Collection[str]) -> Publication:
    """Publication of a run in the name of the newest flow run that drove it and is known to this server; empty for a
    run that belongs to another server, or to none."""
    # Not that of the newest controller, which may have run without Prefect while the server was down.
    events = [line.event for line in read_journal(run_dir.control)]
    drove = [event.flow_run_id for event in events if isinstance(event, ControllerStarted)]
    source = FlowRunRef(next((one for one in reversed(drove) if one in known), ""), run_dir.run_id)
    return publication_of(run_dir, store, source)


def _poll(run_ids: Collection[str], flow_run_ids: Collection[str]) -> tuple[list[FlowRun], list[TaskRun]]:
    """Flow runs that Prefect considers alive, those named after a run, and those given by id, in a few queries; and the
    task runs that it considers alive although their flow runs have ended.

    Raises Prefect's own errors if the server does not answer.
    """
    with api_client() as client:
        wanted = [
            FlowRunFilter(state=in_states(_AT_WORK)),
            *(FlowRunFilter(name=FlowRunFilterName(any_=names)) for names in _chunks(run_ids)),
            *(FlowRunFilter(id=FlowRunFilterId(any_=list(map(UUID, ids)))) for ids in _chunks(flow_run_ids)),
        ]
        found = {one.id: one for which in wanted for one in _pages(client, which)}
        return list(found.values()), task_runs.left_open(client, found.keys())


def _facts(
    flow_run: FlowRun,
    processes: Mapping[str, bool],
    controllers: Mapping[str, tuple[str, str]],
    pool: str,
    now: datetime,
) -> FlowRunFacts:
    """Derive the facts about a flow run.

    Args:
        processes: from :func:`_flow_run_processes`.
        controllers: run and controller of each flow run in the history.
        pool: work pool whose worker is visible here (:func:`_worker_is_visible`); empty if it is not.
        now: the current time.
    """
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
        process=_process(flow_run, flow_run_id in processes, controller, pool),
        # Prefect also gives a start to flow runs that are cancelled before it.
        begun=bool(flow_run.infrastructure_pid) or flow_run.run_count > 0,
        suspended=state is FlowState.PAUSED and flow_run.state.name == "Suspended",
        attended=processes.get(flow_run_id, True),
    )


def _named_run(flow_run: FlowRun) -> str:
    requested = str((flow_run.parameters or {}).get("run_id") or "")
    return next((one for one in (requested, flow_run.name or "") if is_run_id(one)), "")


def _process(flow_run: FlowRun, is_here: bool, controller: str, pool: str) -> ProcessState:
    if is_here:
        return ProcessState.ALIVE
    owner = Owner.parse(controller)
    if owner is not None:
        if not owner.is_here():
            return ProcessState.UNKNOWN
        return ProcessState.GONE if owner.is_known_dead() else ProcessState.ALIVE
    # A flow run of the visible worker, which starts all of the pool; its process has disappeared.
    started = bool(flow_run.infrastructure_pid) or flow_run.start_time is not None
    return ProcessState.GONE if flow_run.work_pool_name == pool and started else ProcessState.UNKNOWN


def _worker_is_visible(site: Site) -> bool:
    """True if the site's worker is a live process that this one can see, and so are the flow runs that it starts.

    In a container of its own, it and its flow runs have process ids that mean nothing here.
    """
    record = service_status(site.home, "worker").record
    return record is not None and record.is_alive


def _flow_run_processes() -> Iterator[tuple[str, bool]]:
    """Ids of the flow runs with a live process of this user here, and True for those whose process belongs to a worker,
    which can cancel it.

    The command line is checked too, because jobs inherit the environment of the flow run that submitted them.
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
# Pages and chunks


def _pages(client: SyncPrefectClient, which: FlowRunFilter) -> Iterator[FlowRun]:
    return rows_of_pages(partial(client.read_flow_runs, flow_filter=of_flow(), flow_run_filter=which))


def _chunks(ids: Collection[str]) -> Iterator[list[str]]:
    ordered = sorted(ids)
    return (ordered[start : start + PAGE] for start in range(0, len(ordered), PAGE))
