"""``rlhf-run``: the Prefect flow of one run. ``flows.stages`` has the order of its steps; here they become visible."""

import os
import textwrap
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from prefect import Flow, State, flow, get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun as PrefectFlowRun
from prefect.context import FlowRunContext
from prefect.exceptions import CancelledRun
from prefect.logging.loggers import flow_run_logger
from prefect.settings import PREFECT_UI_URL
from prefect.states import Cancelled, Completed, Failed

from flows.asking import skipping
from flows.asking.form import Form, meanings, overrides_of, read_form
from flows.asking.kept import kept_with
from flows.cancelling import cancel_run
from flows.keeping.flow_runs import ADOPTED_TAG
from flows.limits import run_slot
from flows.promoting.approval import asked_in_prefect
from flows.promoting.promotion import Question, describe
from flows.publisher import published
from flows.session import FlowRun, Session, new_run, opened
from flows.stages import drive
from flows.tasks import TaskCaller, Work
from flows.told import leave_out
from rlhf_core.config import Site, load_site
from rlhf_core.errors import RlhfError, RunCancelled
from rlhf_core.history.controllers import run_of_flow_run
from rlhf_core.history.store import HistoryStore
from rlhf_core.run_dir import RunDir
from rlhf_core.schemas.regression import regression_text
from rlhf_core.watchdog.evidence import regressed
from rlhf_core.words import THROUGH_PREFECT

FLOW = "rlhf-run"
"""Name of the flow; deployments are called ``rlhf-run/<name>``."""

DESCRIPTION = "One RLHF run: preflight, allocate, train, evaluate. Failures are diagnosed and retried."
"""What the flow is, in Prefect's list of flows."""


@dataclass(frozen=True)
class _Handed:
    """What ``rlhf run`` hands to the flow in its own process. A deployment's flow run opens its own session."""

    session: Session
    work: Work


_handed: ContextVar[_Handed | None] = ContextVar("handed", default=None)


def _described(function: Callable[..., State[None]]) -> Callable[..., State[None]]:
    """Give the flow function the docstring and the bounds from which Prefect makes its form."""
    arguments = "\n".join(f"{name}: {meaning}".replace("\n", "\n    ") for name, meaning in meanings().items())
    bounded = {name: field for name, field in Form.model_fields.items() if field.annotation in (str, int, float)}
    function.__annotations__ |= {name: field.rebuild_annotation() for name, field in bounded.items()}
    function.__doc__ = f"{DESCRIPTION}\n\nArgs:\n{textwrap.indent(arguments, '    ')}\n"
    return function


# ---------------------------------------------------------------------------------------------------------------------
# What Prefect calls when its worker has ended the process of a flow run, from the worker's own process


def end_run(flow: Flow[Any, Any], flow_run: PrefectFlowRun, state: State[Any]) -> None:
    """The flow run was cancelled in Prefect: end its run and the run's job."""
    say = flow_run_logger(flow_run, flow).info
    site = _site_of(flow_run)
    with HistoryStore(site.database_url) as store:
        run_dir = _run_of(flow_run, site, store)
        if run_dir is None:
            say("this flow run had not made a run yet; there is nothing to end")
            return
        say(cancel_run(run_dir, site, store, f"cancelled in Prefect ({THROUGH_PREFECT})", say=say).message)


def leave_run(flow: Flow[Any, Any], flow_run: PrefectFlowRun, state: State[Any]) -> None:
    """The process of the flow run died. Its job trains on and must not suffer from that, unless it was to be ended."""
    say = flow_run_logger(flow_run, flow).info
    site = _site_of(flow_run)
    with HistoryStore(site.database_url) as store:
        run_dir = _run_of(flow_run, site, store)
        if run_dir is None:
            return
        if run_dir.cancel_request.exists():
            say(cancel_run(run_dir, site, store, "it was to be ended when its controller died", say=say).message)
        else:
            say(
                f"the controller of run {run_dir.run_id} died; what it has started goes on. Retry this flow run, or "
                f"`rlhf resume {run_dir.run_id}`, to adopt it; `rlhf cancel {run_dir.run_id}` ends it"
            )


