"""Tensors in memory shared between processes, found in place without a copy."""

from pathlib import Path

import pytest
import torch

from rlhf_core.errors import WeightSyncFailed
from rlhf_core.training.rollouts.shared_tensors import (
    MappedRow,
    SharedMemory,
    buckets_of_places,
    place_of,
)
from rlhf_core.weight_sync.receiver import Receiver

pytestmark = [pytest.mark.training]


def test_a_tensor_is_found_where_it_lies(tmp_path: Path) -> None:
    row = SharedMemory(tmp_path).allocate(64)
    given = {
        "single": row[0:4].view(torch.float32).view(()),
        "matrix": row[16:32].view(torch.bfloat16).view(2, 4),
        "empty": row[32:32].view(torch.float32),
    }
    mapped = MappedRow()
    found = {name: mapped.tensor(place_of(name, tensor)) for name, tensor in given.items()}
    given["single"].fill_(3.0)
    given["matrix"].fill_(4.0)
    for name, tensor in given.items():
        assert torch.equal(found[name], tensor), name
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)


def test_of_several_rows_the_newest_is_mapped(tmp_path: Path) -> None:
    memory, mapped = SharedMemory(tmp_path), MappedRow()
    first = memory.allocate(8)
    before = place_of("a", first)
    mapped.tensor(before)
    second = memory.allocate(16)
    second.fill_(7)
    assert mapped.tensor(place_of("a", second)).tolist() == [7] * 16
    assert len(list(tmp_path.iterdir())) == 1, "memory of the previous row is released"
    with pytest.raises(FileNotFoundError):
        mapped.tensor(before)


def test_a_tensor_of_one_process_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="found tensor w in private memory"):
        place_of("w", torch.zeros(4))


def test_tensors_are_handed_on_some_at_a_time(tmp_path: Path) -> None:
    row = SharedMemory(tmp_path).allocate(40)
    tensors = [(str(at), row[at : at + 8]) for at in range(0, 40, 8)]
    buckets = [[place.name for place in bucket] for bucket in buckets_of_places(tensors, 10)]
    assert buckets == [["0", "8"], ["16", "24"], ["32"]]


def test_missing_memory_is_reported_with_the_engine(tmp_path: Path) -> None:
    receiver = Receiver("engine-3", SharedMemory(tmp_path).allocate)
    with pytest.raises(WeightSyncFailed, match=r"engine-3 has no room for 1\.15e\+09 GB of weights"):
        receiver._take_row(2**60, lambda: None)
