"""One service of a site in the foreground: ``rlhf serve server|worker|daemon``.

supervisord, systemd units and containers all use this command, so that they behave the same.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from flows.prefect_imports import import_prefect
from flows.server.settings import (
    WORKER_SETTINGS,
    answers,
    own_names,
    own_url,
    require_port_and_disk,
    server_settings,
    service_settings,
    ui_url,
)
from rlhf_core.config.site import Site
from rlhf_core.garbage import uncollected
from rlhf_core.machine.parent_death import die_with_parent
from rlhf_core.services.presence import HEARTBEAT_INTERVAL_S, holding, private_folder

Heartbeat = Callable[[], None]

SERVER_STOP_TIMEOUT_S = 5
"""Time that the server has to finish open requests."""

DAEMON_STOP_TIMEOUT_S = 15.0
"""Time that the daemon has to finish its action, within what its supervisors give it before they kill it."""


def serve(site: Site, name: str) -> None:
    """Run one service until SIGTERM or SIGINT.

    Raises:
        BadInput: it is already running, or its port is taken.
    """
    if "SUPERVISOR_ENABLED" in os.environ:
        die_with_parent(signal.SIGTERM)  # an unsupervised service with a broken log pipe must not live on
    for variable in [one for one in os.environ if one.startswith("SUPERVISOR_")]:
        del os.environ[variable]
    # A shell starts background processes with SIGINT ignored, and Prefect stops its worker with SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    own = server_settings(site) if name == "server" else WORKER_SETTINGS if name == "worker" else {}
    os.environ.update({**service_settings(site), **own})
    private_folder(site.home / "prefect")
    (site.home / "logs").mkdir(parents=True, exist_ok=True)
    with holding(site.home, name, ui_url(site) if name == "server" else "") as beat:
        {"server": _serve_server, "worker": _serve_worker, "daemon": _serve_daemon}[name](site, beat)


def _serve_server(site: Site, beat: Heartbeat) -> None:
    with uncollected():
        import uvicorn

        from flows.server.app import create_app  # imported late: Prefect reads its settings at import
        from flows.server.guards import MAX_SOCKET_BYTES

        app = create_app(own_names(site))
    require_port_and_disk(site)
    os.umask(0o077)  # its database holds secrets and their encryption key
    _beat_while(lambda: answers(own_url(site)), beat)
    uvicorn.run(
        app,
        host=site.prefect.host,
        port=site.prefect.port,
        log_level="warning",
        lifespan="on",
        ws_max_size=MAX_SOCKET_BYTES,
        # Browsers keep their event streams open as long as the page is open.
        timeout_graceful_shutdown=SERVER_STOP_TIMEOUT_S,
    )


def _beat_while(is_well: Callable[[], bool], beat: Heartbeat) -> None:
    """Send heartbeats from a thread as long as the service is well."""

    def watch() -> None:
        while True:
            if is_well():
                beat()
            time.sleep(HEARTBEAT_INTERVAL_S)

    threading.Thread(target=watch, daemon=True).start()


def _serve_worker(site: Site, beat: Heartbeat) -> None:
    import_prefect()
    with uncollected():
        from flows import worker

    worker.serve(site, beat)


def _serve_daemon(site: Site, beat: Heartbeat) -> None:
    import_prefect()
    with uncollected():
        from flows import daemon

    stop = stop_on_signals()
    _beat_while(lambda: not stop.is_set(), beat)
    daemon.serve(site, stop)


def stop_on_signals() -> threading.Event:
    """Return an event that SIGTERM or SIGINT sets; ``DAEMON_STOP_TIMEOUT_S`` later, the process exits in any case.

    If Prefect's server goes away in an action, Prefect's client retries for minutes, also when the interpreter exits.
    An action may be cut off anywhere, and the next daemon on this machine takes the lease of a dead one at once.

    A thread sets the event, not the handler: that interrupts the main thread, and would wait for it forever if it held
    the event's lock just then.
    """
    stop = threading.Event()
    received: SimpleQueue[int] = SimpleQueue()  # its put() may be called from a handler
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: received.put(number))

    def wait() -> None:
        received.get()
        stop.set()
        time.sleep(DAEMON_STOP_TIMEOUT_S)
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
    return stop
