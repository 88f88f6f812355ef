"""What each service of a site does, in the foreground: ``rlhf serve server|worker|keeper``.

``rlhf up``, systemd units and containers all start these, so that they do the same.
"""

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import psutil

from flows.server import (
    answers,
    own_names,
    own_url,
    server_settings,
    service_settings,
    ui_url,
    worker_settings,
)
from rlhf_core.config import Site
from rlhf_core.errors import BadInput
from rlhf_core.services import wanted
from rlhf_core.services.processes import (
    BEAT_S,
    OURS,
    STARTED_BY,
    ServiceFiles,
    end_all,
    holding,
    is_flow_process,
    private_folder,
)

if TYPE_CHECKING:
    from prefect.workers.process import ProcessWorker

Beat = Callable[[], None]

QUEUES = ("high", "default", "low")
"""The queues of the work pool; runs of an earlier one start first."""

FLOW_RUNS = "flow-runs"
"""Name of the log of all flow runs."""

MAX_WAITING = 100
"""Processes of flow runs that wait for an approval, beside those that drive a run: for Prefect they are paused and take
no place of the work pool. Each holds some 200 MB, so that there is an end to it."""

FLOW_END_S = 20.0
"""How long the processes of flow runs may take to let go of their runs, before they are killed."""
SERVER_END_S = 5
"""How long the server may take to finish what it is answering."""


def serve(site: Site, name: str) -> None:
    """Be one service until SIGTERM or SIGINT.

    Raises:
        BadInput: it is running already, or its port is taken.
    """
    environment = dict(os.environ)  # as `rlhf up` had it: what follows is this service's own
    # A shell that starts something in the background has it ignore SIGINT, and Prefect ends its worker with SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    settings = {"server": server_settings, "worker": worker_settings}
    os.environ.update({**service_settings(site), **(settings[name](site) if name in settings else {})})
    private_folder(site.home / "prefect")
    (site.home / "logs").mkdir(parents=True, exist_ok=True)
    with holding(site.home, name, ui_url(site) if name == "server" else "") as beat:
        if os.environ.get(STARTED_BY) == OURS:
            if name not in wanted.read(site.home).services:
                _say(f"the {name} is not to be here any more: `rlhf down` was called")
                return
            _look_after_the_others(site, name, environment)
        {"server": _serve_server, "worker": _serve_worker, "keeper": _serve_keeper}[name](site, beat)


def _look_after_the_others(site: Site, name: str, environment: Mapping[str, str]) -> None:
    from flows.restarting import Restarter

    if site.prefect.restart_s:
        restarter = Restarter(site, name, environment, _say)
        threading.Thread(target=restarter.watch, name="restarter", daemon=True).start()


def require_free_port(site: Site) -> None:
    """Find out before the server is started whether it can listen.

    Raises:
        BadInput: something else listens there; the message says what, where this user may know it.
    """
    host, port = site.prefect.host, site.prefect.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server itself does
            probe.bind(address)
    except socket.gaierror as error:
        raise BadInput(f"prefect.host: found {host!r}, expected an address of this machine: {error.strerror}") from None
    except OSError as error:
        raise BadInput(
            f"the Prefect server cannot listen on {host} port {port}: {error.strerror}{_listener(port)}. "
            f"End that, or give the server another port: port under [prefect] in {site.home / 'rlhf.toml'}"
        ) from None


