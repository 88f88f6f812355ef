"""The flow run of this process, which drives a run: for the run's journal, and named and tagged like the run."""

from collections.abc import Callable
from datetime import datetime
from uuid import UUID

from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext

from flows.flow_runs.facts import ADOPTED_TAG
from flows.flow_runs.links import has_pages, page
from flows.server.clients import api_client
from rlhf_core.config.site import Site
from rlhf_core.control.driving_flow_run import NO_FLOW_RUN, DrivingFlowRun
from rlhf_core.run_dir.run import RunDir
from rlhf_core.survival import Survived


def present() -> FlowRun | None:
    """The flow run of this process; None outside a flow run."""
    context = FlowRunContext.get()
    return context.flow_run if context is not None else None


def of_this_process(site: Site) -> DrivingFlowRun:
    """The flow run to store in the journal; empty outside a flow run."""
    flow_run = present()
    if flow_run is None:
        return NO_FLOW_RUN
    adopts = ADOPTED_TAG in flow_run.tags and flow_run.run_count <= 1
    url = page(site, "runs/flow-run", flow_run.id) if has_pages(site) else ""
    return DrivingFlowRun(str(flow_run.id), url, requested_at(flow_run), adopts)


def requested_at(flow_run: FlowRun) -> datetime | None:
    """Time of the request: for a run of a schedule, the time it was due, because Prefect creates it days before."""
    return flow_run.expected_start_time if flow_run.auto_scheduled else flow_run.created


def label(flow_run: DrivingFlowRun, run_dir: RunDir, log: Callable[[str], None]) -> None:
    """Name the flow run after its run, and tag it with the run's id, owner and tags.

    This affects only the display: an unavailable server is reported, and the run continues.
    """
    with Survived() as failed:  # whatever Prefect raises, run directory and history are complete
        stored, flow_run_id = run_dir.read_spec(), UUID(flow_run.id)
        with api_client() as client:
            found = client.read_flow_run(flow_run_id)
            client.update_flow_run(flow_run_id, name=stored.run_id, tags=sorted({*found.tags, *stored.tags}))
            client.update_flow_run_labels(flow_run_id, {"rlhf.run_id": stored.run_id, "rlhf.owner": stored.owner})
    if failed.error is not None:
        log(f"Prefect could not be told: {failed.problem}")
