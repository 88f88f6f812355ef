"""The callback for trainers around transformers: beats, phases, and saves at one step for all ranks."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from rlhf_core.schemas.reports import Phase
from rlhf_core.worker.command.in_rank import rlhf_rank_file as words
from rlhf_core.worker.command.launch import IN_RANK
from rlhf_core.worker.command.sources.callback import CallbackSource

pytestmark = pytest.mark.training


@pytest.fixture
def callback(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module as a program of a run imports it."""
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
    one.beat("reward", 7)
    assert source.poll(0.0).phase is Phase.REWARD
    assert not source.poll(0.0).moved
    with pytest.raises(ValueError, match="tuple"):
        one.beat("holiday", 7)


def test_a_save_happens_at_the_step_that_all_ranks_were_told(callback: ModuleType, status: words.RankFile) -> None:
    one, control = callback.SupervisionCallback(), SimpleNamespace(should_save=False, should_training_stop=False)
    status.set(words.SAVE, 9)
    saves = []
    for step in (7, 8, 9, 9, 10):
        control.should_save = False
        one.on_step_end(None, at(step), control)
        saves.append(control.should_save)
    assert saves == [False, False, True, False, False]
    assert not control.should_training_stop
    status.set(words.STOP, 1)
    status.set(words.SAVE, 11)
    one.on_step_end(None, at(12), control)
    assert not control.should_training_stop, "a rank that is past the step must not save alone"


def test_a_save_leaves_the_stop_of_another_callback(callback: ModuleType, status: words.RankFile) -> None:
    control = SimpleNamespace(should_save=False, should_training_stop=True)
    status.set(words.SAVE, 9)
    callback.SupervisionCallback().on_step_end(None, at(9), control)
    assert (control.should_save, control.should_training_stop) == (True, True)


def test_without_a_run_it_does_nothing(callback: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(words.PATH_VARIABLE, raising=False)
    one, control = callback.SupervisionCallback(), SimpleNamespace(should_save=False)
    one.on_step_end(None, at(1), control)
    assert not control.should_save