def _listener(port: int) -> str:
    """Who listens on a port of this machine, as far as this user may know."""
    with contextlib.suppress(psutil.Error):
        for one in psutil.net_connections(kind="tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port and one.pid:
                return f" (process {one.pid}, {' '.join(psutil.Process(one.pid).cmdline())[:120]})"
    return ""


# ---------------------------------------------------------------------------------------------------------------------
# Server


def _serve_server(site: Site, beat: Beat) -> None:
    import uvicorn

    from flows.server_app import create_app  # only now: Prefect reads its settings when it is imported
    from flows.server_guards import MAX_SOCKET_BYTES

    require_free_port(site)
    os.umask(0o077)  # its database holds secrets, and the key that they are encrypted with
    threading.Thread(target=_beat_while_answering, args=(own_url(site), beat), daemon=True).start()
    uvicorn.run(
        create_app(own_names(site)),
        host=site.prefect.host,
        port=site.prefect.port,
        log_level="warning",
        lifespan="on",
        ws_max_size=MAX_SOCKET_BYTES,
        # Browsers keep their event streams open for as long as the page is.
        timeout_graceful_shutdown=SERVER_END_S,
    )


def _beat_while_answering(url: str, beat: Beat) -> None:
    while True:
        if answers(url):
            beat()
        time.sleep(BEAT_S)


# ---------------------------------------------------------------------------------------------------------------------
# Worker


def _serve_worker(site: Site, beat: Beat) -> None:
    _wait_for_server()
    set_up(site)
    asyncio.run(_work(site, beat))


def _wait_for_server() -> None:
    while not answers(os.environ["PREFECT_API_URL"]):
        time.sleep(BEAT_S)


async def _work(site: Site, beat: Beat) -> None:
    from prefect.workers.process import ProcessWorker

    worker = ProcessWorker(
        work_pool_name=site.prefect.pool,
        name=socket.gethostname(),
        limit=site.prefect.max_runs + MAX_WAITING,
        create_pool_if_not_found=False,
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    # An instance's own attributes: the worker looks its two loops' work up when it starts them.
    for name in ("get_and_submit_flow_runs", "sync_with_backend"):
        setattr(worker, name, _forgiving(getattr(worker, name), stop))
    working = asyncio.create_task(worker.start(printer=_say))
    watching = asyncio.create_task(_watch_while_working(worker, beat))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((working, watching, stopping), return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        await asyncio.to_thread(end_all, _children_with_flow_runs(site), FLOW_END_S)
        await _settled(worker)
    for task in (watching, stopping, working):
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await working
    if watching.done() and not watching.cancelled():
        watching.result()  # a worker that can cancel nothing is none


def _forgiving(work: Callable[[], Awaitable[Any]], stop: asyncio.Event) -> Callable[[], Awaitable[Any]]:
    """The same, but for an outage of the server: Prefect's worker ends itself after some minutes, and with it every
    flow run that it has started. And nothing, once the worker is to end.
    """
    import httpx

    async def forgiving() -> Any:
        if stop.is_set():
            return []
        try:
            return await work()
        except httpx.TransportError as error:
            _say(f"the server does not answer, waiting for it: {type(error).__name__}")
        except httpx.HTTPStatusError as error:
            if error.response.status_code < 500:
                raise
            _say(f"the server has a problem, waiting for it: {error.response.status_code}")
        return []

    return forgiving


async def _watch_while_working(worker: "ProcessWorker", beat: Beat) -> None:
    """Have cancellations carried out, and beat for as long as the worker takes flow runs and can cancel them."""
    from flows.cancellations import Cancellations

    while not (worker.is_setup and getattr(worker, "_runner", None) and worker._runner.started):
        await asyncio.sleep(0.1)
    cancellations = Cancellations(worker._runner, _say)
    listening = asyncio.create_task(cancellations.watch())
    try:
        while not listening.done():
            if cancellations.is_heard:
                beat()
            await asyncio.sleep(BEAT_S)
        await listening
    finally:
        listening.cancel()


async def _settled(worker: "ProcessWorker") -> None:
    """Let the worker tell the server how the flow runs that were ended have ended."""
    deadline = time.monotonic() + FLOW_END_S
    while worker.limiter.borrowed_tokens and time.monotonic() < deadline:
        await asyncio.sleep(0.1)


def _children_with_flow_runs(site: Site) -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if is_flow_process(process, site.home):
                found.append(process)
    return found


def _say(text: str) -> None:
    print(text, flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# Keeper


def _serve_keeper(site: Site, beat: Beat) -> None:
    from flows import daemon

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    threading.Thread(target=_beat_until, args=(stop, beat), daemon=True).start()
    daemon.serve(site, stop)


def _beat_until(stop: threading.Event, beat: Beat) -> None:
    while True:
        beat()
        if stop.wait(BEAT_S):
            return


# ---------------------------------------------------------------------------------------------------------------------
# What the server has to know


def set_up(site: Site) -> None:
    """Give the site's server what it needs to have: idempotent, and changed settings are applied.

    The process must be connected to the server (:func:`flows.server.connect`) before Prefect is imported.
    """
    from flows import deployments, notify
    from flows import reconcile as housekeeping

    _set_up_pool(site)
    deployments.register_presets(site)
    housekeeping.register(site)
    notify.register(site)


def _set_up_pool(site: Site) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
    from prefect.exceptions import ObjectAlreadyExists

    wanted = {"concurrency_limit": site.prefect.max_runs, "base_job_template": _job_template(site)}
    with get_client(sync_client=True) as client:
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
            if queue.priority != priority:  # each move shifts the others: they are looked at one by one
                client.update_work_queue(queue.id, priority=priority)


def _job_template(site: Site) -> dict[str, Any]:
    """Flow runs write to one log file themselves. Through a pipe of the worker, they would break when it is killed.

    They import nothing from the folder they begin in, and jobs are handed no variable that says the same to user code.
    """
    from prefect.workers.process import ProcessWorker

    template = ProcessWorker.get_default_base_job_template()
    log = ServiceFiles(site.home, FLOW_RUNS).log
    script = 'unset PYTHONSAFEPATH; exec "$0" -P -m prefect.engine >>"$1" 2>&1'
    variables = template["variables"]["properties"]
    variables["command"]["default"] = shlex.join(["/bin/sh", "-c", script, sys.executable, str(log)])
    variables["stream_output"]["default"] = False
    return template
