"""Reasons why a run requested in Prefect has not started: its flow run, its work pool, its workers.

Distinguishes a run that is waiting its turn (a schedule, a limit) from one that no worker is available to start.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.client.schemas.objects import FlowRun, StateType, Worker, WorkPool, WorkQueue
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelled, Cancelling

from flows.queries import in_states, of_flow
from flows.server.clients import commanding_client
from flows.server.settings import server_answers
from rlhf_core.errors import PrefectUnavailable, RunCancelled, RunFailed, UnknownRun

SOON = timedelta(seconds=5)
"""A flow run due within this time counts as due: workers look a few seconds ahead."""

PROMPT = timedelta(seconds=20)
"""Time within which online workers pick up a flow run; they poll every five to fifteen seconds."""

SILENT_BEATS = 2.0
"""Missed heartbeats after which a worker counts as gone. Prefect itself waits for three."""

_SLOT = "AwaitingConcurrencySlot"
"""Name of the state of a flow run that is held back by its deployment's concurrency limit."""


@dataclass(frozen=True)
class QueueWait:
    """The reason why a run has not started."""

    words: str
    """The finding and the advice. Unchanged as long as nothing has changed."""
    stuck: bool = False
    """True if no worker could start the run: without a repair it may wait forever."""


@dataclass(frozen=True)
class QueuePlace:
    """Pool, queue and workers of a waiting flow run."""

    pool: WorkPool | None
    queue: WorkQueue | None
    workers: Sequence[Worker]
    limit: int | None
    """Concurrency limit of its deployment."""


def queue_wait(flow_run_id: str, now: datetime | None = None) -> QueueWait:
    """Ask Prefect why a flow run has not created its run yet.

    Raises:
        RunFailed: the flow run has ended or was deleted: there will be no run.
        RunCancelled: it was cancelled before it started.
    """
    if not server_answers():
        return QueueWait(
            f"the Prefect server at {PREFECT_API_URL.value()} does not answer; no worker learns of the run before it "
            f"does. `rlhf up` starts the server of this machine again",
            stuck=True,
        )
    try:
        with commanding_client() as client:
            try:
                flow_run = client.read_flow_run(UUID(flow_run_id))
            except ObjectNotFound:
                why = "its flow run was deleted in Prefect before the run began: there will be no run"
                raise RunFailed(why) from None
            _require_open(flow_run)
            return explain(flow_run, _place(client, flow_run), now or datetime.now(UTC))
    except PrefectUnavailable as error:
        return QueueWait(str(error), stuck=True)


def explain(flow_run: FlowRun, place: QueuePlace, now: datetime) -> QueueWait:
    """Explain why a flow run that has not ended has not created its run. Pure."""
    state = flow_run.state
    if state is None or state.type is not StateType.SCHEDULED:
        return _taken(state.name or "" if state is not None else "unknown", flow_run, place, now)
    if state.name == _SLOT:
        limit = f" of {place.limit}" if place.limit is not None else ""
        return QueueWait(
            f"it waits for its turn: the limit{limit} on runs of its deployment at the same time is reached"
        )
    due = state.state_details.scheduled_time or flow_run.expected_start_time or now
    if due > now + SOON:
        return QueueWait(f"it is scheduled for {due:%Y-%m-%d %H:%M:%S} UTC")
    return _blocked(flow_run, place, now) or _full(flow_run, place) or _late(flow_run, place, due, now)


def _taken(state: str, flow_run: FlowRun, place: QueuePlace, now: datetime) -> QueueWait:
    """The reason why a flow run that a worker has taken has made no run. The worker may be gone together with its
    process; nothing ends it in Prefect before a worker is back."""
    if _has_worker(place, now):
        return QueueWait(f"a worker has taken it ({state}); its process makes the run directory next")
    return QueueWait(
        f"a worker has taken it ({state}), but no worker of the pool {flow_run.work_pool_name!r} is online now"
        f"{_last_online(place)}. `rlhf up` on the machine of the site starts one; if the process of the run is gone, "
        "its flow run counts as crashed then: Retry on its page starts it again",
        stuck=True,
    )


def _blocked(flow_run: FlowRun, place: QueuePlace, now: datetime) -> QueueWait | None:
    """The reason why no worker could start it, if any."""
    name = flow_run.work_pool_name
    if place.pool is None:
        found = f"the Prefect server has no work pool {name!r} any more" if name else "its deployment has no work pool"
        return QueueWait(
            f"{found}. `rlhf up` makes it again; then deploy again (`rlhf deploy`), and ask again", stuck=True
        )
    if place.pool.is_paused:
        return QueueWait(f"the work pool {name!r} is paused in Prefect: resume it on its page", stuck=True)
    if place.queue is not None and place.queue.is_paused:
        return QueueWait(
            f"the queue {place.queue.name!r} of the work pool {name!r} is paused in Prefect: resume it on its page",
            stuck=True,
        )
    if _has_worker(place, now):
        return None
    return QueueWait(
        f"no worker of the pool {name!r} is online{_last_online(place)}. `rlhf up` on the machine of the site starts "
        "one; the run stays asked for until then",
        stuck=True,
    )


