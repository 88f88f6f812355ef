"""Reward functions in a separate process: a call that would hang or kill a trainer costs one answer, and is named."""

import contextlib
import dataclasses
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import hostile_rewards
import psutil
import pytest
from fork_server import fork_server
from process_tools import modules_with, user_processes
from pydantic import ValidationError
from rank_launcher import ended, tiny_spec

from rlhf_core.errors import BadConfig, RewardFailed
from rlhf_core.schemas.changes import with_changes
from rlhf_core.schemas.run import RunSpec
from rlhf_core.training.rewards import process as process_module
from rlhf_core.training.rewards.functions import reward_arguments
from rlhf_core.training.rewards.process import RewardProcess
from rlhf_core.training.rewards.scoring import RewardScorer, reward_names
from rlhf_core.training.types import Conversation, Row

WELL = "hostile_rewards:well"


def rows(count: int) -> list[Row]:
    return [Row(f"{i}-0", f"{i}?", str(i), str(i), {"answer": i}) for i in range(count)]


def spec(*functions: str, **reward: Any) -> RunSpec:
    paths = [f"hostile_rewards:{name}" if ":" not in name else name for name in functions]
    return RunSpec.model_validate(tiny_spec(reward={"functions": paths, **reward}))


@contextmanager
def scorer(*functions: str, **reward: Any) -> Iterator[RewardScorer]:
    with contextlib.closing(RewardScorer(spec(*functions, **{"timeout_s": 1.0, **reward}), rank=1)) as one:
        yield one


HARM = {
    "endless": "did not respond within",
    "forking": "did not respond within",
    "orphaning": "ended its process with exit code 4",
    "exiting": "ended its process with exit code 3",
    "crashing": "had its process ended by SIGSEGV",
    "killed": "had its process ended by SIGKILL, most likely for memory",
    "leaving": "raised SystemExit: 5",
    "greedy": "raised MemoryError",
    "raising": "raised KeyError: 'level'",
    "closing": "its process",
    "not_a_number": "returned nan",
}


@pytest.mark.parametrize("name", HARM)
def test_harm_is_an_error_that_names_function_and_completion(name: str) -> None:
    texts, beats = ["good", "good", "bad", "good"], []
    with scorer(name) as one, pytest.raises(RewardFailed) as raised:
        one.score(rows(4), ended(texts), 1, lambda: beats.append(1))
    message = str(raised.value)
    assert message.startswith(f"reward function {name} ")
    assert HARM[name] in message.partition(" for completion")[0]
    assert "for completion 2 ('bad', prompt 2-0); expected a finite number within reward.timeout_s = 1 s" in message
    assert 'reward.on_failure = "zero"' in message
    assert beats
    assert user_processes() == []


def test_a_rank_shows_life_while_its_function_runs() -> None:
    process, beats = RewardProcess(["hostile_rewards:endless"]), list[int]()
    process.await_loaded(lambda: None)
    process.call("hostile_rewards:endless", reward_arguments(rows(1), ended(["bad"])), 0, 2.0, lambda: beats.append(1))
    process.close()
    assert len(beats) >= 5, "more than at its beginning and end"


@pytest.mark.parametrize("name", ["endless", "orphaning", "raising", "not_a_number"])
def test_harm_is_counted_as_zero_and_reported_once_if_requested(name: str) -> None:
    with scorer("well", name, on_failure="zero", weights=[1.0, 2.0]) as one:
        first = one.score(rows(3), ended(["good", "bad", "good"]), 1, lambda: None)
        second = one.score(rows(3), ended(["bad", "good", "good"]), 2, lambda: None)
    assert first.total == [3.0, 0.0, 3.0]
    assert first.by_function == {"well": [1.0, 1.0, 1.0], name: [1.0, 0.0, 1.0]}
    assert second.total == [0.0, 3.0, 3.0]
    assert (first.num_failed, second.num_failed) == (1, 1)
    (warning,) = first.warnings
    assert warning.startswith(f"On rank 1, reward function {name} ")
    assert "for completion 1 ('bad', prompt 1-0)" in warning
    assert second.warnings == []
    assert user_processes() == []


