"""The flow run of this process: its id and page for the run's journal, and the run's name and tags for Prefect."""

from collections.abc import Callable
from datetime import datetime
from uuid import UUID

from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_UI_URL

from flows.flow_runs.facts import ADOPTED_TAG
from flows.server.clients import api_client
from flows.server.proxies import status_of
from rlhf_core.config.site import Site
from rlhf_core.control.controller import FlowRunLink
from rlhf_core.run_dir.run import RunDir
from rlhf_core.survival import Survived


def present() -> FlowRun | None:
    """The flow run of this process; None outside a flow run."""
    context = FlowRunContext.get()
    return context.flow_run if context is not None else None


def of_this_process(site: Site) -> FlowRunLink:
    """The link to store in the journal; empty outside a flow run."""
    flow_run = present()
    if flow_run is None:
        return FlowRunLink()
    adopts = ADOPTED_TAG in flow_run.tags and flow_run.run_count <= 1
    url = page(site, "runs/flow-run", flow_run.id) if _has_pages(site) else ""
    return FlowRunLink(str(flow_run.id), url, requested_at(flow_run), adopts)


def requested_at(flow_run: FlowRun) -> datetime | None:
    """Time of the request: for a run of a schedule, the time it was due, because Prefect creates it days before."""
    return flow_run.expected_start_time if flow_run.auto_scheduled else flow_run.created


def label(link: FlowRunLink, run_dir: RunDir, log: Callable[[str], None]) -> None:
    """Name the flow run after its run, and tag it with the run's id, owner and tags.

    This affects only the display: an unavailable server is reported, and the run continues.
    """
    with Survived() as failed:  # whatever Prefect raises, run directory and history are complete
        stored, flow_run_id = run_dir.read_spec(), UUID(link.id)
        with api_client() as client:
            found = client.read_flow_run(flow_run_id)
            client.update_flow_run(flow_run_id, name=stored.run_id, tags=sorted({*found.tags, *stored.tags}))
            client.update_flow_run_labels(flow_run_id, {"rlhf.run_id": stored.run_id, "rlhf.owner": stored.owner})
    if failed.error is not None:
        log(f"Prefect could not be told: {failed.problem}")


def page(site: Site, kind: str, id: UUID) -> str:
    """Address of a page of the UI, for a browser."""
    address = site.prefect.url or PREFECT_UI_URL.value() or ""
    return f"{address.rstrip('/')}/{kind}/{id}"


def _has_pages(site: Site) -> bool:
    """False for a server without a UI, like a temporary one."""
    # A page may require a password.
    return bool(site.prefect.url) or status_of(PREFECT_UI_URL.value() or "", 2.0) in (200, 401, 403)
