"""Fixtures shared by the tests of weight sync."""

from collections.abc import Iterator

import pytest
from sync_processes import Fleet


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """Fleet of engines that are killed after the test."""
    fleet = Fleet()
    yield fleet
    fleet.end()
