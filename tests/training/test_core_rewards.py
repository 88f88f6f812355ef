"""Rewards: the correct answer counts, whatever else a completion contains; a broken function is named."""

import asyncio
import dataclasses
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import JsonValue
from rank_launcher import ended

from rlhf_core.errors import BadConfig, RewardFailed
from rlhf_core.training.rewards.functions import (
    exact_match,
    gsm8k_answer,
    load_reward,
    reward_arguments,
    rewards_of,
)
from rlhf_core.training.types import Conversation, Row

GSM8K_ANSWERS = [
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = <<48+24=72>>72 clips altogether.\n#### 72",
    "He pays 0.8*2,000 = $<<0.8*2000=1600>>1,600.\n#### 1,600",
    "The difference is 3-5 = <<3-5=-2>>-2 degrees.\n#### -2",
    "Each gets 5/2 = <<5/2=2.5>>2.5 pies.\n#### 2.5",
    "#### 1,234,567",
]


def gsm8k(completion: str) -> float:
    (reward,) = gsm8k_answer(prompts=["?"], completions=[completion], answer=["work\n#### 72"])
    return reward


def test_exact_match_ignores_white_space_around() -> None:
    completions, answer = ["12", " 12\n", "1 2", "", "12."], ["12"] * 5
    assert exact_match(prompts=[""] * 5, completions=completions, answer=answer, other=[1] * 5) == [1, 1, 0, 0, 0]


def test_functions_know_the_source_of_a_row_in_a_mixture() -> None:
    rows = [
        Row("1", "?", "1", "1", {}, source="math"),
        Row("2", "?", "2", "2", {"data_source": "gsm8k"}, source="code"),
    ]
    assert reward_arguments(rows, ended(["a", "b"])).always["data_source"] == ["math", "gsm8k"]
    single = [dataclasses.replace(row, source="", columns={}) for row in rows]
    assert "data_source" not in reward_arguments(single, ended(["a", "b"])).always


@pytest.mark.training
@pytest.mark.parametrize("answer", GSM8K_ANSWERS)
def test_the_reference_solution_is_right_and_others_are_wrong(answer: str) -> None:
    rewards = gsm8k_answer(prompts=[""] * 5, completions=GSM8K_ANSWERS, answer=[answer] * 5)
    assert rewards == [float(other == answer) for other in GSM8K_ANSWERS]


@pytest.mark.training
@pytest.mark.parametrize(
    "completion",
    [
        "#### 72",
        "####72.",
        "#### $72.00",
        "#### +72",
        "#### 72 clips",
        "#### 71\n#### 72\nand more 5",
        "#### 144/2",
        r"#### \frac{144}{2}",
        r"#### $\frac{144}{2}$",
        "#### 8 * 9",
        "so the answer is 72.",
        "72",
        "3 + 69 = 72 clips",
    ],
)
def test_other_ways_to_write_the_right_answer(completion: str) -> None:
    assert gsm8k(completion) == 1.0


@pytest.mark.training
@pytest.mark.parametrize(
    "completion",
    [
        "",
        "####",
        "#### ",
        "no number",
        "#### 71",
        "72 or 71",
        "#### 7 2",
        "#### 720",
        "#### -72",
        "#### 72,000",
        "#### x",
        "#### 72.1",
    ],
)
def test_wrong_answers(completion: str) -> None:
    assert gsm8k(completion) == 0.0


HOSTILE = [
    "#### 9**9**9**9",
    "#### 9* *9* *9",
    "#### 9^9^9^9",
    "#### 9!!!!",
    "#### 1e999999999",
    "1e999999999",
    "#### " + "(" * 50 + "7" + ")" * 50,
    "#### " + "(" * 30 + "7" + ")" * 30,
    "#### " + r"\frac" * 12,
    "#### " + r"\frac{1}{" * 7 + "1" + "}" * 7,
    "#### " + "{" * 64,
    "#### " + "1/" * 31 + "1",
    "#### 1/0",
    "####" * 10_000,
    "7" * 100_000,
    "1," * 50_000,
    "#### 72\x00\ud800",
    "٧٢",
]


