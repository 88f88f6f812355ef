"""The services of a site (Prefect server, worker and site daemon), and how they are started and stopped."""

import os
from collections.abc import Sequence

from flows.deployments import work_pool
from flows.prefect_imports import import_prefect
from flows.server.required import require
from flows.server.settings import (
    answers_in_time,
    client_settings,
    configured_url,
    own_url,
    quiet_settings,
    require_port_and_disk,
    requires_password,
)
from flows.worker import FLOW_STOP_TIMEOUT_S, flow_processes
from rlhf_core.config.site import Site
from rlhf_core.errors import BadInput
from rlhf_core.services.lifecycle import Lifecycle, Log, Service, StartedService
from rlhf_core.services.presence import OURS, ServiceState, ServiceStatus, service_status
from rlhf_core.services.processes import terminate_all
from rlhf_core.services.supervisord import Supervisord

SERVICES = ("server", "worker", "daemon")
"""In start order; they are stopped in reverse."""

STOP_TIMEOUTS_S = {"server": 15, "worker": 2 * int(FLOW_STOP_TIMEOUT_S) + 10, "daemon": 20}
"""Time that a service has to stop before it is killed. The worker first has its flow runs release their runs."""


def services_of(site: Site) -> tuple[Service, ...]:
    """The services of a site, in start order."""
    return (
        Service(
            "server",
            priority=10,
            stop_timeout_s=STOP_TIMEOUTS_S["server"],
            is_well=lambda: _server_is_well(site),
            before_start=lambda: require_port_and_disk(site),
            after_ready=lambda: _set_up(site),
        ),
        Service(
            "worker",
            priority=20,
            stop_timeout_s=STOP_TIMEOUTS_S["worker"],
            before_start=lambda: _require_server(site),
            after_end=lambda: terminate_all(flow_processes(site.home), FLOW_STOP_TIMEOUT_S),
        ),
        Service("daemon", priority=30, stop_timeout_s=STOP_TIMEOUTS_S["daemon"]),
    )


def up(site: Site, names: Sequence[str] = (), log: Log = lambda text: None) -> list[StartedService]:
    """Start missing services, replace those that do not answer, and wait until each is ready.

    Raises:
        BadInput: the port is taken, a service runs on another machine, or the server requires no password.
        ServiceFailed: a service did not become ready; the message includes the end of its log.
        PrefectUnavailable: the worker's server is not one of the services started here, and does not answer.
    """
    return _lifecycle(site, log).up(wanted_services(site, names))


def down(site: Site, names: Sequence[str] = (), log: Log = lambda text: None) -> list[str]:
    """Stop services, the daemon first and the server last, and return their names. Jobs are left alone.

    Raises:
        BadInput: a service is managed by something other than ``rlhf up``, or runs on another machine.
    """
    return _lifecycle(site, log).down(wanted_services(site, names) if names else SERVICES)


def status(site: Site) -> list[ServiceStatus]:
    """State of each service."""
    return [service_status(site.home, name) for name in SERVICES]


def num_restarts(site: Site, name: str) -> int:
    """Number of times within the last hour that a service exited unasked and was restarted."""
    return len(Supervisord(site.home).recent_ends(name))


def down_ones(site: Site, names: Sequence[str] = ()) -> list[str]:
    """Wanted services (:func:`wanted_services`) that are not healthy, as far as this machine can tell."""
    well = (ServiceState.RUNNING, ServiceState.ELSEWHERE)
    return [name for name in wanted_services(site, names) if service_status(site.home, name).state not in well]


def lacks_supervisord(site: Site) -> bool:
    """True if services that `rlhf up` started are running without a supervisord that would restart them."""
    ours = [one for one in status(site) if one.record is not None and one.record.started_by == OURS]
    return bool(ours) and not Supervisord(site.home).answers()


def wanted_services(site: Site, names: Sequence[str]) -> tuple[str, ...]:
    """The services to manage: those named, otherwise all; without our own server if another one is configured.

    Raises:
        BadInput: a name is not a service.
    """
    unknown = [name for name in names if name not in SERVICES]
    if unknown:
        raise BadInput(f"found {unknown[0]!r}, expected a service: {', '.join(SERVICES)}")
    if names:
        return tuple(name for name in SERVICES if name in names)
    elsewhere = configured_url() not in ("", own_url(site))
    return tuple(name for name in SERVICES if not (elsewhere and name == "server"))


def _lifecycle(site: Site, log: Log) -> Lifecycle:
    return Lifecycle(site.home, services_of(site), site.prefect.restart_s, log)


def _set_up(site: Site) -> None:
    """Configure the server as the site needs it."""
    quiet_settings(site.home)
    os.environ.update(client_settings(site, own_url(site)))
    import_prefect()
    work_pool.set_up(site)


def _server_is_well(site: Site) -> bool:
    if not answers_in_time(own_url(site)):
        return False
    if not requires_password(own_url(site)):
        raise BadInput(
            f"the server (process {service_status(site.home, 'server').pid}) was started by an earlier version and "
            f"asks for no password: `rlhf down`, then `rlhf up`; the jobs of runs continue meanwhile"
        )
    return True


def _require_server(site: Site) -> None:
    """Refuse to start a worker without a server: it would wait for one forever, which is only right at boot.

    Raises:
        PrefectUnavailable: no server answers.
    """
    if not answers_in_time(configured_url() or own_url(site)):
        require(site)
