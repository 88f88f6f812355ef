"""The time limit of a job is compared with the next step and its checkpoint."""

from unittest import mock

import pytest

from rlhf_core.schemas.resources import JOB_END_VARIABLE
from rlhf_core.training.trainers import saving
from rlhf_core.training.trainers.context import TrainingContext
from rlhf_core.training.trainers.time_limit import ENDING_S, TimeLimit

NOW_S = 1_800_000_000.0
pytestmark = pytest.mark.training


def limit(left_s: float, *steps_s: float, evaluation_s: float = 0.0, total_s: float = 3600.0) -> TimeLimit:
    """A job with this much time left of ``total_s``, after steps of these durations."""
    clock = mock.Mock(return_value=NOW_S)
    made = TimeLimit(120.0, {JOB_END_VARIABLE: f"{NOW_S + total_s:.0f}"}, clock)
    clock.return_value += total_s - left_s
    for seconds in steps_s:
        made.add_step(seconds, 0.0)
    if evaluation_s:
        made.add_step(evaluation_s + 1.0, evaluation_s)
    return made


@pytest.mark.parametrize(
    ("left_s", "steps_s", "save_s", "fits"),
    [
        (480 + 60 + ENDING_S, (400, 480), 60, True),
        (480 + 60 + ENDING_S - 1, (400, 480), 60, False),
        (480 + 120 + ENDING_S, (400, 480), 0, True),  # none was measured: slurm.save_lead_s
        (480 + 120 + ENDING_S - 1, (400, 480), 0, False),
        (480, (900, *[1] * 10), 60, True),  # a slow first step is forgotten
        (480, (900, *[1] * 9), 60, False),
        (-5, (1,), 0, False),
    ],
)
def test_a_step_is_begun_only_if_it_and_its_checkpoint_fit(
    left_s: float, steps_s: tuple[float, ...], save_s: float, fits: bool
) -> None:
    assert (limit(left_s, *steps_s).shortage(save_s, with_evaluation=False) == "") is fits


def test_a_short_job_trains_in_the_first_half_of_its_time() -> None:
    for left_s, fits in ((1 + 100 + ENDING_S, True), (1 + 100 + ENDING_S - 1, False)):
        assert (limit(left_s, 1, total_s=200).shortage(0, with_evaluation=False) == "") is fits


def test_an_evaluation_counts_in_the_steps_that_make_one() -> None:
    made = limit(300, 100, evaluation_s=250)
    assert made.shortage(10, with_evaluation=False) == ""
    assert made.shortage(10, with_evaluation=True) == (
        "the time limit ends the job in 5 min 00 s, too soon for another step (5 min 50 s) and its checkpoint (10 s)"
    )


def test_a_checkpoint_that_is_due_counts_before_the_next_step() -> None:
    """With a checkpoint every step, the job would otherwise be killed in the last one."""
    needed = 60 + 480 + 60 + ENDING_S
    assert limit(needed, 480).shortage(60, with_evaluation=False, saves_now=True) == ""
    assert limit(needed - 1, 480).shortage(60, with_evaluation=False) == "", "control: none is due"
    assert "too soon for the checkpoint that is due (1 min 00 s), another step (8 min" in (
        limit(needed - 1, 480).shortage(60, with_evaluation=False, saves_now=True)
    )
    # The guess for the first one is not doubled, or a short job would end after its first step.
    assert limit(1 + 120 + ENDING_S, 1).shortage(0, with_evaluation=False, saves_now=True) == ""


@pytest.mark.parametrize(("number", "due"), [(1, False), (2, True), (3, True)])
def test_a_checkpoint_is_due_by_interval_and_after_the_last_step_of_a_loop(number: int, due: bool) -> None:
    training = mock.Mock(**{"spec.checkpoint.every_num_steps": 2, "spec.total_steps": 9, "ranks.is_first": True})
    training._is_saved = lambda number, loop: TrainingContext._is_saved(training, number, loop)
    training._time_limit.shortage.return_value = ""
    step = mock.Mock(number=number, times_s={})
    assert TrainingContext._vote_on_time(training, step, mock.Mock(last_step=3)) == ""
    assert training._time_limit.shortage.call_args.kwargs["saves_now"] is due


@pytest.mark.parametrize("environment", [{}, {JOB_END_VARIABLE: ""}, {JOB_END_VARIABLE: "N/A"}])
def test_a_job_of_unknown_end_has_no_limit(environment: dict[str, str]) -> None:
    made = TimeLimit(120.0, environment)
    made.add_step(1e9, 0.0)
    assert made.shortage(1e9, with_evaluation=True) == ""


class SlowWriter:
    """A writer whose snapshots take 5 s, and its files 60 s in the background."""

    def __init__(self, clock: mock.Mock) -> None:
        self._clock = clock
        self._write_s = 0.0
        self.is_writing = False

    def begin(self, *_given: object) -> mock.Mock:
        self._clock.monotonic.return_value += 5.0
        self.is_writing = True
        return mock.Mock()

    def finish(self) -> None:
        if self.is_writing:
            self._clock.monotonic.return_value += 60.0
            self._write_s, self.is_writing = 60.0, False

    def take_write_s(self) -> float:
        taken, self._write_s = self._write_s, 0.0
        return taken


def test_a_checkpoint_takes_as_long_as_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = mock.Mock(**{"monotonic.return_value": 10.0})
    monkeypatch.setattr(saving, "time", clock)
    for name in ("CheckpointWriter", "peer_copies", "_memory_of"):
        monkeypatch.setattr(saving, name, mock.Mock())
    writer = SlowWriter(clock)
    saver = saving.Saving(mock.Mock(), mock.Mock(), mock.Mock(), mock.Mock(), mock.Mock())
    monkeypatch.setattr(saver, "writer", writer)

    def after(*, is_last: bool) -> float:
        saver.save(mock.Mock(), mock.Mock(), mock.Mock(), None, None, is_last=is_last)
        saver.times()
        return saver.save_s()

    assert saver.save_s() == 0.0
    assert after(is_last=False) == 0.0, "the first is still being written"
    writer.finish()
    saver.times()
    assert saver.save_s() == 5.0 + 60.0
    assert after(is_last=False) == 5.0 + 2 * 60.0, "the next one would wait for this one"
    assert after(is_last=True) == 5.0 + 60.0, "the wait for its end is the time of writing"
