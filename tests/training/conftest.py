"""Fixtures shared by the training tests."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from engine_groups import EngineGroup

    from rlhf_core.training.distributed import Ranks


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for the runs of a test module."""
    return tmp_path_factory.mktemp(request.module.__name__)


@pytest.fixture(scope="module")
def ranks() -> "Iterator[Ranks]":
    """A process group that consists of this process alone."""
    import torch

    from rlhf_core.training.distributed import Ranks
    from rlhf_core.training.types import NullReporter

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield Ranks(0, 1, torch.device("cpu"), NullReporter(), store)
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, folder: Path) -> list[dict[str, Any]]:
    """Results of two ranks in the runs of a test module (its function ``runs_of``)."""
    from rank_launcher import every_scenario, launch, values

    module = request.module.__name__
    return values(launch(every_scenario, 2, folder / "launch", folder=str(folder), module=module))


@pytest.fixture(scope="module")
def shared_group(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[EngineGroup]":
    """Two engines shared by the tests of a module."""
    from engine_groups import engine_group

    with engine_group(tmp_path_factory.mktemp("run"), 2, remote={"answer_timeout_s": 2.0}) as made:
        yield made


@pytest.fixture
def group(shared_group: "EngineGroup") -> "EngineGroup":
    """The engines of the module, all running; a test may kill them."""
    shared_group.start_missing()
    return shared_group
