"""The work pool of a site with its queues, and the other objects that the site's server needs."""

import contextlib
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_core.config.site import Site
from rlhf_core.errors import BadInput, RlhfError

QUEUES = ("high", "default", "low")
"""The queues of the work pool, in order of priority."""


def flow_run_log(home: Path) -> Path:
    """Path of the log of all flow runs."""
    return home / "logs" / "flow-runs.log"


def set_up(site: Site, warn: Callable[[str], None] | None = None) -> None:
    """Create the work pool and the other objects on the site's server. Idempotent; changed settings are applied.

    The process must be connected to the server (:func:`flows.server.settings.connect`) before Prefect is imported.

    Args:
        site: The site.
        warn: Called if the notifications cannot be set up, which runs do not depend on. Default: raise the error.
    """
    from flows import notify, reconcile
    from flows.deployments import registration

    _set_up_pool(site)
    registration.register_presets(site)
    reconcile.register()
    try:
        notify.register(site)
    except RlhfError as error:
        if warn is None:
            raise
        warn(str(error))


def _set_up_pool(site: Site) -> None:
    from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
    from prefect.exceptions import ObjectAlreadyExists

    from flows.server.clients import api_client

    wanted = {"concurrency_limit": site.prefect.max_runs, "base_job_template": _job_template(site)}
    with api_client() as client:
        with contextlib.suppress(ObjectAlreadyExists):
            client.create_work_pool(WorkPoolCreate(name=site.prefect.pool, type="process", **wanted))
        pool = client.read_work_pool(site.prefect.pool)
        if pool.type != "process":
            raise BadInput(
                f"the work pool {site.prefect.pool} of the Prefect server has type {pool.type!r}, expected 'process'; "
                f"name another one as pool under [prefect] in {site.home / 'rlhf.toml'}"
            )
        if any(getattr(pool, name) != value for name, value in wanted.items()):
            client.update_work_pool(site.prefect.pool, WorkPoolUpdate(**wanted))
        there = {queue.name for queue in client.read_work_queues(work_pool_name=site.prefect.pool)}
        for name in QUEUES:
            if name not in there:
                client.create_work_queue(name=name, work_pool_name=site.prefect.pool)
        for priority, name in enumerate(QUEUES, start=1):
            queue = client.read_work_queue_by_name(name, work_pool_name=site.prefect.pool)
            if queue.priority != priority:  # each move shifts the others, so check one by one
                client.update_work_queue(queue.id, priority=priority)


def _job_template(site: Site) -> dict[str, Any]:
    """Job template with which flow runs write to one log file themselves. A pipe to the worker would break when the
    worker is killed.

    They import nothing from their working folder (``-P``). ``PYTHONSAFEPATH`` is unset, or jobs would inherit it.
    """
    from prefect.workers.process import ProcessWorker

    template = ProcessWorker.get_default_base_job_template()
    log = flow_run_log(site.home)
    script = 'unset PYTHONSAFEPATH; exec "$0" -P -m flows.prefect_imports prefect.engine >>"$1" 2>&1'
    variables = template["variables"]["properties"]
    variables["command"]["default"] = shlex.join(["/bin/sh", "-c", script, sys.executable, str(log)])
    variables["stream_output"]["default"] = False
    return template
