"""Hooks for a flow run that was ended from outside. Prefect's worker calls them in its own process."""

import os
from typing import Any

from prefect import Flow, State
from prefect.client.schemas.objects import FlowRun
from prefect.logging.loggers import flow_run_logger

from flows.server.clients import api_client
from rlhf_core.config.site import Site, load_site
from rlhf_core.control.attempts.jobs import is_to_save
from rlhf_core.control.cancel import cancel_run
from rlhf_core.control.driving_flow_run import DrivingFlowRun
from rlhf_core.files.lookups import is_there
from rlhf_core.history.queries.open_runs import runs_of_flow_runs
from rlhf_core.history.store import HistoryStore
from rlhf_core.run_dir.run import RunDir
from rlhf_core.text.formatting import THROUGH_PREFECT


def end_run(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:
    """End the run, and its job, of a flow run that was cancelled in Prefect."""
    log = flow_run_logger(flow_run, flow).info
    site = _site_of(flow_run)
    with HistoryStore(site.database_url) as store:
        run_dir = _run_of(flow_run, site, store)
        if run_dir is None:
            log("this flow run had not made a run yet; there is nothing to end")
            return
        log(cancel_run(run_dir, site, store, f"cancelled in Prefect ({THROUGH_PREFECT})", log=log).message)


def leave_run(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Leave the job of a flow run whose process died: it keeps training, unless it was to be cancelled."""
    log = flow_run_logger(flow_run, flow).info
    site = _site_of(flow_run)
    with HistoryStore(site.database_url) as store:
        run_dir = _run_of(flow_run, site, store)
        if run_dir is None:
            return
        if is_there(run_dir.cancel_request):
            reason = "it was to be ended when its controller died"
            log(cancel_run(run_dir, site, store, reason, save=is_to_save(run_dir), log=log).message)
        else:
            log(
                f"the controller of run {run_dir.run_id} died; what it has started continues. Retry this flow run, or "
                f"`rlhf resume {run_dir.run_id}`, to adopt it; `rlhf cancel {run_dir.run_id}` ends it"
            )


def _site_of(flow_run: FlowRun) -> Site:
    """The site whose runs this flow run drives, from the deployment's settings, which its process used as well."""
    environment = dict(os.environ)
    if flow_run.deployment_id is not None:
        with api_client() as client:
            deployment = client.read_deployment(flow_run.deployment_id)
        environment |= deployment.job_variables.get("env") or {}
    return load_site(environment)


def _run_of(flow_run: FlowRun, site: Site, store: HistoryStore) -> RunDir | None:
    """The run of a flow run: the one it was to resume, the one it created, or the one it drove."""
    found = flow_run.parameters.get("run_id") or ""
    made = DrivingFlowRun(str(flow_run.id)).run_dir(site.runs_dir)
    if not found and made is not None:
        return made
    if not found:
        found, _ = runs_of_flow_runs(store, [str(flow_run.id)]).get(str(flow_run.id), ("", ""))
    return RunDir.find(site.runs_dir, str(found))
