"""Lines of output as a source of progress."""

import time
from pathlib import Path

import pytest
from watched_programs import Polls, Start, append, make_old, watched

from rlhf_core.launch.wrap.arguments import VERL_PATTERNS
from rlhf_core.worker.command.observation import StepFigures
from rlhf_core.worker.command.sources.stdout import MAX_BYTES_PER_POLL, MAX_LINE_CHARACTERS, PART_CHARACTERS, Stdout

STEP_LINE = r"step (?P<step>\d+)(?: loss (?P<loss>\S+))?"
BAR = r"(?P<step>\d+)/\d+ \["


def stdout(tmp_path: Path, *patterns: str) -> Polls:
    return Polls(Stdout(watched(tmp_path, logs=[tmp_path / "log"], stdout_patterns=patterns or [STEP_LINE])))


def test_groups_give_the_step_and_metrics(tmp_path: Path) -> None:
    polls = stdout(tmp_path)
    assert not polls.poll().moved
    append(tmp_path / "log", "hello\nstep 1 loss 0.5\nstep 2 loss nan\nstep 3 loss ?\n")
    found = polls.poll()
    assert (found.moved, found.step) == (True, 3)
    assert str(found.metrics) == str([StepFigures(1, {"loss": 0.5}), StepFigures(2, {"loss": float("nan")})])
    append(tmp_path / "log", "nothing of the kind\n")
    assert not polls.poll().moved


def test_numbers_are_read_as_people_print_them(tmp_path: Path) -> None:
    polls = stdout(tmp_path, r"step (?P<step>\S+) loss (?P<loss>\S+)(?: tokens (?P<tokens>\S+))?")
    append(tmp_path / "log", "step 1,000: loss 0.5, tokens 1,234,567.5;\nstep 1,001: loss 1,23 tokens 7.\n")
    found = polls.poll()
    assert (found.moved, found.step) == (True, 1001)
    assert found.metrics == [
        StepFigures(1000, {"loss": 0.5, "tokens": 1_234_567.5}),
        StepFigures(1001, {"tokens": 7.0}),
    ]


def test_colours_are_no_part_of_a_line(tmp_path: Path) -> None:
    polls = stdout(tmp_path)
    append(tmp_path / "log", "\x1b[36m(Task pid=7)\x1b[0m \x1b[1mstep 3\x1b[0m loss \x1b[32m0.5\x1b[0m\n")
    assert polls.poll().metrics == [StepFigures(3, {"loss": 0.5})]


def test_the_line_that_verl_prints_after_a_step(tmp_path: Path) -> None:
    polls = stdout(tmp_path, *VERL_PATTERNS)
    begin = "\x1b[36m(TaskRunner pid=7)\x1b[0m step:"
    new = " - actor/entropy:0.4 - actor/pg_loss:np.float64(-0.013) - actor/lr:1e-06 - critic/score/mean:0.25"
    append(tmp_path / "log", f"{begin}0 - val-core/gsm8k/reward/mean@1:0.1\n{begin}1{new}\n")
    append(tmp_path / "log", f"{begin}2 - actor/grad_norm:0.300 - response_length/mean:98.000 - timing_s/step:41.200\n")
    assert {one.step: one.values for one in polls.poll().metrics} == {
        1: {"entropy": 0.4, "loss": -0.013, "lr": 1e-6, "reward": 0.25},
        2: {"grad_norm": 0.3, "completion_length": 98.0, "step_time": 41.2},
    }


def test_the_line_of_verl_after_a_validation_begins_with_hundreds_of_other_metrics(tmp_path: Path) -> None:
    polls = stdout(tmp_path, *VERL_PATTERNS)
    validation = "".join(f" - val-aux/math_dapo/score/maj@{number}/mean:0.4{number}" for number in range(200))
    assert len(validation) > 8_000
    append(tmp_path / "log", f"step:3{validation} - critic/score/mean:-0.8 - timing_s/step:1268.4\n")
    assert polls.poll().metrics == [StepFigures(3, {"reward": -0.8, "step_time": 1268.4})]