@pytest.mark.training
@pytest.mark.timeout(30)
@pytest.mark.parametrize("completion", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_completions_end_quickly_and_do_not_raise(completion: str) -> None:
    assert gsm8k(completion) in (0.0, 1.0)


@pytest.mark.training
@settings(max_examples=200)
@given(st.text("0123456789.,+-*/()%${} \\fractimes!^#\n", max_size=70))
def test_no_completion_raises(text: str) -> None:
    assert gsm8k("#### " + text) in (0.0, 1.0)
    assert gsm8k(text) in (0.0, 1.0)


@pytest.mark.training
def test_negative_control_the_bare_verifier_would_compute_the_power() -> None:
    from math_verify import parse

    (power, *_) = parse("9**9")
    assert power.is_number
    assert power.doit() == 9**9


# --- loading and calling ---


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Write the module `user_rewards`."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "user_rewards", raising=False)

    def _write(source: str) -> None:
        (tmp_path / "user_rewards.py").write_text(textwrap.dedent(source))

    return _write


def test_functions_are_loaded_by_path(user_module: Callable[[str], None]) -> None:
    user_module("def exact_match(**columns): return []\nnumber = 3\n")
    assert load_reward("rlhf_core.training.rewards:exact_match") is exact_match
    with pytest.raises(BadConfig, match="user_rewards has no function or class number"):
        load_reward("user_rewards:number")
    with pytest.raises(BadConfig, match="importing no_such_module failed: ModuleNotFoundError"):
        load_reward("no_such_module:f")


def test_a_module_that_fails_to_import_is_named(user_module: Callable[[str], None]) -> None:
    user_module("raise OSError('no licence')\n")
    with pytest.raises(BadConfig, match="importing user_rewards failed: OSError: no licence"):
        load_reward("user_rewards:f")


ROWS = [Row(f"{i}-0", f"{i}?", str(i), str(i), {"answer": i, "level": i} if i else {"answer": 0}) for i in range(3)]


def call(function: Callable[..., Any]) -> list[float | None]:
    return rewards_of("f", function, ROWS, ended(["0", "x", "2"]))


def test_a_function_is_given_columns_of_equal_length_and_the_answer_as_text() -> None:
    seen: dict[str, Any] = {}

    def remember(**columns: Any) -> list[float]:
        seen.update(columns)
        return [0, 0, 0]

    call(remember)
    assert seen == {
        "prompts": ["0?", "1?", "2?"],
        "completions": ["0", "x", "2"],
        "answer": ["0", "1", "2"],
        "level": [None, 1, 2],
    }
    named = [dataclasses.replace(row, columns={"finished": "maybe"}) for row in ROWS]
    rewards_of("f", remember, named, ended(["0", "x", "2"]))
    assert seen["finished"] == ["maybe"] * 3, "a column of the data"


def test_only_functions_that_name_them_are_given_tokens_and_ends() -> None:
    def before(prompts: list[str], completions: list[str], answer: list[str], level: list[int]) -> list[float]:
        return [1.0 for _ in completions]

    def of_ends(completions: list[str], answer: list[str], finished: list[bool], **columns: Any) -> list[float]:
        return [float(one) for one in finished]

    def of_tokens(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [float(one) for (one,) in completion_ids]

    assert call(before) == [1.0, 1.0, 1.0]
    assert call(of_tokens) == [48.0, 120.0, 50.0]
    cut = [dataclasses.replace(one, finished=one.text != "x") for one in ended(["0", "x", "2"])]
    assert rewards_of("f", of_ends, ROWS, cut) == [1.0, 0.0, 1.0]
    named = [dataclasses.replace(row, columns={**row.columns, "finished": False}) for row in ROWS]
    assert rewards_of("f", of_ends, named, cut) == [0.0, 0.0, 0.0], "a column of the data with that name"


CHAT: list[dict[str, JsonValue]] = [{"role": "user", "content": "1+1?"}]
CONVERSATION = Row("c-0", "<user>1+1?<assistant>", "2", "2", {"answer": "2"}, chat=Conversation(CHAT))


def by_trl(completions: list[list[dict[str, str]]], prompts: list[list[dict[str, str]]], **columns: Any) -> list[float]:
    """Read messages, as published functions for TRL do."""
    return [float(made[0]["content"] in asked[-1]["content"]) for made, asked in zip(completions, prompts, strict=True)]


def test_a_function_of_trl_is_given_messages() -> None:
    rows, made = [CONVERSATION] * 2, ended(["1", "2"])
    assert rewards_of("f", by_trl, rows, made, "messages") == [1.0, 0.0]
    with pytest.raises(RewardFailed, match="f raised TypeError: string indices"):
        rewards_of("f", by_trl, rows, made)
    for function in (exact_match, gsm8k_answer):
        assert rewards_of("f", function, rows, made, "messages") == rewards_of("f", function, rows, made) == [0.0, 1.0]
    begun = Conversation([*CHAT, {"role": "assistant", "content": "<think>"}])
    given = reward_arguments([dataclasses.replace(CONVERSATION, chat=begun)], ended(["2"]), "messages").always
    assert (given["prompts"], given["completions"]) == ([CHAT], [[{"role": "assistant", "content": "<think>2"}]])
    text = reward_arguments(ROWS, ended("abc"), "messages")
    assert text == reward_arguments(ROWS, ended("abc")), "rows of text stay texts"


def test_completions_that_a_function_does_not_judge_have_no_reward() -> None:
    assert call(lambda **columns: [None, 1, 2.5]) == [None, 1.0, 2.5]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "f returned None; expected a list of 3 numbers"),
        (1.0, "f returned 1.0; expected a list of 3 numbers"),
        ({0: 0.5, 1: 0.2, 2: 1.0}, r"f returned \{0: 0.5, .*; expected a list of 3 numbers"),
        ({0.5, 0.2, 1.0}, r"f returned \{.*; expected a list of 3 numbers"),
        ("101", "f returned '101'; expected a list of 3 numbers"),
        ([1, 2], "f returned 2 values for 3 completions"),
        ([1, float("nan"), 2], r"f returned nan for completion 1 \('x'\); expected a finite number"),
        ([None, float("nan"), 2], "f returned nan for completion 1"),
        ([1, 2, float("inf")], "f returned inf for completion 2"),
        ([1, 10**400, 2], "f returned 1000.* for completion 1"),
        ([1, "good", 2], "f returned 'good' for completion 1"),
    ],
)
def test_what_is_no_reward_is_named(returned: object, message: str) -> None:
    with pytest.raises(RewardFailed, match=message):
        call(lambda **columns: returned)