def _site_of(flow_run: PrefectFlowRun) -> Site:
    """The site whose runs this flow run drives: its deployment says which, as it did to its process."""
    environment = dict(os.environ)
    if flow_run.deployment_id is not None:
        with get_client(sync_client=True) as client:
            deployment = client.read_deployment(flow_run.deployment_id)
        environment |= deployment.job_variables.get("env") or {}
    return load_site(environment)


def _run_of(flow_run: PrefectFlowRun, site: Site, store: HistoryStore) -> RunDir | None:
    """The run of a flow run: the one that it was to go on with, the one that it made, or the one that it drove."""
    found = flow_run.parameters.get("run_id") or ""
    made = FlowRun(str(flow_run.id)).run_dir(site.runs_dir)
    if not found and made is not None:
        return made
    return RunDir.find(site.runs_dir, str(found) or run_of_flow_run(store, str(flow_run.id)) or "")


# ---------------------------------------------------------------------------------------------------------------------
# The flow


@flow(
    name=FLOW,
    description=DESCRIPTION,
    retries=0,
    persist_result=False,
    validate_parameters=False,  # flows.asking.form does, and says what to do
    on_cancellation=[end_run],
    on_crashed=[leave_run],
)
@_described
def rlhf_run(
    config: str = "",
    name: str = "",
    nodes: int = 0,
    gpus_per_node: int = -1,
    steps: int = 0,
    learning_rate: float = 0.0,
    seed: int = -1,
    owner: str = "",
    tags: str = "",
    overrides: str = "",
    run_id: str = "",
) -> State[None]:
    given = {
        "config": config,
        "name": name,
        "nodes": nodes,
        "gpus_per_node": gpus_per_node,
        "steps": steps,
        "learning_rate": learning_rate,
        "seed": seed,
        "owner": owner,
        "tags": tags,
        "overrides": overrides,
        "run_id": run_id,
    }
    handed = _handed.get()
    leave_out()
    try:
        return _driven(handed) if handed is not None else _asked_for(given)
    except RlhfError as error:
        # It was raised on purpose, and its message says all: Prefect would log where in this program, too.
        get_run_logger().error("%s", error)
        return Failed(message=str(error))


def _driven(handed: _Handed) -> State[None]:
    """The run of a terminal."""
    link = _this_flow_run(handed.session.site)
    _try(lambda: _label(link, handed.session.run_dir), handed.session.observer.says)
    handed.session.announce(link)
    return _finish(handed.session, handed.work)


def _asked_for(given: Mapping[str, Any]) -> State[None]:
    """The run that was asked for in Prefect.

    Raises:
        BadInput: the form, the config or an override cannot be used, or preflight blocked.
    """
    form = read_form(given)
    site = load_site()
    busy = _busy_with(site)
    if busy:
        return Cancelled(message=f"skipped: {busy}")
    link = _this_flow_run(site)
    with HistoryStore(site.database_url) as store:
        run_dir, resumed = _begun(form, site, link)
        _try(lambda: _label(link, run_dir), print)
        with opened(run_dir, site, store, resumed=resumed, flow_run=link) as session:
            return _finish(session, _work(session))


