"""Shared by the tests of training: property tests have no deadline, because the first call of a tokenizer or model is
slow."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from rlhf_core.training.distributed import Ranks

settings.register_profile("training", deadline=None)
settings.load_profile("training")


@pytest.fixture(scope="module")
def ranks() -> "Iterator[Ranks]":
    """A process group of this process alone."""
    import torch

    from rlhf_core.training.distributed import Ranks
    from rlhf_core.training.types import NullReporter

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield Ranks(0, 1, torch.device("cpu"), NullReporter(), store)
    torch.distributed.destroy_process_group()
