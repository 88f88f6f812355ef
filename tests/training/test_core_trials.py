"""Trials of reward functions: whatever they do, the answer is a sentence, arrives in time, and nothing keeps
running."""

import dataclasses
import os
from pathlib import Path

import psutil
import pytest

from rlhf_core.schemas.content import TrialProblem
from rlhf_core.training.probes import reward_functions
from rlhf_core.training.probes.reward_functions import completions_for, try_rewards
from rlhf_core.training.types import Conversation, Row

CODE = """
import os, subprocess, sys, time

def good(*, prompts, completions, answer, **columns):
    print("good talks a lot")
    return [float(a == b) for a, b in zip(completions, answer)]

def constant(completions, **columns):
    return [0.5] * len(completions)

def short(completions, **columns):
    return [1.0]

def not_finite(completions, **columns):
    return [float("nan")] * len(completions)

def breaks_on_empty(completions, **columns):
    return [1.0 / len(one) for one in completions]

def endless(completions, **columns):
    while True:
        pass

def sleeps(completions, **columns):
    time.sleep(600)

def slow(completions, **columns):
    if hasattr(time, "before"):
        raise RuntimeError("called again")
    time.before = time.monotonic
    time.monotonic = lambda: time.before() + 25
    return [0.5] * len(completions)

def huge(completions, **columns):
    keep = [bytearray(64 << 20) for _ in range(1000)]
    return [0.0] * len(completions)

def leaves(completions, **columns):
    sys.exit(3)

def dies(completions, **columns):
    os.kill(os.getpid(), 9)

def hard_exit(completions, **columns):
    os._exit(4)

def leaves_a_child(completions, **columns):
    subprocess.Popen(["sleep", "987"])
    time.sleep(600)

def by_level(*, completions, level, **columns):
    return [0.0] * len(completions)

def takes_little(*, prompts, completions):
    return [0.0] * len(completions)

def on_numbers(completions, finished, completion_ids, **columns):
    assert all(finished) and [len(one) for one in completion_ids] == [len(one) for one in completions]
    return [float(one == "1") if one.strip(".").isdigit() else None for one in completions]

def by_trl(completions, **columns):
    return [float(len(one[0]["content"])) for one in completions]
"""

ROWS = [Row(f"u{i}", f"{i}+1=", str(i + 1), f"{i + 1}.", {"prompt": f"{i}+1=", "answer": str(i + 1)}) for i in range(6)]


@pytest.fixture(autouse=True)
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tried_rewards.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_right_and_wrong_answers_and_nonsense_are_tried() -> None:
    rows, completions, right = completions_for(ROWS)
    first = [(text, good) for row, text, good in zip(rows, completions, right, strict=True) if row is ROWS[0]]
    assert first == [("1", True), ("1.", True), ("2", False), ("", False), ("I do not know.", False)]
    assert len({row.uid for row in rows}) == 4


def test_rows_without_answers_have_no_right_completion() -> None:
    rows = [dataclasses.replace(row, answer="", target="") for row in ROWS]
    assert completions_for(rows)[1:] == (["", "I do not know."] * 4, [False] * 8)


def test_one_row_is_enough() -> None:
    (trial,) = try_rewards(["tried_rewards:good"], ROWS[:1])
    assert (trial.num_completions, trial.num_distinct) == (4, 2)


def test_a_good_function() -> None:
    (trial,) = try_rewards(["tried_rewards:good"], ROWS)
    assert (trial.problem, trial.num_completions, trial.num_distinct) == (TrialProblem.NONE, 20, 2)
    assert (trial.right, trial.wrong) == (0.5, 0.0)
    assert 0 < trial.seconds < 1


def test_a_constant_one() -> None:
    (trial,) = try_rewards(["tried_rewards:constant"], ROWS)
    assert (trial.problem, trial.num_distinct) == (TrialProblem.NONE, 1)


def test_one_that_does_not_judge_all() -> None:
    (trial,) = try_rewards(["tried_rewards:on_numbers"], ROWS)
    assert (trial.problem, trial.num_completions, trial.num_unjudged) == (TrialProblem.NONE, 20, 8), trial
    assert (trial.right, trial.wrong, trial.num_distinct) == (1 / 8, 1 / 4, 2)


def test_conversations_are_given_as_they_are_in_training() -> None:
    rows = [dataclasses.replace(row, chat=Conversation([{"role": "user", "content": row.prompt}])) for row in ROWS]
    (as_text,) = try_rewards(["tried_rewards:by_trl"], rows)
    (as_messages,) = try_rewards(["tried_rewards:by_trl"], rows, "messages")
    assert (as_text.problem, as_messages.problem) == (TrialProblem.FAILED, TrialProblem.NONE)


def test_a_slow_one_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_functions, "TRIAL_S", 60.0)
    (trial,) = try_rewards(["tried_rewards:slow"], ROWS)
    assert (trial.problem, trial.message) == (TrialProblem.NONE, "")
    assert trial.seconds >= 25, "of the first call"


@pytest.mark.parametrize(
    ("name", "problem", "message"),
    [
        ("short", TrialProblem.FAILED, "1 values for 20 completions"),
        ("not_finite", TrialProblem.FAILED, "nan"),
        ("breaks_on_empty", TrialProblem.FAILED, "ZeroDivisionError"),
        ("absent", TrialProblem.FAILED, "no function or class absent"),
        ("endless", TrialProblem.TIMEOUT, "no response within 1 s"),
        ("sleeps", TrialProblem.TIMEOUT, "no response within 1 s"),
        ("huge", TrialProblem.MEMORY, "MemoryError"),
        ("leaves", TrialProblem.DIED, "ended its process with 3"),
        ("dies", TrialProblem.DIED, "SIGKILL"),
        ("hard_exit", TrialProblem.DIED, "exit code 4"),
        ("by_level", TrialProblem.COLUMNS, "needs level"),
        ("takes_little", TrialProblem.COLUMNS, "does not take prompt, answer; add **columns"),
    ],
)
def test_a_function_that_misbehaves_is_a_sentence(
    name: str, problem: TrialProblem, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial_s = 1.0 if problem is TrialProblem.TIMEOUT else 60.0  # on a busy machine, the other functions need their time
    monkeypatch.setattr(reward_functions, "TRIAL_S", trial_s)
    monkeypatch.setattr(reward_functions, "MEMORY_BYTES", 512 << 20)
    (trial,) = try_rewards([f"tried_rewards:{name}"], ROWS)
    assert (trial.problem, message in trial.message) == (problem, True), trial


def test_nothing_is_left_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_functions, "TRIAL_S", 1.0)
    (trial,) = try_rewards(["tried_rewards:leaves_a_child"], ROWS)
    assert trial.problem is TrialProblem.TIMEOUT, "it has started its child"
    mine = [
        one.info["cmdline"] for one in psutil.process_iter(["cmdline", "uids"]) if one.info["uids"].real == os.getuid()
    ]
    assert ["sleep", "987"] not in mine


def test_all_functions_together_have_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_functions, "TRIAL_S", 1.0)
    monkeypatch.setattr(reward_functions, "ALL_TRIALS_S", 1.2)
    names = ["tried_rewards:sleeps", "tried_rewards:sleeps", "tried_rewards:good"]
    trials = try_rewards(names, ROWS)
    assert [one.problem for one in trials][::2] == [TrialProblem.TIMEOUT, TrialProblem.NOT_TRIED]