def test_a_failure_of_what_is_only_measured_leaves_the_reward() -> None:
    with scorer("well", "raising", on_failure="zero", weights=[1.0, 0.0]) as one:
        found = one.score(rows(3), ended(["good", "bad", "good"]), 1, lambda: None)
    assert found.total == [1.0, 1.0, 1.0]
    assert found.by_function == {"well": [1.0, 1.0, 1.0], "raising": [1.0, 0.0, 1.0]}
    assert found.num_failed == 1
    assert "Its weight is 0, so the rewards are not affected" in found.warnings[0]


def test_what_a_function_does_not_judge_is_left_to_the_others() -> None:
    with scorer("on_digits", "on_letters", weights=[1.0, 0.5], timeout_s=30.0) as one:
        found = one.score(rows(3), ended(["7", "ab", "3"]), 1, lambda: None)
        with pytest.raises(RewardFailed) as raised:
            one.score(rows(3), ended(["7", "?", "!"]), 1, lambda: None)
    assert (found.total, found.num_failed, found.warnings) == ([7.0, 1.0, 3.0], 0, [])
    assert found.by_function == {"on_digits": [7.0, None, 3.0], "on_letters": [None, 2.0, None]}
    assert str(raised.value).startswith(
        "every reward function that counts returned None for 2 of 3 completions, first for completion 1 ('?', prompt "
    )
    assert str(raised.value).endswith('or set reward.on_failure = "zero" to count them as 0')
    with (
        scorer("on_digits", "well", weights=[1.0, 0.0], timeout_s=0) as one,
        pytest.raises(RewardFailed, match=r"that counts returned None for 1 of 2 completions"),
    ):
        one.score(rows(2), ended(["7", "?"]), 1, lambda: None)
    with scorer("on_digits", "well", weights=[0.0, 0.0], timeout_s=0) as one:
        assert one.score(rows(2), ended(["7", "?"]), 1, lambda: None).total == [0.0, 0.0], "only measured"
    with scorer("on_digits", on_failure="zero", timeout_s=0) as one:
        found = one.score(rows(2), ended(["7", "?"]), 1, lambda: None)
        again = one.score(rows(2), ended(["7", "?"]), 1, lambda: None)
    assert (found.total, found.num_failed) == ([7.0, 0.0], 1)
    assert "They count as 0 (reward.on_failure)" in found.warnings[0]
    assert again.warnings == []


def test_an_evaluation_has_a_score_for_every_completion() -> None:
    measured = with_changes(spec("well"), {"evaluate.scorer": "hostile_rewards:on_digits", "reward.timeout_s": 0})
    one = RewardScorer(measured)
    assert one.evaluate(rows(2), ended(["7", "8"]), lambda: None) == [7.0, 8.0]
    with pytest.raises(RewardFailed, match=r"scorer on_digits returned None for completion 1 \('x', .*; return a"):
        one.evaluate(rows(2), ended(["7", "x"]), lambda: None)


def test_too_much_of_it_stops_all_the_same() -> None:
    with (
        scorer("raising", on_failure="zero", max_failed_share=0.5) as one,
        pytest.raises(RewardFailed, match=r"failed for 3 of 4 completions, more than reward.max_failed_share = 0.5"),
    ):
        one.score(rows(4), ended(["bad", "good", "bad", "bad"]), 1, lambda: None)


def test_a_failure_for_many_and_for_none_alone_is_reported_as_such() -> None:
    with scorer("not_by_one", on_failure="zero") as one:
        found = one.score(rows(8), ended(["good"] * 8), 1, lambda: None)
    assert found.total == [1.0] * 8
    assert "too many at once" in found.warnings[0]
    assert "for none of them alone, so none counts as 0; call it with that many" in found.warnings[0]
    assert "reward.timeout_s" not in found.warnings[0]
    with scorer("not_by_one") as one, pytest.raises(RewardFailed, match="for 8 completions at once, but for none of"):
        one.score(rows(8), ended(["good"] * 8), 1, lambda: None)


