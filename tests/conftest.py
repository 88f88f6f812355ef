"""Fixtures for every test: protection of the user's home folder, and no network connections."""

import atexit
import gc
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import prefect_template
import pytest
import rerun_guard
import skip_guard
from first_collection import pytest_collection
from hypothesis import settings
from process_tools import Finished, Rlhf

__all__ = ["pytest_collection"]
"""Hooks of other modules."""

# Each test process imports the modules of all tests. The collector would scan them repeatedly for nothing.
gc.disable()

_PROCESS = os.getpid()
_NUMBERS = itertools.count()


@atexit.register
def _end() -> None:
    """End a pytest-xdist worker at once, because C++ libraries complain about frozen objects; others end normally.

    Registered before any library registers its own handler, and therefore called after those. Unfreezing waits until
    pytest has ended, because pytest collects twice at its end.
    """
    if "PYTEST_XDIST_WORKER" in os.environ and os.getpid() == _PROCESS:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    gc.unfreeze()


# Before any library is imported: one thread per process (tests share few cores), no hubs, no telemetry.
os.environ.update(
    {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_TO_API_ENABLED": "false",
    }
)

# Tests kill processes, never the machine: written data survives without waiting for the disk. A test that kills a
# controller around each of its effects spent a quarter of its time on this. Programs that tests start do wait.
os.fsync = lambda fd: None

# An example of a property test may be the first use of a library, or find the machine busy.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")

SITE_VARIABLES = (
    *("RLHF_RUNS", "RLHF_DATABASE_URL", "RLHF_SCHEDULER", "RLHF_COMPUTE_PYTHON", "RLHF_PREFECT_AUTH"),
    *("PREFECT_API_URL", "PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING"),
)
"""Settings of the user who runs the tests. Gone at once: fixtures of a whole session come before those of a test."""
for _variable in SITE_VARIABLES:
    os.environ.pop(_variable, None)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of both guards."""
    skip_guard.pytest_addoption(parser)
    rerun_guard.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Set up both guards."""
    skip_guard.pytest_configure(config)
    rerun_guard.configure(config)


@pytest.fixture(scope="session", autouse=True)
def _shared_templates(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let the processes of this session share templates that are made once."""
    folder = tmp_path_factory.getbasetemp()
    prefect_template.share_in(folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder)


@pytest.fixture(scope="session", autouse=True)
def _copied_histories() -> Iterator[None]:
    """Copy new SQLite histories from a migrated one."""
    from history_template import copy_or_migrate  # late: libraries come after the variables above

    from rlhf_core.history import migrate

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migrate, "_migrate", copy_or_migrate)
        yield


@pytest.fixture
def real_migrations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Create new histories with the real migrations, as outside of tests."""
    from history_template import MIGRATE

    from rlhf_core.history import migrate

    monkeypatch.setattr(migrate, "_migrate", MIGRATE)


@pytest.fixture
def plots_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw plots with equal content only once in this process: a report has ten of them."""
    from drawings import draw_once

    draw_once(monkeypatch)


@pytest.fixture(autouse=True)
def _own_home(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Site settings of this test alone: a fresh RLHF_HOME and no setting of the user who runs the tests."""
    for variable in SITE_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    # Half of the tests use no folder: to make and remove one for each of them takes as long as many of them do.
    folder, number = tmp_path_factory.getbasetemp(), f"-{next(_NUMBERS)}"
    if "tmp_path" in request.fixturenames:
        folder, number = request.getfixturevalue("tmp_path"), ""
    monkeypatch.setenv("RLHF_HOME", str(folder / f"rlhf-home{number}"))
    monkeypatch.setenv("PREFECT_HOME", str(folder / f"prefect-home{number}"))


@pytest.fixture
def rlhf(capsys: pytest.CaptureFixture[str]) -> Rlhf:
    """Run ``rlhf`` in this process and require an exit code, 0 unless ``code`` is given; returns what it printed."""
    from rlhf_core.cli.main import execute

    def run(*words: str, code: int = 0) -> Finished:
        capsys.readouterr()
        found = execute(words)
        output = capsys.readouterr()
        assert found == code, output.err
        return Finished(found, *output)

    return run


LONGEST = (
    "test_command_follower.py",
    "test_remote_vllm.py",
    "test_worker_on_slurm.py",
    "test_faults_short.py",
    "test_run.py",
    "test_services.py",
    "test_watchdog_exactly_once.py",
    "test_probe_faults.py",
    "test_loop_online.py",
    "test_flows_prefect.py",
    "test_loop_runs.py",
    "test_worker_many_nodes.py",
    "test_history_queries.py",
    "test_services_supervised.py",
    "test_worker_silent_agent.py",
)
"""Test files that take a minute or more beside three others. Nearly every second one mostly waits."""


SERVER = "real_prefect"
"""Fixture of a server that the files of a folder share as long as a process runs them in a row."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, so that none runs alone at the end, and spread those of each folder over the rest
    of the time, because whole folders only wait or only compute; but those with a server in a row, or each would start
    one. Skip GPU tests on machines without a GPU."""
    items.sort(key=_starts_after(items))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _cuda_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; this machine has none"))


def _starts_after(items: list[pytest.Item]) -> Callable[[pytest.Item], tuple[int, float]]:
    """Sort key of tests: index of a long file, or share of the files of its folder that come before it or before the
    first with a server."""
    files: dict[Path, list[Path]] = {}
    for path in dict.fromkeys(item.path for item in items):
        files.setdefault(path.parent, []).append(path)
    shares = {path: index / len(paths) for paths in files.values() for index, path in enumerate(paths)}
    served = dict.fromkeys(item.path for item in items if SERVER in getattr(item, "fixturenames", ()))
    shares |= dict.fromkeys(served, min(map(shares.__getitem__, served), default=0.0))

    def key(item: pytest.Item) -> tuple[int, float]:
        is_long = item.path.name in LONGEST
        return (LONGEST.index(item.path.name), 0.0) if is_long else (len(LONGEST), shares[item.path])

    return key


def pytest_collection_finish() -> None:
    """Exclude the imported modules from garbage collection, and collect only objects made by tests."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(10_000)


def _cuda_available() -> bool:
    try:
        import torch
    except ModuleNotFoundError:
        return False
    return torch.cuda.is_available()
