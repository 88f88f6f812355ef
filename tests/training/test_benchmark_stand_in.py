"""The generator of ``make bench-train`` stands in for the trainer's own, which is called by position."""

import sys
from inspect import signature
from pathlib import Path

import pytest

from rlhf_core.training.rollouts import transformers_engine


def test_it_takes_the_arguments_of_the_generator_it_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[1] / "benchmarks"), *sys.path])
    import train_ours

    own = [name for name in signature(train_ours.roll_out).parameters if name != "given"]
    assert own == [*signature(transformers_engine.generate).parameters]
