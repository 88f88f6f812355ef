"""Fixtures shared by the tests of weight sync."""

from collections.abc import Iterator

import pytest
from gpu_stand_in import CpuForGpu
from sync_processes import Fleet

from rlhf_core.weight_sync import gpu_links


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """Fleet of engines that are killed after the test."""
    fleet = Fleet()
    yield fleet
    fleet.end()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-in for the GPU in this process; engines have one already."""
    monkeypatch.setattr(gpu_links, "Gpu", CpuForGpu)
