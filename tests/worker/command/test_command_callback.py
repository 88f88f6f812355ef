"""The callback for trainers based on transformers: beats, phases, and checkpoints at the same step on all ranks."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import FileStore, HashStore  # type: ignore[attr-defined]

from rlhf_core.schemas.reports import Phase
from rlhf_core.worker.command.launch import IN_RANK
from rlhf_core.worker.command.sources.callback import CallbackSource
from rlhf_core.worker.in_rank import rlhf_rank_file as words

pytestmark = pytest.mark.training


@pytest.fixture
def callback(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, imported as a program of a run imports it."""
    monkeypatch.syspath_prepend(str(IN_RANK))
    sys.modules.pop("rlhf_core.callback", None)
    yield importlib.import_module("rlhf_core.callback")
    for name in ("rlhf_core.callback", "rlhf_rank_file"):
        sys.modules.pop(name, None)


@pytest.fixture
def status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> words.RankFile:
    prefix = str(tmp_path / "ranks")
    monkeypatch.setenv(words.PATH_VARIABLE, prefix)
    monkeypatch.setenv("LOCAL_RANK", "0")
    return words.RankFile(words.rank_path(prefix, 0), create=True)


def at(step: int) -> SimpleNamespace:
    return SimpleNamespace(global_step=step)


def test_phases_are_those_of_the_worker(callback: ModuleType) -> None:
    assert tuple(Phase) == callback.PHASES


def test_every_event_is_a_beat_with_step_and_phase(callback: ModuleType, status: words.RankFile) -> None:
    source = CallbackSource(status)
    assert not source.poll(0.0).moved
    one = callback.SupervisionCallback()
    one.on_step_begin(None, at(6), None)
    reading = source.poll(0.0)
    assert (reading.moved, reading.step, reading.phase) == (True, 6, Phase.TRAIN)
    one.on_save(None, at(7), None)
    assert source.poll(0.0).phase is Phase.CHECKPOINT
    one.on_prediction_step(None, at(7), None)
    assert source.poll(0.0).phase is Phase.EVALUATE
    one.beat("reward", 7)
    assert source.poll(0.0).phase is Phase.REWARD
    assert not source.poll(0.0).moved
    with pytest.raises(ValueError, match="tuple"):
        one.beat("holiday", 7)


Ranks = Callable[[int], Any]


@pytest.fixture
def ranks(callback: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """Factory for the callback of a rank; all ranks share a store."""
    store = HashStore()

    def make(rank: int) -> Any:
        words.RankFile(words.rank_path(str(tmp_path / "ranks"), rank), create=True)
        monkeypatch.setenv(words.PATH_VARIABLE, str(tmp_path / "ranks"))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setattr(callback, "_shared_store", lambda: (store, rank == 0))
        made = callback.SupervisionCallback()
        made.on_step_end(None, at(0), control())
        return made

    return make


def control() -> SimpleNamespace:
    return SimpleNamespace(should_save=False, should_training_stop=False)


def request(tmp_path: Path, rank: int) -> None:
    """Send the request, as the worker of that rank forwards it."""
    words.RankFile(words.rank_path(str(tmp_path / "ranks"), rank)).set(words.STOP, 1)


def saves(one: Any, *steps: int) -> list[int]:
    """Steps at which the callback saves and stops."""
    found = []
    for step in steps:
        asked = one.on_step_end(None, at(step), control())
        assert asked.should_save == asked.should_training_stop
        if asked.should_save:
            found.append(step)
    return found


def test_all_ranks_save_at_the_step_that_the_first_one_announces(ranks: Ranks, tmp_path: Path) -> None:
    """Neither the step durations nor the workers of the other ranks matter."""
    first, second, third = ranks(0), ranks(1), ranks(2)
    request(tmp_path, 1)
    assert saves(second, 4, 5, 6) == [], "a rank does not save alone"
    request(tmp_path, 0)
    assert saves(first, 7, 8, 9, 10) == [9]
    assert saves(second, 7, 8, 9, 10) == [9]
    assert saves(third, 7, 8, 9, 10) == [9], "its own worker has sent nothing"


def test_a_rank_that_receives_a_save_request_too_late_fails(ranks: Ranks, tmp_path: Path) -> None:
    """The others wait for the rank's part of the checkpoint."""
    first, second = ranks(0), ranks(1)
    request(tmp_path, 0)
    saves(first, 7)
    with pytest.raises(RuntimeError, match="at step 10, this rank was told to save at step 9"):
        saves(second, 10)


def test_ranks_agree_through_the_store_of_their_group(
    callback: ModuleType, status: words.RankFile, tmp_path: Path
) -> None:
    dist.init_process_group("gloo", store=FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        status.set(words.STOP, 1)
        assert saves(callback.SupervisionCallback(), 1, 2, 3, 4) == [3]
    finally:
        dist.destroy_process_group()


def test_a_process_without_a_group_saves_too(callback: ModuleType, status: words.RankFile) -> None:
    status.set(words.STOP, 1)
    assert saves(callback.SupervisionCallback(), 1, 2, 3, 4) == [3]


def test_without_a_run_it_does_nothing(callback: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(words.PATH_VARIABLE, raising=False)
    one, control = callback.SupervisionCallback(), SimpleNamespace(should_save=False)
    one.on_step_end(None, at(1), control)
    assert not control.should_save
