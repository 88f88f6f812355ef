"""Facts that ranks exchange, and the marks of their collectives for the agent."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from rlhf_core.errors import BadConfig, EnginesLost, WeightSyncFailed
from rlhf_core.training import distributed
from rlhf_core.training.types import NullReporter

pytestmark = pytest.mark.training


class SilentStore:
    """Only this rank has told anything. Waiting costs time on a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.content: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.content[key] = value

    def get(self, key: str) -> bytes:
        return self.content[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.content for key in keys)

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    def add(self, key: str, amount: int) -> int:
        self.content[key] = str(int(self.content.get(key, "0")) + amount)
        return int(self.content[key])


class MarkingReporter(NullReporter):
    """Knows whether its rank is inside a collective."""

    is_inside = False

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        self.is_inside = True
        yield
        self.is_inside = False


def test_a_rank_on_a_gpu_waits_for_the_result_inside_the_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL returns at once. A rank that waited after the collective would be called hung while its peer samples."""
    reporter, waited = MarkingReporter(), []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(reporter.is_inside))
    for device in ("cuda", "cpu"):
        with distributed.Ranks(0, 2, torch.device(device), reporter, SilentStore()).collective():
            pass
    assert waited == [True]


def test_all_collectives_of_the_trainers_wait_inside() -> None:
    """`reporter.collective()` alone is left to what has no result on a device: joining the process group, and the wait
    for a checkpoint."""
    code = {path: path.read_text() for path in Path(distributed.__file__).parent.rglob("*.py")}
    found = {path.name: text.count("reporter.collective()") for path, text in code.items()}
    assert {name: count for name, count in found.items() if count} == {"distributed.py": 2, "background_save.py": 1}


def ranks_told(told: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[distributed.Ranks]:
    """Two ranks. The first one must be called first; ``told`` records what it tells the other one."""

    def from_first(self: distributed.Ranks, value: Any) -> Any:
        if self.is_first:
            told.append(json.loads(json.dumps(value)))
        return told[-1]

    monkeypatch.setattr(distributed.Ranks, "from_first", from_first)
    return [distributed.Ranks(rank, 2, torch.device("cpu"), NullReporter(), SilentStore()) for rank in range(2)]


def test_every_rank_has_the_value_of_the_first_or_raises_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other errors are raised by the first one alone, which alone calls the function."""
    told: list[Any] = []
    ranks = ranks_told(told, monkeypatch)
    find = Mock(return_value="found")
    refuse = Mock(side_effect=WeightSyncFailed("no link", "engine-1", ("engine-2",)))
    assert [one.on_first(find) for one in ranks] == ["found", "found"]
    find.assert_called_once()
    for one in ranks:
        with pytest.raises(WeightSyncFailed, match=r"^no link$") as failed:
            one.on_first(refuse, (EnginesLost, WeightSyncFailed))
        assert (failed.value.peer, failed.value.others) == ("engine-1", ("engine-2",))
    refuse.assert_called_once()
    with pytest.raises(WeightSyncFailed):
        ranks[0].on_first(refuse, (EnginesLost,))
    assert len(told) == 2


def test_every_rank_raises_an_error_of_a_subclass_as_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoRoute(WeightSyncFailed):
        """An error that the other ranks do not know."""

    error = NoRoute("no link", "engine-1", ("engine-2",))
    error.hops = 3  # type: ignore[attr-defined]
    error.add_note("seen by rank 0")
    for one in ranks_told([], monkeypatch):
        with pytest.raises(WeightSyncFailed, match=r"^no link$") as failed:
            one.on_first(Mock(side_effect=error), (EnginesLost, WeightSyncFailed))
        assert type(failed.value) is WeightSyncFailed
        assert (failed.value.peer, failed.value.others) == ("engine-1", ("engine-2",))


def test_rows_are_dealt_to_ranks_that_share_them() -> None:
    """Four ranks in two replicas; those of each get the same rows."""
    found = [
        distributed.Ranks(
            rank,
            4,
            torch.device("cpu"),
            NullReporter(),
            SilentStore(),
            distributed.SequenceGroup(rank % 2, 2, None),
        )
        for rank in range(4)
    ]
    assert [one.deal_to_replicas(range(6)) for one in found] == [range(3), range(3), range(3, 6), range(3, 6)]
    assert [one.deal(range(4)) for one in found] == [range(rank, rank + 1) for rank in range(4)]
    assert [one.is_first_of_replica for one in found] == [True, False, True, False]
    with pytest.raises(BadConfig, match=r"found trainer\.sequence_parallel = 3 with 4 ranks"):
        found[0].sharing_rows(3)


def test_many_silent_ranks_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    store = SilentStore()
    monkeypatch.setattr(distributed.time, "monotonic", lambda: store.now_s)
    monkeypatch.setattr(distributed.time, "sleep", store.pass_time)
    ranks = distributed.Ranks(5, 64, torch.device("cpu"), NullReporter(), store)
    answers = ranks.exchange("topic", {"step": 7}, wait_s=3.0)
    assert answers == {5: {"step": 7}}
    assert json.loads(store.get("topic/5")) == {"step": 7}
    assert store.now_s < 3.5, "one rank after the other it would be three minutes: taken for a hang"