def _busy_with(site: Site) -> str:
    """Reason why this flow run does not begin: its deployment skips times at which its last run still goes on."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or not skipping.is_to_be_skipped(context.flow_run):
        return ""
    with get_client(sync_client=True) as client:
        busy = skipping.busy_with(client, context.flow_run, site.runs_dir)
    if not busy:
        return ""
    why = f"run {busy} of the same deployment still goes on"
    get_run_logger().warning("skipped: %s", why)
    skipping.tell(context.flow_run, why)
    return why


def _begun(form: Form, site: Site, link: FlowRun) -> tuple[RunDir, bool]:
    """The run of this flow run, and whether it is gone on with: a flow run that is tried again never makes a second."""
    if form.run_id:
        return RunDir.of(site.runs_dir, form.run_id), not link.adopts
    made = link.run_dir(site.runs_dir)
    if made is not None:
        return made, True
    overrides = overrides_of(form)
    kept = kept_with(form.config)
    folder = kept.folder if kept is not None else site.home  # this process is in a folder that goes with it
    return new_run(form.config, overrides, site, folder=folder, owner=form.owner, tags=form.tags, flow_run=link), False


def _this_flow_run(site: Site) -> FlowRun:
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return FlowRun()
    flow_run = context.flow_run
    adopts = ADOPTED_TAG in flow_run.tags and flow_run.run_count <= 1
    return FlowRun(str(flow_run.id), _page(site, str(flow_run.id)), flow_run.created, adopts)


def _page(site: Site, flow_run_id: str) -> str:
    """Where a browser finds a flow run; empty where the server in use has no pages, as a temporary one."""
    address = site.prefect.url or PREFECT_UI_URL.value() or ""
    if not site.prefect.url and not _is_a_page(address):
        return ""
    return f"{address.rstrip('/')}/runs/flow-run/{flow_run_id}"


def _is_a_page(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=2.0):
            return True
    except urllib.error.HTTPError as error:
        return error.code in (401, 403)  # it wants a password, as it may
    except (OSError, ValueError):
        return False


def run_in_prefect(session: Session) -> None:
    """Drive an open session as a flow run. Raises what :func:`flows.stages.drive` raises.

    A Prefect server that is lost on the way changes nothing but the view.
    """
    work = _work(session)
    with _hand_over(_Handed(session, work)):
        try:
            rlhf_run(run_id=session.run_dir.run_id)
        except CancelledRun:
            if work.error is None:
                raise
            raise work.error from None
        except Exception as error:  # noqa: BLE001 - ours is raised again by settle; Prefect's own does not stop a run
            work.settle(error, session.observer.says)


def _work(session: Session) -> Work:
    def do() -> None:
        session.announce(FlowRun())  # unless the flow run did: Prefect may have failed before it began
        with run_slot(session) as give_back:

            def ask(asking: Session, question: Question) -> AbstractContextManager[None]:
                give_back()  # whoever waits for a person keeps no other run waiting
                return asked_in_prefect(asking, question)

            drive(session, TaskCaller(session.observer.says), ask)

    return Work(do)


@contextmanager
def _hand_over(handed: _Handed) -> Iterator[None]:
    token = _handed.set(handed)
    try:
        yield
    finally:
        _handed.reset(token)


def _finish(session: Session, work: Work) -> State[None]:
    """Do the work, and say in Prefect's words how it ended."""
    try:
        with published(session):
            work()
    except RunCancelled as cancelled:
        return Cancelled(message=str(cancelled))
    return ended_well(session.run_dir, describe(session.journal.record.promotion))


def ended_well(run_dir: RunDir, promoted: str = "") -> State[None]:
    """End of the flow run of a run that has completed; its words are all that Prefect's lists show of it."""
    said = ["completed", regression_text(regressed(run_dir)), promoted]
    return Completed(message=f"run {run_dir.run_id} " + "; ".join(part for part in said if part))


def _label(link: FlowRun, run_dir: RunDir) -> None:
    """Name the flow run after its run, and let it be found by the run's id, owner and tags."""
    stored = run_dir.read_spec()
    flow_run_id = UUID(link.id)
    with get_client(sync_client=True) as client:
        present = client.read_flow_run(flow_run_id)
        client.update_flow_run(flow_run_id, name=stored.run_id, tags=sorted({*present.tags, *stored.tags}))
        client.update_flow_run_labels(flow_run_id, {"rlhf.run_id": stored.run_id, "rlhf.owner": stored.owner})


def _try(action: Callable[[], None], say: Callable[[str], None]) -> None:
    """Do something for the view only: a server that is away must not stop a run."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - whatever Prefect raises, the run directory and the history have it all
        say(f"Prefect could not be told: {type(error).__name__}: {error}")
