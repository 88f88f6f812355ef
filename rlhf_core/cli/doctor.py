"""Checks of this machine, for ``rlhf doctor``."""

import contextlib
import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core import __version__
from rlhf_core.config.site import Site
from rlhf_core.errors import DatabaseUnavailable, RlhfError
from rlhf_core.files import private as private_files
from rlhf_core.machine.installation import pip_install
from rlhf_core.preflight import gather_facts
from rlhf_core.preflight.checks.environment import NEEDED_ALWAYS
from rlhf_core.preflight.facts import ComputeSide, Disk
from rlhf_core.text.formatting import count, size

if TYPE_CHECKING:
    from rlhf_core.history.store import HistoryStore

LEAST_FREE_BYTES, LEAST_FREE_FILES = 1 << 30, 10_000
"""Free space, and number of files that can still be created, below which a disk is reported as full."""

LEAST_FREE_SHARE = 0.05
"""Share of either below which a disk is reported as nearly full, unless much is left all the same."""

MUCH_FREE_BYTES, MUCH_FREE_FILES = 200 << 30, 1_000_000
"""Free space for two checkpoints of 7 billion parameters, and files for a hundred runs."""

OTHER_CONNECTIONS = 25
"""Connections to PostgreSQL beside those of the controllers: up to 15 of Prefect's server, some of the daemon, the
worker and the commands of people."""


@dataclass(frozen=True)
class Item:
    """Result of one check of this machine."""

    name: str
    ok: bool
    found: str
    advice: str = ""
    """Advice; empty if there is nothing to do."""


def examine(site: Site, services: Mapping[str, str], server: str, *, answers: bool, is_own: bool) -> list[Item]:
    """Check this machine. Starts the compute interpreter once; changes nothing.

    Args:
        services: state of each service of the site on this machine.
        server: address of the Prefect server that this user has configured; empty if there is none.
        answers: True if that server answers.
        is_own: True if it is the one that ``rlhf up`` starts.
    """
    compute = gather_facts.inspect_compute_python(site.compute_python)
    return [
        Item("rlhf-flows", True, f"{__version__} on Python {sys.version.split()[0]}"),
        _compute_python(compute),
        *_packages(compute),
        _py_spy(compute),
        _folder("run directories", site.runs_dir, "RLHF_RUNS"),
        _folder("home folder", site.home, "RLHF_HOME"),
        _private(site),
        _database(site),
        *_from_history(site, services),
        _scheduler(site),
        _prefect(server, services, answers=answers, is_own=is_own),
        _services(server, services),
        _git(),
    ]


def _compute_python(compute: ComputeSide) -> Item:
    if compute.problem:
        return Item("compute interpreter", False, f"{compute.python}: {compute.problem}", "set RLHF_COMPUTE_PYTHON")
    version = ".".join(map(str, compute.version))
    if compute.rlhf_flows != __version__:
        has = f"rlhf-flows {compute.rlhf_flows}" if compute.rlhf_flows else "no rlhf-flows"
        advice = f"{compute.python} -m {pip_install('training')}"
        return Item("compute interpreter", False, f"{compute.python} (Python {version}) has {has}", advice)
    return Item("compute interpreter", True, f"{compute.python} (Python {version})")


def _packages(compute: ComputeSide) -> Iterator[Item]:
    install = f"{compute.python} -m {pip_install('training')}"
    advice = f"{install}, or set RLHF_COMPUTE_PYTHON to an interpreter that has it"
    for name in sorted(NEEDED_ALWAYS):
        version = compute.packages.get(name, "")
        yield Item(name, bool(version), version or "not in the compute interpreter", "" if version else advice)


def _py_spy(compute: ComputeSide) -> Item:
    version = compute.packages.get("py-spy", "")
    if not version:
        found = "not in the compute interpreter: stacks of hung workers come from faulthandler only"
        return Item("py-spy", False, found, f"{compute.python} -m pip install py-spy")
    scope = _read("/proc/sys/kernel/yama/ptrace_scope")
    if scope in ("2", "3") and os.geteuid() != 0:
        return Item("py-spy", False, f"{version}, but ptrace_scope is {scope}", "stacks come from faulthandler instead")
    return Item("py-spy", True, f"{version}, ptrace_scope {scope or 'not set'}")


