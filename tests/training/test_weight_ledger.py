"""The ledger of the weights given to rollout engines that load them wholly, partly or not at all."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from core_models import QWEN, tiny_model
from transformers import PreTrainedModel

from rlhf_core.errors import StaleWeights
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.rollouts.base import RolloutEngine, WeightTransfer
from rlhf_core.training.rollouts.weight_ledger import RecordedEngine

pytestmark = [pytest.mark.training]


class OtherRanks:
    """Rank 0 of several ranks; the contributions of the others are given."""

    is_first = True

    def __init__(self, *others: Sequence[float]) -> None:
        self.others = [list(numbers) for numbers in others]

    def gather_numbers(self, values: Sequence[float]) -> list[list[float]]:
        return [list(values), *self.others]


class FakeEngine:
    """An engine that loads every version, except those that fail."""

    def __init__(self, transfer: WeightTransfer | None, fails_at: int = -1) -> None:
        self.version: int | None = None
        self.transfer = transfer
        self.fails_at = fails_at
        self.is_closed = False

    def load(self, model: PreTrainedModel, version: int, beat: Callable[[], None]) -> WeightTransfer | None:
        if version == self.fails_at:
            raise StaleWeights("not taken over")
        self.version = version
        return self.transfer

    def sleep(self) -> None:
        self.version = None

    def close(self) -> None:
        self.is_closed = True


def recorded(path: Path, engine: FakeEngine, ranks: OtherRanks, num_engines: int) -> RecordedEngine:
    return RecordedEngine(cast(RolloutEngine, engine), cast(Ranks, ranks), path, num_engines)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def load(engine: RecordedEngine, version: int) -> None:
    engine.load(tiny_model(QWEN), version, lambda: None)


def test_a_sync_is_written_before_and_after_over_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "weight-syncs.jsonl"
    own = WeightTransfer("broadcast", 400, wire_s=0.5, apply_s=0.1)
    engine = recorded(path, FakeEngine(own), OtherRanks([1, 600, 9.0, 0.25, 0.7]), num_engines=2)
    load(engine, 3)
    requested, answered = lines(path)
    expected = {"version": 3, "engines": 2, "acknowledged": 0, "seconds": None}
    assert {name: requested[name] for name in expected} == expected
    expected = {"number": 0, "version": 3, "engines": 2, "acknowledged": 2, "transport": "broadcast", "bytes": 1000}
    expected |= {"seconds": 9.0, "wire_s": 0.5, "apply_s": 0.7}
    assert {name: answered[name] for name in expected} == expected
    load(engine, 3)  # in force
    assert len(lines(path)) == 2
    engine.sleep()
    load(engine, 3)  # released: copied again
    assert [line["number"] for line in lines(path)] == [0, 0, 1, 1]


def test_an_engine_that_does_not_acknowledge_is_in_the_ledger(tmp_path: Path) -> None:
    path = tmp_path / "weight-syncs.jsonl"
    own = WeightTransfer("broadcast", 400, wire_s=0.5, apply_s=0.1, acknowledged=3)
    load(recorded(path, FakeEngine(own), OtherRanks(), num_engines=4), 1)
    assert (lines(path)[-1]["engines"], lines(path)[-1]["acknowledged"]) == (4, 3)


def test_a_sync_that_breaks_off_stays_unacknowledged(tmp_path: Path) -> None:
    path = tmp_path / "weight-syncs.jsonl"
    engine = recorded(path, FakeEngine(WeightTransfer("in_process", 4, 0.0, 0.1), fails_at=2), OtherRanks(), 1)
    load(engine, 1)
    with pytest.raises(StaleWeights):
        load(engine, 2)
    *_, last = lines(path)
    assert (last["version"], last["engines"], last["acknowledged"], last["seconds"]) == (2, 1, 0, None)


def test_the_engine_is_closed_with_its_ledger(tmp_path: Path) -> None:
    """Otherwise the processes of an engine outlive the loop."""
    engine = FakeEngine(None)
    recorded(tmp_path / "weight-syncs.jsonl", engine, OtherRanks(), 1).close()
    assert engine.is_closed
