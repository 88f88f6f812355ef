"""Fixtures for every test: the user's home stays untouched, and nothing connects to the network."""

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import prefect_template
import pytest
import rerun_guard
import skip_guard

# Each test process imports all that any test uses. The collector would go through it in vain, again and again.
gc.disable()

_PROCESS = os.getpid()


@atexit.register
def _end() -> None:
    """End a worker of pytest-xdist at once, and other processes as everywhere: libraries in C++ complain of what is
    frozen.

    Registered before any library registers its own, and so called after those. Not before pytest has ended, since it
    collects twice as it ends.
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

# Tests end processes, never the machine: what was written is there without waiting for the disk. A test that kills a
# controller around each of its effects waited a quarter of its time. Programs that tests start do wait.
os.fsync = lambda fd: None

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
    """Have the processes of this session share what is made once."""
    folder = tmp_path_factory.getbasetemp()
    prefect_template.share_in(folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder)


@pytest.fixture(scope="session", autouse=True)
def _copied_histories() -> Iterator[None]:
    """Have new SQLite histories copied from a migrated one."""
    from history_template import copy_or_migrate  # late: libraries come after the variables above

    from rlhf_core.history import migrate

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migrate, "_migrate", copy_or_migrate)
        yield


@pytest.fixture
def real_migrations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have new histories made by the migrations, as outside of tests."""
    from history_template import MIGRATE

    from rlhf_core.history import migrate

    monkeypatch.setattr(migrate, "_migrate", MIGRATE)


@pytest.fixture
def plots_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have plots with equal content drawn once by this process: a report is ten of them."""
    from drawings import draw_once

    draw_once(monkeypatch)


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Site settings of this test alone: a fresh RLHF_HOME and no setting of the user who runs the tests."""
    for variable in SITE_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "rlhf-home"))
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect-home"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests skip with a reason where there is no GPU."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _cuda_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; this machine has none"))


def pytest_collection_finish() -> None:
    """Have the collector leave alone what was imported, and look after what tests make."""
    gc.freeze()
    gc.enable()


def _cuda_available() -> bool:
    try:
        import torch
    except ModuleNotFoundError:
        return False
    return torch.cuda.is_available()