def _folder(name: str, folder: Path, variable: str) -> Item:
    """Check that a folder of the site can be written, and that its disk has room."""
    disk = gather_facts.inspect_disk(folder)
    if disk.problem:
        return Item(name, False, f"{folder}: {disk.problem}", f"set {variable} to a folder that you may write")
    found = f"{folder}: {_file_system(folder)}, {_free(disk)}"
    if _is_nearly_full(disk):
        return Item(name, False, found, f"free some space, or set {variable} to another file system")
    return Item(name, True, found)


def _free(disk: Disk) -> str:
    text = f"{size(disk.free_bytes)} free"
    if disk.total_bytes:
        text += f" ({disk.free_bytes / disk.total_bytes:.0%})"
    if disk.free_files is not None and disk.total_files:
        text += f", {count(disk.free_files, 'more file')} ({disk.free_files / disk.total_files:.0%})"
    return text


def _is_nearly_full(disk: Disk) -> bool:
    """True if the disk has little space left, or lets few files be created (inodes)."""
    limits = (
        (disk.free_bytes, disk.total_bytes, LEAST_FREE_BYTES, MUCH_FREE_BYTES),
        (disk.free_files, disk.total_files, LEAST_FREE_FILES, MUCH_FREE_FILES),
    )
    return any(
        free is not None and (free < least or (free < much and free < LEAST_FREE_SHARE * (total or 0)))
        for free, total, least, much in limits
    )


def _private(site: Site) -> Item:
    """Check for folders and files of secrets that other users can access."""
    secrets = ("environment", "job-secrets.env", "prefect/auth", "prefect", "prefect/prefect.db", "history.db")
    found = [path for path in (site.home, *(site.home / name for name in secrets)) if private_files.is_open(path)]
    if found:
        listed = shlex.join(map(str, found))
        return Item("private files", False, f"other users have access to {listed}", f"chmod go= {listed}")
    shared = "its group can read the runs" if private_files.is_for_group(site.runs_dir) else "runs are private too"
    return Item("private files", True, f"{site.home} is private to its owner; {shared}")


def _database(site: Site) -> Item:
    def inspect() -> str:
        from rlhf_core.history import database
        from rlhf_core.history.store import HistoryStore

        url = database.parse_url(site.database_url)
        file = database.sqlite_file(url)
        if file is not None:
            _require_space(file)
        if file is not None and not file.exists():
            database.refuse_network_file_system(file)
            return f"{database.displayed(url)} on {_file_system(file)}: does not exist yet, the first run creates it"
        HistoryStore(site.database_url).close()
        location = f" on {_file_system(file)}" if file is not None else ""
        return f"{database.displayed(url)}{location}: reachable, and its schema is current"

    return _tried("history", inspect)


def _from_history(site: Site, services: Mapping[str, str]) -> Iterator[Item]:
    """Check what the history shows; nothing if it does not exist or answer."""
    from rlhf_core.history import database
    from rlhf_core.history.store import HistoryStore

    with contextlib.suppress(RlhfError):
        file = database.sqlite_file(database.parse_url(site.database_url))
        if file is None or file.exists():
            with HistoryStore(site.database_url) as store:
                yield _daemon(site, store, services)
                yield _open_runs(site, store)
                yield from _connections(site, store)


def _open_runs(site: Site, store: "HistoryStore") -> Item:
    """Name folders with runs that no daemon may look after, because the history names another folder. They may be those
    of another site, so this is no fault of this machine."""
    from rlhf_core.control.run_folders import ADVICE, without_daemon
    from rlhf_core.history.queries import open_runs
    from rlhf_core.schemas.base import utc_now

    found = open_runs.find(store, utc_now())
    folders = without_daemon(site.runs_dir, found.values(), store)
    active = f"{count(len(found), 'run')} active or waiting for a promotion"
    if folders:
        return Item("open runs", True, f"{active}; no known daemon for {', '.join(map(str, folders))}", ADVICE)
    return Item("open runs", True, active)


