"""Fixtures for a controller on a fake scheduler, with a real history in SQLite and without waiting."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from control_fakes import Clock, FakeScheduler
from folder_fixtures import for_folder
from harness import ControllerHarness, Notes
from sites import Site

from rlhf_core.config.site import load_site
from rlhf_core.control import stages
from rlhf_core.control.views.drawing import draw_in_process
from rlhf_core.history.store import HistoryStore
from rlhf_core.schemas.checks import CheckResult, CheckStatus


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[CheckResult]:
    """Findings of preflight, which the test may change."""
    found = [CheckResult(id="a.check", status=CheckStatus.PASSED, found="well")]
    monkeypatch.setattr(stages, "make_checks", lambda spec, around, tick: tuple(found))
    return found


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checks: list[CheckResult]) -> Iterator[ControllerHarness]:
    scheduler = FakeScheduler()
    for module in ("controller", "cancel", "gone_directory"):
        monkeypatch.setattr(f"rlhf_core.control.{module}.get_scheduler", lambda name: scheduler)
    site = load_site({"RLHF_HOME": str(tmp_path / "site")})
    site.home.mkdir()
    with ExitStack() as stack, HistoryStore(site.database_url) as store:
        yield ControllerHarness(site, scheduler, store, Clock(), Notes(), stack)


@pytest.fixture
def blank_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publish an empty picture: drawing is most of the work of a flow that a test publishes."""
    monkeypatch.setattr("flows.publishing.artifacts.draw_in_process", lambda run_dir: b"\x89PNG of nothing")


@pytest.fixture
def drawn_curves(blank_curves: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the curves nevertheless, for a test that inspects them."""
    monkeypatch.setattr("flows.publishing.artifacts.draw_in_process", draw_in_process)


@pytest.fixture(scope="module")
def real_prefect(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """A real Prefect server with its UI, which lists events within a second instead of five.

    Tests use it within a block (:meth:`Site.in_use`), and others do not see it.
    """
    variables = {"PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL": "1"}

    @contextmanager
    def served() -> Iterator[Site]:
        with Site(tmp_path_factory.mktemp("prefect"), variables=variables).running(services=False) as site:
            site.serve("server")
            yield site

    return for_folder(request, served)


@pytest.fixture
def server(real_prefect: Site) -> Iterator[Site]:
    """The real server, in use for a test: it has flow runs of other tests, and no work pool without :func:`pool`."""
    with real_prefect.in_use():
        yield real_prefect


@pytest.fixture(scope="module")
def pool(real_prefect: Site) -> Iterator[None]:
    """A fresh pool ``rlhf``, without deployments before and after: only a worker of this file starts its flow runs."""
    real_prefect.delete_deployments()
    real_prefect.ask("/work_pools/rlhf", method="DELETE")
    real_prefect.ask("/work_pools/", {"name": "rlhf", "type": "process"})
    yield
    real_prefect.delete_deployments()
    real_prefect.ask("/work_pools/rlhf", method="DELETE")
