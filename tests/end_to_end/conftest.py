"""Sites of the end-to-end tests, without services."""

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
    """One tiny run, start to end, with a real temporary Prefect server: what every disturbed run is compared with."""
    with Site(tmp_path_factory.mktemp("undisturbed")).running(services=False) as site:
        site.rlhf("run", site.config())
        yield site
