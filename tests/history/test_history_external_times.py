"""Times of runs of external trainers, which log only some steps, with or without step times."""

from pathlib import Path

import pytest
from history_tools import RunFiles, at, synced
from test_history_views import ask, assert_goodput_is_the_view

from rlhf_core.files.appended import append_lines
from rlhf_core.files.whole import write_model
from rlhf_core.history import queries
from rlhf_core.history.store import HistoryStore
from rlhf_core.schemas.attempts import RunState
from rlhf_core.schemas.command_trainer import CommandTrainer
from rlhf_core.schemas.failures import Action, FailureKind
from rlhf_core.schemas.reports import MetricsLine
from rlhf_core.schemas.run import RunSpec
from rlhf_core.schemas.stored_spec import StoredSpec

TIMED, UNTIMED = {"time/step_s": 1.0}, {"eval/loss": 2.0}
"""Other metrics of each logged step."""


def external(runs: Path, other: dict[str, float]) -> RunFiles:
    """40 steps of one second, every tenth logged. A rank is killed after step 30, at 45 s; the workers start again from
    step 20 at 55 s."""
    run = RunFiles(runs).created()
    trainer = CommandTrainer(kind="command", argv=("python", "train.py"), num_steps=40)
    stored = StoredSpec.model_validate_json(run.dir.spec.read_bytes())
    write_model(run.dir.spec, stored.model_copy(update={"spec": RunSpec(name="sort", trainer=trainer)}))
    run.moved(RunState.PREFLIGHT, 1)
    run.moved(RunState.QUEUED, 2)
    run.planned(1, 3)  # submitted at 3.5, running at 4.5
    run.moved(RunState.TRAINING, 5)
    for restart, step, seconds in ((0, 10, 20), (0, 20, 30), (0, 30, 40), (1, 30, 65), (1, 40, 75)):
        metrics = {"train/loss": 1.0, **other}
        line = MetricsLine(step=step, time=at(seconds), loop="external", metrics=metrics)
        append_lines(run.dir.attempt(1).restart(restart).metrics, line)
    run.incident(1, 0, FailureKind.WORKER_KILLED, 45)
    run.decision(1, 0, Action.RESTART_IN_PLACE, 46)
    run.moved(RunState.EVALUATING, 76)
    run.moved(RunState.COMPLETED, 81)
    return run


@pytest.mark.parametrize(
    ("other", "productive", "repeated", "downtime"),
    [(TIMED, 40.0, 10.0, 15.0), (UNTIMED, 20.0, 10.0, 25.0)],
    ids=["with step times", "without"],
)
def test_goodput_and_lost_time_count_the_steps_between_two_logged_ones(
    store: HistoryStore, runs: Path, other: dict[str, float], productive: float, repeated: float, downtime: float
) -> None:
    run = synced(external(runs, other), store)
    (goodput,) = ask(store, "SELECT productive_s, repeated_s, lost_s, ettr FROM run_goodput")
    lost = downtime + repeated
    assert goodput == pytest.approx([productive, repeated, lost, productive / (81 - 1)], abs=1e-3)
    assert_goodput_is_the_view(store)
    (found,) = ask(store, "SELECT downtime_s, repeated_s FROM incident_lost_time")
    assert found == pytest.approx([downtime, repeated], abs=1e-3)
    assert ask(store, "SELECT recovery_s, caught_up_s FROM run_recoveries") == [[pytest.approx(20), pytest.approx(30)]]
    restarts = queries.show_run(store, run.run_id).restarts
    assert [one["first_step_at"] for one in restarts] == [at(20).isoformat(), at(65).isoformat()]