@pytest.mark.parametrize("shift", range(60))
def test_a_value_on_the_border_of_two_parts_of_a_line_is_whole(tmp_path: Path, shift: int) -> None:
    polls = stdout(tmp_path, r"^step (?P<step>\d+)", r"loss (?P<loss>\S+)( .*)?$", r" grad_norm=(?P<grad_norm>\d+)\b")
    filler = "x" * (PART_CHARACTERS - 7 - shift)
    append(tmp_path / "log", f"step 7 {filler} grad_norm=123456 {filler} loss 0.25 step 9\n")
    (found,) = polls.poll().metrics
    assert (found.step, found.values) == (7, {"grad_norm": 123456.0, "loss": 0.25})


@pytest.mark.parametrize("pattern", [*VERL_PATTERNS, r".*loss=(?P<loss>\S+)", r"(?P<step>\d+)/\d+ \["])
@pytest.mark.parametrize(
    "text", ["step:1", "step:1 - ", " - actor/lr:np.", "1", " - critic/score/mea", "A brown fox. "]
)
def test_a_line_ten_times_as_long_does_not_take_a_hundred_times_as_long(
    tmp_path: Path, pattern: str, text: str
) -> None:
    polls = stdout(tmp_path, pattern)

    def seconds(length: int) -> float:
        append(tmp_path / "log", f"{(text * length)[:length]}\n")
        started = time.perf_counter()
        polls.poll()
        return time.perf_counter() - started

    short = max(seconds(MAX_LINE_CHARACTERS // 10), 0.02)
    assert seconds(MAX_LINE_CHARACTERS) < 40 * short


def test_a_step_that_is_printed_again_shows_no_progress(tmp_path: Path) -> None:
    """tqdm redraws its bar with a longer time if it was not updated for a while."""
    polls = stdout(tmp_path, BAR)
    append(tmp_path / "log", "\r 3/8 [00:01<00:02]\r 3/8 [00:31<00:52]\n")
    assert polls.poll().moved
    append(tmp_path / "log", "\r 3/8 [00:41<00:52]\n")
    assert not polls.poll().moved
    append(tmp_path / "log", "\r 4/8 [00:43<00:52]\n")
    assert polls.poll().moved


def test_a_bar_without_a_line_end_counts_once_it_is_stable(tmp_path: Path) -> None:
    polls = stdout(tmp_path, BAR)
    append(tmp_path / "log", "\r 1/80 [00:01]\r 2")
    assert polls.poll().step == 1
    append(tmp_path / "log", "5/80 [00:02]")
    assert [reading.step for reading in polls.polls(3, wait_s=0)] == [1, 25, 25]
    append(tmp_path / "log", "\r 26/80 [00:03]")
    assert [reading.step for reading in polls.polls(2, wait_s=0)] == [25, 26]


def test_output_of_the_previous_start_is_no_progress(tmp_path: Path) -> None:
    append(tmp_path / "log", "step 7\n")
    make_old(tmp_path / "log")
    polls = stdout(tmp_path)
    assert not polls.poll().moved
    append(tmp_path / "log", "step 7\n")
    assert polls.poll().moved


def test_a_truncated_log_is_read_from_its_beginning(tmp_path: Path) -> None:
    polls = stdout(tmp_path)
    append(tmp_path / "log", "step 7\nstep 8\n")
    assert polls.poll().step == 8
    time.sleep(0.01)
    (tmp_path / "log").write_text("step 1\n")
    assert polls.poll().step == 1


def test_output_beyond_the_read_limit_follows_at_the_next_poll(tmp_path: Path) -> None:
    polls = stdout(tmp_path)
    append(tmp_path / "log", "x" * (MAX_BYTES_PER_POLL + 10) + "\nstep 2\n" + "\0" * 100 + "\nstep 3\n")
    assert [reading.step for reading in polls.polls(3, wait_s=0)] == [None, 3, 3]


def test_it_is_blind_to_output_in_a_buffer(tmp_path: Path, start: Start) -> None:
    """The program works and prints, but the output stays in its buffer."""
    code = f"import sys, time\nsys.stdout = open({str(tmp_path / 'log')!r}, 'w')\n"
    code += f"for step in range(10**9):\n print('step', step)\n open({str(tmp_path / 'at')!r}, 'w').write(str(step))\n"
    code += " time.sleep(0.02)\n"
    polls = stdout(tmp_path)
    start(code)
    steps = []
    for _ in range(3):
        assert not polls.poll().moved
        time.sleep(0.3)
        steps.append((tmp_path / "at").read_text() if (tmp_path / "at").exists() else "")
    assert steps[-1] != steps[0]
