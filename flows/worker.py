"""The site's worker: Prefect's own, made to survive a server outage and to cancel flow runs after it."""

import asyncio
import contextlib
import os
import signal
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from flows.deployments import work_pool
from flows.deployments.work_pool import flow_run_log
from flows.server.settings import HOME_MARKER, answers
from rlhf_core.config.site import Site
from rlhf_core.files import private as private_files
from rlhf_core.services.presence import HEARTBEAT_INTERVAL_S
from rlhf_core.services.processes import terminate_all

if TYPE_CHECKING:
    from prefect.workers.process import ProcessWorker

Heartbeat = Callable[[], None]

MAX_WAITING = 100
"""Flow-run processes that may wait for an approval, beyond those that drive a run: Prefect treats them as paused, and
they take no slot of the work pool. Each uses some 130 MB, hence the limit."""

FLOW_STOP_TIMEOUT_S = 20.0
"""Time that flow-run processes have to release their runs before they are killed."""

MAX_LOG_BYTES = 20 << 20
"""Size at which the log of all flow runs is rotated; the previously rotated one is removed."""


def serve(site: Site, beat: Heartbeat) -> None:
    """Run the worker until SIGTERM or SIGINT, with the server that ``PREFECT_API_URL`` names."""
    _put_aside(flow_run_log(site.home))
    _use_temporary_folder(site.home / "prefect" / "temporary")
    _wait_for_server()
    work_pool.set_up(site, warn=print_line)
    asyncio.run(_work(site, beat))


def _use_temporary_folder(folder: Path) -> None:
    """Make a folder of the site's own that of the worker's temporary files.

    Prefect's runner puts them into /tmp/runner_storage, which belongs to the user of the first worker of the
    machine, so other users could not start one.
    """
    private_files.make_folder(folder)
    for left in (folder / "runner_storage").glob("*"):  # by workers that were killed
        with contextlib.suppress(OSError):
            left.rmdir()
    tempfile.tempdir = str(folder)


def _wait_for_server() -> None:
    while not answers(os.environ["PREFECT_API_URL"]):
        time.sleep(HEARTBEAT_INTERVAL_S)


async def _work(site: Site, beat: Heartbeat) -> None:
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
    # Set on the instance: the worker looks up the functions of its two loops when it starts them.
    for name in ("get_and_submit_flow_runs", "sync_with_backend"):
        setattr(worker, name, _outage_tolerant(getattr(worker, name), stop))
    working = asyncio.create_task(worker.start(printer=print_line))
    watching = asyncio.create_task(_watch_while_working(worker, beat))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((working, watching, stopping), return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        await asyncio.to_thread(
            terminate_all, flow_processes(site.home, psutil.Process().children()), FLOW_STOP_TIMEOUT_S
        )
        await _settled(worker)
    for task in (watching, stopping, working):
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await working
    if watching.done() and not watching.cancelled():
        watching.result()  # a worker that cannot cancel anything is useless


def _outage_tolerant(work: Callable[[], Awaitable[Any]], stop: asyncio.Event) -> Callable[[], Awaitable[Any]]:
    """Wrap one of the worker's loops to survive a server outage; it does nothing once ``stop`` is set.

    Without this, Prefect's worker exits after some minutes without a server, and takes its flow runs with it.
    """
    import httpx

    async def tolerant() -> Any:
        if stop.is_set():
            return []
        try:
            return await work()
        except httpx.TransportError as error:
            print_line(f"the server does not answer, waiting for it: {type(error).__name__}")
        except httpx.HTTPStatusError as error:
            if error.response.status_code < 500:
                raise
            print_line(f"the server has a problem, waiting for it: {error.response.status_code}")
        return []

    return tolerant


async def _watch_while_working(worker: "ProcessWorker", beat: Heartbeat) -> None:
    """Process cancellations, and send heartbeats as long as the worker takes flow runs and can cancel them."""
    from flows.cancellations import Cancellations

    while not (worker.is_setup and getattr(worker, "_runner", None) and worker._runner.started):
        await asyncio.sleep(0.1)
    cancellations = Cancellations(worker._runner, print_line)
    listening = asyncio.create_task(cancellations.watch())
    try:
        while not listening.done():
            if cancellations.is_alive:
                beat()
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
        await listening
    finally:
        listening.cancel()


async def _settled(worker: "ProcessWorker") -> None:
    """Let the worker report the final states of the flow runs it ended."""
    deadline = time.monotonic() + FLOW_STOP_TIMEOUT_S
    while worker.limiter.borrowed_tokens and time.monotonic() < deadline:
        await asyncio.sleep(0.1)


def flow_processes(home: Path, among: Iterable[psutil.Process] | None = None) -> list[psutil.Process]:
    """Flow-run processes started by a worker of this home folder, including a dead one.

    Args:
        among: processes to look at; all of this user by default.
    """
    found = []
    for process in psutil.process_iter() if among is None else among:
        with contextlib.suppress(psutil.Error):
            if process.uids().real == os.getuid() and _is_flow_process(process, home):
                found.append(process)
    return found


def _is_flow_process(process: psutil.Process, home: Path) -> bool:
    """True if a process drives a flow run of this home folder. Jobs that it started inherit the same variables."""
    if "prefect.engine" not in process.cmdline():
        return False
    return process.environ().get(HOME_MARKER) == str(home) and process.status() != psutil.STATUS_ZOMBIE


def _put_aside(log: Path) -> None:
    """Rotate a log that is too long."""
    if log.is_file() and log.stat().st_size > MAX_LOG_BYTES:
        log.replace(log.with_suffix(".log.1"))


def print_line(text: str) -> None:
    """Print a line to the log. The pipe to supervisord may be broken, and the worker must still stop cleanly."""
    with contextlib.suppress(OSError):
        print(text, flush=True)
