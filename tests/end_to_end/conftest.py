"""Site fixtures of the end-to-end tests, without services."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sites import Site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Site(tmp_path / "home").running(services=False) as site:
        yield site


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One tiny run from start to end, with a real temporary Prefect server: the reference for every disturbed run."""
    with Site(tmp_path_factory.mktemp("undisturbed")).running(services=False) as site:
        site.rlhf("run", site.config())
        yield site