@pytest.mark.parametrize("count", [1, 8])
def test_a_failure_that_is_over_when_the_function_is_called_again_changes_nothing(
    count: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """One 502 of a judge ended the run, although every completion got its reward from the calls for their halves."""
    texts = ["good"] * count
    with scorer("failing_once", timeout_s=30.0) as one:
        failed, first, second = [one.score(rows(count), ended(texts), step, lambda: None) for step in (1, 1, 2)]
    assert failed.total == first.total, "the same numbers as without a failure"
    (warning,) = failed.warnings
    assert "reward function failing_once raised ConnectionError: 502 Bad Gateway" in warning
    assert warning.endswith(f"for {count} completions, but not when it was called again, so none counts as 0.")
    assert (first.warnings, second.warnings, failed.num_failed) == ([], [], 0)
    measured = with_changes(spec("well", timeout_s=30.0), {"evaluate.scorer": "hostile_rewards:failing_once"})
    with contextlib.closing(RewardScorer(measured, 1)) as one:
        assert len(one.evaluate(rows(count), ended(texts), lambda: None)) == count
    assert "warning: On rank 1, reward function failing_once raised ConnectionError" in capfd.readouterr().out


def test_a_failure_in_an_evaluation_does_not_hide_that_in_training(capsys: pytest.CaptureFixture[str]) -> None:
    path = "hostile_rewards:failing_once"
    one = RewardScorer(with_changes(spec(path, timeout_s=0), {"evaluate.scorer": path}))
    hostile_rewards.calls.clear()
    one.evaluate(rows(2), ended(["a", "b"]), lambda: None)
    hostile_rewards.calls.clear()
    assert len(one.score(rows(2), ended(["a", "b"]), 1, lambda: None).warnings) == 1
    assert capsys.readouterr().out.count("but not when it was called again") == 1


def test_what_ends_its_process_for_many_is_not_called_again_with_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a node that has just run out of memory, it would take that memory once more."""
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    with scorer("killed_by_many", on_failure="zero", timeout_s=30.0) as one:
        found = one.score(rows(8), ended(["good"] * 8), 1, lambda: None)
    assert found.total == [1.0] * 8
    assert "had its process ended by SIGKILL, most likely for memory for 8 completions at once" in found.warnings[0]
    assert (tmp_path / "calls").read_text().split() == ["8", "4", "4"]


def test_what_is_too_slow_for_many_needs_more_time() -> None:
    with scorer("slow_for_many", timeout_s=2.0, on_failure="zero") as one:
        found = one.score(rows(8), ended(["good"] * 8), 1, lambda: None)
    assert found.total == [1.0] * 8
    assert "so none counts as 0; allow more time (reward.timeout_s)" in found.warnings[0]


@pytest.mark.parametrize("name", ["printing", "returning_twice"])
def test_what_disturbs_the_connection_elsewhere_is_an_answer_as_any_other(name: str) -> None:
    with scorer(name) as one:
        for step in (1, 2, 3):
            assert one.score(rows(3), ended(["a", "\ud800", "c" * 300_000]), step, lambda: None).total == [
                1.0,
                1.0,
                1.0,
            ]


def test_a_process_with_many_open_files_is_served() -> None:
    """A trainer of many ranks has a connection to each; the process of a function that was ended is started again."""
    with contextlib.ExitStack() as stack:
        for _ in range(1100):
            stack.callback(os.close, os.dup(0))
        with scorer("well", timeout_s=30.0) as one:
            assert one.score(rows(2), ended(["a", "b"]), 1, lambda: None).total == [1.0, 1.0]
            assert user_processes(), "control: its process is found while it is there"


@pytest.mark.parametrize("timeout_s", [0.0, 30.0])
def test_a_number_too_large_for_a_reward_is_a_failure_of_the_function(timeout_s: float) -> None:
    with scorer("too_large", timeout_s=timeout_s, on_failure="zero") as one:
        found = one.score(rows(3), ended(["good", "bad", "good"]), 1, lambda: None)
    assert (found.total, found.num_failed) == ([1.0, 0.0, 1.0], 1)


@pytest.mark.parametrize("timeout_s", [0.0, 30.0])
def test_rewards_are_summed_with_weights_and_kept_apart(timeout_s: float) -> None:
    exact = "rlhf_core.training.rewards:exact_match"
    with scorer(exact, "well", timeout_s=timeout_s, weights=[2.0, -0.5]) as one:
        found = one.score(rows(3), ended(["0", "x", "2"]), 1, lambda: None)
        assert one.evaluate(rows(2), ended(["x", "1"]), lambda: None) == [0.0, 1.0]
    assert found.total == [1.5, -0.5, 1.5]
    assert found.by_function == {"exact_match": [1.0, 0.0, 1.0], "well": [1.0, 1.0, 1.0]}
    assert (found.num_failed, found.warnings) == (0, [])


def test_a_reference_answer_is_compared_with_what_was_written_only() -> None:
    chat = Conversation([{"role": "user", "content": "0?"}, {"role": "assistant", "content": "It is "}])
    row = dataclasses.replace(rows(1)[0], chat=chat)
    with scorer("rlhf_core.training.rewards:exact_match", conversations="messages", timeout_s=0) as one:
        assert one.score([row], ended(["0"]), 1, lambda: None).total == [1.0]


def test_a_function_has_its_path_as_its_name_where_its_own_means_something_else() -> None:
    """The metric reward/mean of a function `mean` replaced the mean of the rewards, which health rules read."""
    assert list(reward_names(["a:exact_match"])) == ["exact_match"]
    assert list(reward_names(["a:exact_match", "b:exact_match"])) == ["a:exact_match", "b:exact_match"]
    assert list(reward_names(["a:mean", "a:max", "a:length"])) == ["a:mean", "a:max", "length"]


def test_a_function_that_is_listed_twice_counts_twice_and_the_others_keep_their_weights() -> None:
    with scorer("well", "well", "raising", weights=[1.0, 1.0, 0.5], timeout_s=0) as one:
        found = one.score(rows(2), ended(["good", "good"]), 1, lambda: None)
    assert found.by_function == {"well": [1.0, 1.0], "raising": [1.0, 1.0]}
    assert found.total == [2.5, 2.5]


def test_a_weight_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"reward\.weights\.0\n  Input should be a finite number"):
        spec("well", weights=[math.nan])


def test_a_function_that_draws_at_random_draws_the_same_when_a_step_is_made_again() -> None:
    drawn = []
    for steps in ((1, 2), (2,)):  # the second run starts from a checkpoint after step 1
        with scorer("noisy", timeout_s=30.0) as one:
            drawn.append([one.score(rows(2), ended(["a", "b"]), step, lambda: None).total for step in steps])
    assert drawn[0][1] == drawn[1][0]
    assert drawn[0][0] != drawn[0][1]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_module_at_all", "importing broken_rewards failed: ModuleNotFoundError"),
        ("import os; os._exit(7)", "its import ended its process with exit code 7"),
        ("raise SystemExit(2)", "raised SystemExit: 2"),
        ("while True: pass", "its import did not respond within 1 s"),
    ],
)
def test_a_function_that_cannot_be_imported_is_named(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_rewards.py").write_text(f"{source}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(process_module, "LOAD_TIMEOUT_S", 1.0)
    process = RewardProcess([WELL, "broken_rewards:score"])
    with pytest.raises(BadConfig, match=message) as raised:
        process.call(WELL, reward_arguments(rows(1), ended(["a"])), 0, 5.0, lambda: None)
    process.close()
    assert "broken_rewards" in str(raised.value)


def test_the_process_of_the_functions_imports_nothing_heavy() -> None:
    imported = modules_with("rlhf_core.training.rewards.worker")
    assert not {"torch", "numpy", "pydantic", "transformers", "psutil"} & imported


def score_in_this_process(name: str, called: Event) -> None:
    """Call a reward function as a rank without a separate process would."""
    scorer = RewardScorer(spec(name, timeout_s=0))
    called.set()
    scorer.score(rows(1), ended(["bad"]), 1, lambda: None)


@pytest.mark.parametrize(("name", "code"), [("exiting", 3), ("crashing", -11), ("leaving", 5), ("endless", None)])
def test_negative_control_in_the_process_of_a_rank_it_does_take_the_rank_along(name: str, code: int | None) -> None:
    context = fork_server()
    called = context.Event()
    rank = context.Process(target=score_in_this_process, args=(name, called))
    rank.start()
    try:
        assert called.wait(100)
        rank.join(2 if code is None else 60)
        assert rank.exitcode == code
    finally:
        rank.kill()
        rank.join()


def test_the_process_ends_with_a_rank_that_is_killed() -> None:
    source = (
        f"import sys, time; sys.path[:0] = {sys.path!r}\n"
        f"from rlhf_core.training.rewards.process import RewardProcess\n"
        f"process = RewardProcess([{WELL!r}]); process.await_loaded(lambda: None)\n"
        f"print(process.pid, flush=True); time.sleep(600)\n"
    )
    rank = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
    assert rank.stdout is not None
    process = psutil.Process(int(rank.stdout.readline()))
    rank.kill()
    rank.communicate()
    psutil.wait_procs([process], timeout=60)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
