"""``rlhf up`` and ``rlhf down``: the services of a site on this machine, started where they are missing, and ended."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.server import (
    STARTUP_TIMEOUT_S,
    answers_within,
    asks_for_password,
    client_settings,
    configured_url,
    own_url,
    quiet_settings,
)
from flows.worker import FLOW_END_S, FLOW_RUNS, require_free_port, set_up
from rlhf_core.config import Site
from rlhf_core.errors import BadInput, PrefectUnavailable
from rlhf_core.history import database, migrate, queries
from rlhf_core.history.store import HistoryStore
from rlhf_core.run_dir import read_tail
from rlhf_core.schemas.attempts import RUN_ENDS, RunState
from rlhf_core.services import wanted as wants
from rlhf_core.services.processes import (
    OURS,
    SERVICES,
    STARTED_BY,
    ServiceFiles,
    ServiceState,
    ServiceStatus,
    alone,
    end,
    end_all,
    flow_processes,
    look,
)

Say = Callable[[str], None]

ANSWER_PATIENCE_S = 10.0
"""How long a service that has become silent may take to show a sign of life, before it is replaced."""
END_PATIENCE_S = {"server": 15.0, "worker": 2 * FLOW_END_S + 10, "keeper": 20.0}
"""How long a service may take to end before it is killed. The worker first lets flow runs let go of their runs."""
MAX_LOG_BYTES = 20 << 20
"""A log that is longer is put aside when its service is started; the one put aside before is removed."""


@dataclass(frozen=True)
class Started:
    """What ``up`` did about one service."""

    name: str
    pid: int
    what: str
    """``was running``, ``started``, or ``replaced``: it did not answer."""


def status(site: Site) -> list[ServiceStatus]:
    """How each service stands."""
    return [look(site.home, name) for name in SERVICES]


def num_restarts(site: Site, name: str) -> int:
    """Number of times that a service was started again within the last hour, because it had died."""
    return len(wants.read(site.home).recent(name, time.time()))


def down_ones(site: Site, names: Sequence[str] = ()) -> list[str]:
    """Services that are meant (:func:`wanted_services`) and are not well, as far as can be seen from here."""
    well = (ServiceState.RUNNING, ServiceState.ELSEWHERE)
    return [name for name in wanted_services(site, names) if look(site.home, name).state not in well]


def wanted_services(site: Site, names: Sequence[str]) -> tuple[str, ...]:
    """The services that are meant: those named, else all; no server of our own where another one is configured.

    Raises:
        BadInput: a name is none.
    """
    unknown = [name for name in names if name not in SERVICES]
    if unknown:
        raise BadInput(f"found {unknown[0]!r}, expected a service: {', '.join(SERVICES)}")
    if names:
        return tuple(name for name in SERVICES if name in names)
    elsewhere = configured_url() not in ("", own_url(site))
    return tuple(name for name in SERVICES if not (elsewhere and name == "server"))


def up(site: Site, names: Sequence[str] = (), say: Say = lambda text: None) -> list[Started]:
    """Start the services that are missing, replace those that do not answer, and wait until each is ready.

    Raises:
        BadInput: the port is taken, a service runs on another machine, or the server asks for no password.
        PrefectUnavailable: a service did not become ready; the message has the end of its log. Or the worker's server
            is none of those that are started, and does not answer.
    """
    environment = dict(os.environ)  # as it is now: what keeps this command's terminal quiet would keep their logs empty
    with alone(site.home):
        done = []
        wants.add(site.home, wanted_services(site, names))
        for name in wanted_services(site, names):
            done.append(_ensure(site, name, environment, say))
            if name == "server":
                quiet_settings(site.home)
                os.environ.update(client_settings(site, own_url(site)))
                set_up(site)
        return done


def down(site: Site, names: Sequence[str] = (), say: Say = lambda text: None) -> list[str]:
    """End services, the keeper first and the server last. Jobs of runs are left alone. Returns what was ended.

    Raises:
        BadInput: a service is kept running by something else than ``rlhf up``, or runs on another machine.
    """
    wanted = wanted_services(site, names) if names else SERVICES
    with alone(site.home):
        found = [one for one in (look(site.home, name) for name in reversed(wanted)) if _is_there(one)]
        for one in found:
            _require_ours(one)
        wants.remove(site.home, wanted)
        for one in found:
            assert one.record is not None
            say(f"ending the {one.name} (process {one.pid})")
            if end(one.record, END_PATIENCE_S[one.name]):
                say(f"the {one.name} did not end by itself and was killed")
        if "worker" in wanted:
            end_all(flow_processes(site.home), FLOW_END_S)
        for name in wanted:
            ServiceFiles(site.home, name).record.unlink(missing_ok=True)
            ServiceFiles(site.home, name).beat.unlink(missing_ok=True)
    return [one.name for one in found]


def active_runs(site: Site) -> list[str]:
    """Ids of the runs that have not ended, as the history knows them; empty where there is no history yet."""
    file = database.sqlite_file(database.parse_url(site.database_url))
    if file is not None and migrate.is_new(file):
        return []
    with HistoryStore(site.database_url) as store:
        return [
            str(run["run_id"])
            for state in RunState
            if state not in RUN_ENDS
            for run in queries.list_runs(store, state=state.value, limit=None)
        ]


# ---------------------------------------------------------------------------------------------------------------------
# One service


def _ensure(site: Site, name: str, environment: Mapping[str, str], say: Say) -> Started:
    found = look(site.home, name)
    if found.state is ServiceState.STOPPED and wants.read(site.home).is_coming(name):
        # Another service has just started it again.
        found = _until(site, name, STARTUP_TIMEOUT_S, lambda status: status.state is not ServiceState.STOPPED)
    if found.state is ServiceState.ELSEWHERE:
        _require_ours(found)
    if found.state is ServiceState.STARTING:
        found = _until(site, name, STARTUP_TIMEOUT_S, lambda status: status.state is not ServiceState.STARTING)
    if found.state is ServiceState.SILENT:
        found = _until(site, name, ANSWER_PATIENCE_S, lambda status: status.state is ServiceState.RUNNING)
    if found.state is ServiceState.RUNNING and (name != "server" or answers_within(ANSWER_PATIENCE_S, own_url(site))):
        if name == "server" and not asks_for_password(own_url(site)):
            raise BadInput(
                f"the server (process {found.pid}) was started by an earlier version and asks for no password: "
                f"`rlhf down`, then `rlhf up`; the jobs of runs go on meanwhile"
            )
        return Started(name, found.pid, "was running")
    replaced = found.state is not ServiceState.STOPPED
    if replaced:
        _require_ours(found)
        say(f"the {name} (process {found.pid}) does not answer and is replaced")
        assert found.record is not None
        end(found.record, END_PATIENCE_S[name])
    say(f"starting the {name}")
    return Started(name, _start(site, name, environment), "replaced" if replaced else "started")


def _require_server(site: Site) -> None:
    """A worker waits for its server for ever, as it should when a machine starts; a person is told at once."""
    url = configured_url() or own_url(site)
    if answers_within(ANSWER_PATIENCE_S, url):
        return
    if url == own_url(site):
        raise PrefectUnavailable(f"no Prefect server answers at {url}; `rlhf up` without names starts it too")
    raise PrefectUnavailable(
        f"the Prefect server at {url} does not answer. It is the one that PREFECT_API_URL names, in the environment or "
        f"in Prefect's active profile, so `rlhf up` starts none. Start it; or unset PREFECT_API_URL, and `rlhf up` "
        f"starts a server on this machine."
    )


def _start(site: Site, name: str, environment: Mapping[str, str]) -> int:
    if name == "server":
        require_free_port(site)
    elif name == "worker":
        _require_server(site)
    files = ServiceFiles(site.home, name)
    _make_room(files.log)
    begin = files.log.stat().st_size if files.log.is_file() else 0
    process = launch(site, name, environment)
    found = _until(
        site,
        name,
        STARTUP_TIMEOUT_S,
        lambda status: process.poll() is not None or (status.state, status.pid) == (ServiceState.RUNNING, process.pid),
    )
    if process.poll() is None and found.state is ServiceState.RUNNING:
        return process.pid
    how = (
        f"ended with exit code {process.returncode}"
        if process.returncode is not None
        else f"was not ready within {STARTUP_TIMEOUT_S:g} s"
    )
    said = read_tail(files.log, min(4000, max(0, files.log.stat().st_size - begin))).strip()
    raise PrefectUnavailable(f"the {name} {how}; its log is {files.log}:\n{said or '(nothing was said)'}")


def launch(site: Site, name: str, environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Start the process of a service, which outlives this one; it is ready later."""
    log = ServiceFiles(site.home, name).log
    _make_room(log)
    if name == "worker":
        _make_room(ServiceFiles(site.home, FLOW_RUNS).log)
    with log.open("ab") as written:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "rlhf_core.cli.main", "serve", name],
            env={**environment, "RLHF_HOME": str(site.home), STARTED_BY: OURS},
            cwd=site.home,
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # neither a Ctrl-C nor the end of this terminal is for it
        )


def _until(site: Site, name: str, timeout_s: float, enough: Callable[[ServiceStatus], bool]) -> ServiceStatus:
    deadline = time.monotonic() + timeout_s
    while True:
        found = look(site.home, name)
        if enough(found) or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def _is_there(status: ServiceStatus) -> bool:
    return status.state is not ServiceState.STOPPED and status.record is not None


def _require_ours(status: ServiceStatus) -> None:
    """A service that something else keeps running would be started again by it at once."""
    assert status.record is not None
    if status.state is ServiceState.ELSEWHERE:
        raise BadInput(
            f"the {status.name} of this home folder runs on {status.record.host} (process {status.pid}): end it there, "
            f"or use another RLHF_HOME here"
        )
    if status.record.started_by != OURS:
        raise BadInput(
            f"the {status.name} (process {status.pid}) is kept running by {status.record.started_by}: end it there, "
            f"for instance with `systemctl stop rlhf-{status.name}`"
        )


def _make_room(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.is_file() and log.stat().st_size > MAX_LOG_BYTES:
        log.replace(log.with_suffix(".log.1"))
