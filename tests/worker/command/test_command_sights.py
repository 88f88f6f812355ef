"""Detection abilities of the progress sources: `rlhf check` prints what their modules declare."""

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from watched_programs import watched

from rlhf_core.schemas.command_trainer import SIGHTS, ProgressSource
from rlhf_core.worker.command.sources.activity import Activity
from rlhf_core.worker.command.sources.checkpoints import Checkpoints
from rlhf_core.worker.command.sources.stacks import Stacks
from rlhf_core.worker.command.sources.stdout import Stdout
from rlhf_core.worker.command.sources.tensorboard import TensorBoard
from rlhf_core.worker.command.sources.trainer_log import TrainerLog

FROM_OUTSIDE: tuple[Any, ...] = (TrainerLog, TensorBoard, Stdout, Checkpoints, Activity, Stacks)


@pytest.mark.parametrize("make", FROM_OUTSIDE)
def test_a_module_declares_what_its_source_detects(make: Any) -> None:
    text = " ".join((inspect.getmodule(make).__doc__ or "").split())
    assert f"Detects {SIGHTS[make.kind].sees}" in text


def test_each_source_accepts_an_output_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    for make in FROM_OUTSIDE:
        reading = make(watched(tmp_path / "missing", logs=[tmp_path / "missing.log"])).poll(0.0)
        assert (reading.moved, reading.step, reading.problem) == (False, None, "")


def test_the_kinds_differ() -> None:
    assert len({make.kind for make in FROM_OUTSIDE}) == len(FROM_OUTSIDE)
    assert set(ProgressSource) - {make.kind for make in FROM_OUTSIDE} == {
        ProgressSource.CALLBACK,
        ProgressSource.COLLECTIVES,
    }


def test_none_of_them_loads_torch() -> None:
    """Otherwise each rank's worker would hold half a GiB and start seconds later."""
    names = [inspect.getmodule(make).__name__ for make in FROM_OUTSIDE]
    names += ["rlhf_core.diagnosis.health.metric_judge", "rlhf_core.worker.command.metric_names"]
    code = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules or 'tensorboard' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
