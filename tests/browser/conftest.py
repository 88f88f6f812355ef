"""Browser fixtures: one site for all tests, a page for each test, and screenshots."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import signing_in
from folder_fixtures import for_folder
from sites import Site
from slurm_cluster import WHY_NOT, Cluster, missing_programs


@pytest.fixture(scope="module")
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Prefect server, worker, site daemon and a Slurm of four nodes."""
    if missing_programs():
        pytest.skip(WHY_NOT)

    def running() -> AbstractContextManager[Site]:
        cluster = Cluster(tmp_path_factory.mktemp("slurm"), nodes=4, kill_wait_s=1)
        return Site(tmp_path_factory.mktemp("site"), cluster=cluster, team=True, max_runs=12).running()

    return for_folder(request, running)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Chromium for a file of tests: while it runs, no other file in this process can start Playwright."""
    with signing_in.chromium() as started:
        yield started


@pytest.fixture
def fresh_page(chromium: Any) -> Iterator[Any]:
    """A page of a first-time visitor."""
    page = chromium.new_page(viewport={"width": 1440, "height": 900})
    page.set_default_timeout(signing_in.PAGE_TIMEOUT_MS)
    yield page
    page.close()


@pytest.fixture
def page(fresh_page: Any, site: Site) -> Any:
    """A page of a signed-in user."""
    signing_in.sign_in(fresh_page, site.password)
    return fresh_page


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the screenshots: the one named by ``RLHF_SCREENSHOTS``, otherwise one kept with those of pytest."""
    folder = Path(os.environ.get("RLHF_SCREENSHOTS") or tmp_path_factory.mktemp("pictures"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def shoot(page: Any, pictures: Path) -> Callable[[str], None]:
    """Take a screenshot of the page.

    The drawing of a flow run does not signal that it is ready, so it gets a moment.
    """

    def take(name: str) -> None:
        page.wait_for_load_state("networkidle")
        page.wait_for_timeout(1500)
        page.screenshot(path=pictures / f"{name}.png", animations="disabled")

    return take
