"""Fixtures of the end-to-end tests; the tools they hand out are in shop.py."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from shop import Shop


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    home = tmp_path / "home"
    home.mkdir()
    shop = Shop(home)
    yield shop
    shop.end()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """One tiny run, start to end, with a real temporary Prefect server: what every disturbed run is compared with."""
    home = tmp_path_factory.mktemp("undisturbed")
    shop = Shop(home, {"PREFECT_HOME": str(home / "prefect")})
    shop.rlhf("run", shop.config())
    yield shop
    shop.end()