def _connections(site: Site, store: "HistoryStore") -> Iterator[Item]:
    """Check that PostgreSQL has a connection for each controller: one that gets none holds back its next job."""
    most = store.max_connections()
    if most is None:
        return
    runs = site.prefect.max_runs
    is_enough = most >= runs + OTHER_CONNECTIONS
    found = f"{most} accepted; {runs} controllers ([prefect] max_runs) need one each, all else {OTHER_CONNECTIONS}"
    advice = "raise max_connections of PostgreSQL, or lower max_runs in rlhf.toml"
    yield Item("database connections", is_enough, found, "" if is_enough else advice)


def _daemon(site: Site, store: "HistoryStore", services: Mapping[str, str]) -> Item:
    """Check that a daemon holds the lease of the site: without one, no run gets a new controller."""
    from rlhf_core.control.run_folders import daemon_of
    from rlhf_core.launch.lease import owner_text

    holder = daemon_of(site.runs_dir, store)
    if holder is not None:
        return Item("site daemon", True, f"{owner_text(holder.controller)}, looks after {site.runs_dir}")
    found = f"none looks after {site.runs_dir}"
    if services["daemon"] == "running":
        return Item("site daemon", False, f"{found}, although one runs here", "see logs/daemon.log of RLHF_HOME")
    return Item("site daemon", True, found)


def _require_space(file: Path) -> None:
    """Check that a SQLite file can grow.

    Raises:
        DatabaseUnavailable: its disk is full, or nearly.
    """
    disk = gather_facts.inspect_disk(file.parent)
    if not disk.problem and _is_nearly_full(disk):
        raise DatabaseUnavailable(
            f"the history {file} can hardly grow: its disk has {_free(disk)}. Free some space, or set "
            "RLHF_DATABASE_URL to a file on another local disk"
        )


def _scheduler(site: Site) -> Item:
    def inspect() -> str:
        from rlhf_core.scheduler import get_scheduler

        inventory = get_scheduler(site.scheduler).inventory()
        return (
            f"{site.scheduler}: {count(len(inventory.node_names), 'node')} with {inventory.cpus_per_node} cores, "
            f"{inventory.memory_gb:.0f} GiB, {inventory.gpus_per_node} GPUs each"
        )

    return _tried("scheduler", inspect)


def _prefect(server: str, services: Mapping[str, str], *, answers: bool, is_own: bool) -> Item:
    if importlib.util.find_spec("prefect") is None:
        return Item("Prefect", False, "not installed", "runs then need --no-prefect; pip install prefect")
    from importlib.metadata import version

    if server and not answers:
        unset = "start it, or unset PREFECT_API_URL (in the environment or Prefect's active profile) to use `rlhf up`"
        advice = "`rlhf up` starts it" if is_own else unset
        return Item("Prefect", False, f"{version('prefect')}; the server {server} does not answer", advice)
    if server:
        used = f"server {server}"
    elif services["server"] == "running":
        used = "the server of `rlhf up`"
    else:
        used = "no server: `rlhf up` starts one; until then each run starts a temporary one, or --no-prefect"
    return Item("Prefect", True, f"{version('prefect')}; {used}")


def _services(server: str, services: Mapping[str, str]) -> Item:
    """Check that the services of a site are complete: if one is missing, requested runs silently never start."""
    found = ", ".join(f"{name} {state}" for name, state in services.items())
    required = {name: state for name, state in services.items() if name != "server" or not server}
    stopped = [name for name, state in required.items() if state not in ("running", "elsewhere")]
    if len(stopped) == len(required):
        return Item("services", True, "none on this machine; `rlhf up` starts server, worker and daemon")
    return Item("services", not stopped, found, "rlhf up" if stopped else "")


def _git() -> Item:
    found = shutil.which("git")
    return Item("git", bool(found), found or "not installed: runs cannot record the revision of your code", "")


def _file_system(path: Path) -> str:
    from rlhf_core.history.database import MOUNT_TABLE, file_system_of

    kind, _ = file_system_of(Path(os.path.realpath(path)), _read(str(MOUNT_TABLE)))
    return kind


def _tried(name: str, inspect: Callable[[], str]) -> Item:
    try:
        return Item(name, True, inspect())
    except RlhfError as error:
        return Item(name, False, str(error), "see the message")


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