def test_an_exception_is_named() -> None:
    def broken(**columns: Any) -> list[float]:
        raise KeyError("level")

    with pytest.raises(RewardFailed, match=r"f raised KeyError: 'level' \(.*test_core_rewards.py, line") as raised:
        call(broken)
    assert isinstance(raised.value.__cause__, KeyError)


@pytest.mark.filterwarnings("error")
def test_an_async_function_is_run_in_one_event_loop() -> None:
    """A client that it keeps between calls belongs to the loop in which it was opened."""
    loops, late = set[asyncio.AbstractEventLoop](), list[str]()

    async def judged(text: str) -> float:
        await asyncio.sleep(0)
        if text == "bad":
            raise ConnectionError("502 Bad Gateway")
        await asyncio.sleep(0.05)
        late.append(text)
        return float(text == "x")

    async def rewards(*, completions: list[str], **columns: Any) -> list[float]:
        loops.add(asyncio.get_running_loop())
        return await asyncio.gather(*map(judged, completions))

    assert call(rewards) == call(rewards) == [0.0, 1.0, 0.0]
    with pytest.raises(RewardFailed, match=r"f raised ConnectionError: 502 Bad Gateway \(.*test_core_rewards.py, line"):
        rewards_of("f", rewards, ROWS, ended(["bad", "x", "2"]))
    late.clear()
    call(rewards)
    assert late == ["0", "x", "2"], "requests of the failed call do not go on"
    assert len(loops) == 1


def test_what_a_function_leaves_of_its_arguments_does_not_matter() -> None:
    def takes_from_its_list(*, completions: list[str], **columns: Any) -> list[float]:
        return [float(completions.pop(0) == "2") for _ in range(3)]

    def drops_from_its_list(*, completions: list[str], **columns: Any) -> list[float]:
        completions.remove("x")
        return [1.0 for _ in completions]

    assert call(takes_from_its_list) == [0, 0, 1]
    with pytest.raises(RewardFailed, match="f returned 2 values for 3 completions"):
        call(drops_from_its_list)


@pytest.mark.parametrize(("path", "is_explained"), [("rubric.json", True), ("/no/such/rubric.json", False)])
def test_a_relative_path_that_leads_nowhere_is_explained(path: str, *, is_explained: bool) -> None:
    def reads(**columns: Any) -> list[float]:
        return [float(Path(path).read_text())]

    with pytest.raises(RewardFailed, match="FileNotFoundError") as raised:
        call(reads)
    assert ("use an absolute path, or see code.paths" in str(raised.value)) is is_explained
