"""Progress of a run in Prefect: its wording, and the explanation of a run that goes back."""

from dataclasses import replace
from typing import Any

import pytest
from control_fakes import FakeAgent, make_run, make_spec, training_snapshot
from harness import ControllerHarness

from rlhf_core.control.views.progress import RunReader, StepTimer, progress_of_poll
from rlhf_core.control.views.timeline import read_timeline
from rlhf_core.render.markdown import progress_markdown
from rlhf_core.render.progress import progress_text
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.watchdog.watcher import AttemptSnapshot


def snapshot(step: int, **changes: Any) -> AttemptSnapshot:
    return training_snapshot(step, **{"metrics": {"time/step_s": 2.0, "reward/mean": 0.25}, **changes})


def test_a_step_is_a_line_with_the_remaining_time(harness: ControllerHarness) -> None:
    run_dir = harness.run()
    progress = progress_of_poll(snapshot(6), make_spec(), StepTimer())
    text = progress_markdown(progress, read_timeline(run_dir))
    assert progress.percent == 60.0
    assert "**step 6 of 10 (grpo), 60 %** · 8.0 s left" in text
    assert "attempt 1, 0 restarts · on n1 · 2.0 s a step" in text
    assert "reward 0.250" in text


def test_the_warm_start_does_not_predict_the_time_of_the_main_algorithm() -> None:
    spec, timer = make_spec(), StepTimer()
    assert progress_of_poll(snapshot(2, loop="sft", metrics={"time/step_s": 0.1}), spec, timer).left_s is None
    assert progress_of_poll(snapshot(3, metrics={"time/step_s": 4.0}), spec, timer).left_s == 7 * 4.0


def test_polls_of_the_same_step_count_once_in_the_time_of_a_step() -> None:
    timer = StepTimer()
    timer.update((1, 0, 3), "grpo", {"time/step_s": 1.0})
    means = [timer.update((1, 0, 4), "grpo", {"time/step_s": 2.0}) for _ in range(100)]
    assert means[-1] == 1.1


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 1e308, -1e308])
def test_an_impossible_time_of_a_step_changes_no_prediction(seconds: float) -> None:
    spec, timer = make_spec(), StepTimer()
    assert progress_of_poll(snapshot(2, metrics={"time/step_s": seconds}), spec, timer).left_s is None
    assert progress_of_poll(snapshot(3), spec, timer).left_s == 14.0
    progress = progress_of_poll(snapshot(4, metrics={"time/step_s": seconds}), spec, timer)
    assert progress_text(progress) == "grpo step 4/10, 12 s left"


def gone_back(run_dir: RunDir) -> None:
    agent = FakeAgent(run_dir)
    agent.begin()
    for step in range(1, 8):
        agent.step(step)
    agent.incident(FailureKind.HANG)


@pytest.mark.parametrize(("step", "goes_back"), [(7, False), (4, True)])
def test_a_run_that_goes_back_is_explained(harness: ControllerHarness, step: int, goes_back: bool) -> None:
    """The furthest step comes from the files: a later controller knows it too."""
    run_dir = harness.run()
    gone_back(run_dir)
    furthest = RunReader(run_dir).read().progress.furthest
    assert furthest == 7
    progress = replace(
        progress_of_poll(replace(snapshot(step), attempt=2), make_spec(), StepTimer()), furthest=furthest
    )
    text = progress_markdown(progress, read_timeline(run_dir))
    assert ("Went back after hang: step 7 was reached before" in text) is goes_back


def test_steps_of_a_trial_do_not_count_for_its_run(harness: ControllerHarness) -> None:
    run_dir = harness.run()
    small = make_spec(train={"num_steps": 2})
    trial = replace(
        progress_of_poll(snapshot(3), small, StepTimer()), is_trial=True, title="trial on one node: train attempt 1"
    )
    assert trial.percent == 0.0
    assert "**trial on one node: train attempt 1, step 3 of 4**" in progress_markdown(trial, read_timeline(run_dir))


def test_the_end_is_described(harness: ControllerHarness) -> None:
    run_dir = harness.completed()
    snapshot = RunReader(run_dir).read()
    assert snapshot.progress.percent == 100.0
    text = progress_markdown(snapshot.progress, snapshot.timeline)
    assert text.startswith("**completed** · attempt 1 completed")


def test_without_data_there_is_no_figure(harness: ControllerHarness) -> None:
    snapshot = RunReader(make_run(harness.site.runs_dir)).read()
    assert snapshot.progress.percent == 0.0
    assert progress_markdown(snapshot.progress, snapshot.timeline) == "**pending**"
