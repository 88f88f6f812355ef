"""Warnings of trainer ranks become incidents that do not stop the run, one per warning, from whichever rank."""

import errno
import os
from pathlib import Path
from typing import NoReturn

import pytest

from rlhf_core.files.whole import read_model
from rlhf_core.run_dir.attempt import RestartDir
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.failures import Action, Decision, FailureKind, Incident
from rlhf_core.schemas.reports import Phase, TrainerWarning
from rlhf_core.worker.agent.leader import Leader
from rlhf_core.worker.agent.trainer_warnings import TrainerWarnings
from rlhf_core.worker.event_log import EventLog


@pytest.fixture
def warnings(tmp_path: Path, restart_dir: RestartDir, events: EventLog) -> TrainerWarnings:
    restart_dir.root.mkdir(parents=True)
    return TrainerWarnings(Leader(RunDir(tmp_path / "run"), 1, events))


def warn(restart: RestartDir, rank: int, kind: FailureKind, message: str) -> None:
    warning = TrainerWarning(time=utc_now(), failure_kind=kind, message=message, step=7)
    with restart.warnings_of(rank).open("a") as file:
        file.write(f"{warning.model_dump_json()}\n")


def test_each_rank_has_a_file_and_each_line_becomes_one_incident(
    warnings: TrainerWarnings, restart_dir: RestartDir
) -> None:
    warn(restart_dir, 3, FailureKind.REWARD_FUNCTION, "rank 3 says so")
    warnings.take(restart_dir, now=True)
    warn(restart_dir, 0, FailureKind.DEGENERATE_RL, "rank 0 says so")
    warn(restart_dir, 3, FailureKind.REWARD_FUNCTION, "rank 3 says more")
    warnings.take(restart_dir, now=True)
    warnings.take(restart_dir, now=True)
    found = [read_model(restart_dir.incident(number), Incident) for number in (1, 2, 3, 4)]
    assert {one.message: one.phase for one in found if one is not None} == {
        "rank 3 says so": Phase.REWARD,
        "rank 3 says more": Phase.REWARD,
        "rank 0 says so": Phase.TRAIN,
    }
    decisions = [read_model(restart_dir.decision(number), Decision) for number in (1, 2, 3)]
    assert [one.action for one in decisions if one is not None] == [Action.CONTINUE] * 3


@pytest.mark.parametrize("function", ["listdir", "open"])
def test_a_file_system_that_fails_ends_no_worker(
    warnings: TrainerWarnings, restart_dir: RestartDir, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warnings are read in the loop that waits for the workers, whose errors end them."""
    warn(restart_dir, 0, FailureKind.DEGENERATE_RL, "rank 0 says so")

    def fails(*arguments: object, **options: object) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as away:
        away.setattr(os, function, fails)
        warnings.take(restart_dir, now=True)
    warnings.take(restart_dir, now=True)
    warnings.take(restart_dir, now=True)
    assert len(restart_dir.incident_files()) == 1