def _has_worker(place: QueuePlace, now: datetime) -> bool:
    return any(is_alive(worker, now) for worker in place.workers)


def _last_online(place: QueuePlace) -> str:
    last_heartbeat = max((one.last_heartbeat_time for one in place.workers if one.last_heartbeat_time), default=None)
    return "" if last_heartbeat is None else f"; the last one was heard at {last_heartbeat:%Y-%m-%d %H:%M:%S} UTC"


def is_alive(worker: Worker, now: datetime) -> bool:
    """True if a worker is alive by its own heartbeats: Prefect shows a killed worker as online for another 90 s."""
    if worker.last_heartbeat_time is None:
        return False
    beat_s = worker.heartbeat_interval_seconds or 30
    return now - worker.last_heartbeat_time < timedelta(seconds=SILENT_BEATS * beat_s)


def _full(flow_run: FlowRun, place: QueuePlace) -> QueueWait | None:
    queue = f"queue {place.queue.name!r}" if place.queue is not None else ""
    for one, what in ((place.pool, f"work pool {flow_run.work_pool_name!r}"), (place.queue, queue)):
        if one is not None and one.concurrency_limit is not None and (one.active_slots or 0) >= one.concurrency_limit:
            more = " ([prefect] max_runs of rlhf.toml)" if one is place.pool else ""
            return QueueWait(
                f"it waits for its turn: {one.active_slots} of {one.concurrency_limit} places of the {what} are "
                f"taken{more}"
            )
    return None


def _late(flow_run: FlowRun, place: QueuePlace, due: datetime, now: datetime) -> QueueWait:
    online = ", ".join(sorted(worker.name for worker in place.workers if is_alive(worker, now)))
    if now - due < PROMPT:
        return QueueWait(f"it is with the work pool {flow_run.work_pool_name!r}, and a worker is online ({online})")
    return QueueWait(
        f"it is late: due at {due:%Y-%m-%d %H:%M:%S} UTC, and no worker has taken it, though {online} is online. The "
        f"log of the worker says more (logs/worker.log of RLHF_HOME on its machine)"
    )


def _require_open(flow_run: FlowRun) -> None:
    """Raise if the flow run has ended."""
    state = flow_run.state
    if state is None or not state.is_final():
        return
    message = f": {state.message}" if state.message else ""
    if state.is_cancelled():
        raise RunCancelled(f"it was cancelled in Prefect before the run began{message}")
    raise RunFailed(f"its flow run is {state.name} before the run began{message}")


def _place(client: SyncPrefectClient, flow_run: FlowRun) -> QueuePlace:
    pool_name = flow_run.work_pool_name or ""
    pool: WorkPool | None = None
    queue: WorkQueue | None = None
    workers: Sequence[Worker] = ()
    if not pool_name:
        return QueuePlace(None, None, (), None)
    try:
        pool = client.read_work_pool(pool_name)
        workers = client.read_workers_for_work_pool(pool_name)
        if flow_run.work_queue_name:
            queue = client.read_work_queue_by_name(flow_run.work_queue_name, work_pool_name=pool_name)
    except ObjectNotFound:
        pass  # the explanation mentions what is missing
    limit = None
    if flow_run.deployment_id is not None and flow_run.state is not None and flow_run.state.name == _SLOT:
        found = client.read_deployment(flow_run.deployment_id).global_concurrency_limit
        limit = found.limit if found is not None else None
    return QueuePlace(pool, queue, workers, limit)


def withdraw(name: str, reason: str) -> bool:
    """Cancel the flow run of a name that would create a run; False if Prefect has none that has not started.

    If a worker has just picked it up, that worker cancels it and ends the process.

    Args:
        name: the id of its future run, or the name that Prefect made up for a request from its UI.

    Raises:
        UnknownRun: several have the name.
        PrefectUnavailable: the server fails.
    """
    named = FlowRunFilter(
        name=FlowRunFilterName(any_=[name]), state=in_states([StateType.SCHEDULED, StateType.PENDING])
    )
    with commanding_client() as client:
        waiting = client.read_flow_runs(flow_filter=of_flow(), flow_run_filter=named)
        found = [one for one in waiting if not one.parameters.get("run_id")]  # the others would resume a run
        if len(found) > 1:
            raise UnknownRun(f"{len(found)} requests in Prefect are called {name!r}: cancel the one you mean there")
        for flow_run in found:
            taken = flow_run.state is not None and flow_run.state.type is StateType.PENDING
            client.set_flow_run_state(flow_run.id, Cancelling(message=reason) if taken else Cancelled(message=reason))
    return bool(found)
