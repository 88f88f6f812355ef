"""Interfaces between benchmarks and the program that no other step reads before a benchmark is run."""

import sys
from dataclasses import asdict
from inspect import signature
from pathlib import Path

import pytest

from rlhf_core.config.loading import load
from rlhf_core.schemas.run import RunSpec
from rlhf_core.training.rollouts import transformers_engine


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[1] / "benchmarks"), *sys.path])


def test_the_stand_in_takes_the_arguments_of_the_generator_it_replaces() -> None:
    """The generator is called by position."""
    import train_ours

    own = [name for name in signature(train_ours.roll_out).parameters if name != "given"]
    assert own == [*signature(transformers_engine.generate).parameters]


def test_every_benchmark_of_training_has_valid_settings(tmp_path: Path) -> None:
    import bench_checkpoint
    import bench_quickstart
    import bench_recovery
    import bench_supervision
    import bench_train
    import train_ours

    for work in (*bench_train.LOADS, *bench_train.SMALL_LOADS, *bench_train.GPU_LOADS):
        RunSpec.model_validate(train_ours.settings(asdict(work), tmp_path, 1))
    for way in bench_checkpoint.WAYS.values():
        RunSpec.model_validate(bench_checkpoint.settings(bench_checkpoint.TINY_MODEL, 9, 2, 1, way))
    for overrides in (*bench_quickstart.MODES.values(), bench_recovery.SHORT):
        load("quickstart", overrides)
    assert bench_supervision.make_run(tmp_path, steps=8).spec.exists()


def test_a_run_that_ends_early_ends_the_wait_for_its_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import bench_quickstart
    import bench_recovery

    monkeypatch.setattr(bench_quickstart, "COMMAND", (sys.executable, "-c", "raise SystemExit('no such preset')"))
    with pytest.raises(SystemExit, match="no such preset"):
        bench_recovery.measure(tmp_path / "home", "quickstart", {}, 45, forked=True)


def test_links_that_cannot_be_made_are_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import bench_sync

    monkeypatch.setattr(bench_sync, "why_not", lambda: "missing: ip")
    with pytest.raises(SystemExit):
        bench_sync.main(["--models", "tiny"])
    assert "missing: ip; only --rates 0" in capsys.readouterr().err
