"""The site daemon with Prefect: its rounds are flow runs, and it also watches flow runs that have not started."""

import logging
import threading

from prefect.settings import PREFECT_API_URL

from flows import reconcile, schedules
from flows.deployments import requests
from flows.flow_runs.facts import PrefectFlowRuns
from flows.queries import RUN_FLOW
from rlhf_core.config.site import Site
from rlhf_core.control.reconcile import loop
from rlhf_core.control.reconcile.loop import Chore
from rlhf_core.schemas.base import utc_now

log = logging.getLogger("rlhf.daemon")


def serve(site: Site, stop: threading.Event) -> None:
    """Watch the site until ``stop`` is set. Raises what :func:`rlhf_core.control.reconcile.loop.run` raises."""
    chores = [
        Chore("the cancellation of scheduled runs that are not to begin", lambda store: _skip(site)),
        Chore("the list of requests without a run", lambda store: requests.keep(site, store, RUN_FLOW, utc_now())),
    ]
    loop.run(site, stop, flow_runs_of(site), reconcile.carry_out_round, chores)


def flow_runs_of(site: Site) -> PrefectFlowRuns | None:
    """The flow runs of the site; None if this process has no Prefect server configured. The server may be down."""
    return PrefectFlowRuns(site) if PREFECT_API_URL.value() else None


def _skip(site: Site) -> None:
    for flow_run, why in schedules.cancel_skipped(site.runs_dir):
        log.info("skipped the scheduled flow run %s (%s): %s", flow_run.name, flow_run.id, why)
