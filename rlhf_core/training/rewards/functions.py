"""Reward functions, and their loading and calling. Does not import torch.

A reward function is called as ``function(prompts=, completions=, answer=, **columns)`` with one list entry per
completion, and returns one finite number per completion, or None for one that it does not judge. ``answer`` is always
the reference answer of the row; ``columns`` are the columns of the data under their own names. The function must accept
``**columns`` for those it does not use. It may be asynchronous.

This is the convention of TRL, apart from conversations: their prompts and completions are texts here, unless
``reward.conversations`` is ``messages``. A function that names them is also given ``completion_ids``, as in TRL, and
``finished`` (:data:`OPTIONAL`).
"""

import contextlib
import importlib
import inspect
import logging
import math
import re
import traceback
import warnings
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from rlhf_core.errors import BadConfig, RewardFailed
from rlhf_core.survival import relative_path_advice

if TYPE_CHECKING:  # without it, the process of the reward functions starts in a tenth of the time
    from asyncio import AbstractEventLoop

    from rlhf_core.training.types import Completion, Conversation, Row

Rewards = Sequence[float | None]
RewardFunction = Callable[..., Rewards | Coroutine[object, object, Rewards]]
Conversations = Literal["text", "messages", "last_turn"]
"""Form of conversations, ``reward.conversations``. Functions that compare answers are always given the text of the last
turn of the model."""
Text = str | Sequence[Mapping[str, Any]]
"""A completion as a text, or as the message that it is in a conversation."""

OPTIONAL = ("completion_ids", "finished", "environment_reward")
"""Arguments that are given only to functions that name them: the tokens of each completion, False for each truncated
one, and the reward by the environment of each rollout, if it gives one (``rollout.turns``). ``**columns`` has only the
columns of the data, which may have these names and then replace them."""

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)", re.ASCII)
_LONGEST_ANSWER = 64
"""Maximum length in characters. No answer to a grade-school problem is a longer number."""
# Input allowed to the parser: sums, products, fractions and percentages. Powers and factorials could take forever and
# cannot be interrupted, because Python computes big integers without checking for signals.
_HARMLESS = re.compile(r"(?:[\d\s.,+\-*/()%$]|\\[dt]?frac|\\cdot|\\times|[{}])*", re.ASCII)


# ---------------------------------------------------------------------------------------------------------------------
# The functions


def exact_match(
    *, prompts: Sequence[Text], completions: Sequence[Text], answer: Sequence[str], **columns: Any
) -> list[float]:
    """Return 1 if the completion equals the reference answer, ignoring surrounding white space; 0 otherwise."""
    return [
        float(_text(found).strip() == expected.strip()) for found, expected in zip(completions, answer, strict=True)
    ]


def gsm8k_answer(
    *, prompts: Sequence[Text], completions: Sequence[Text], answer: Sequence[str], **columns: Any
) -> list[float]:
    """Return 1 if the completion's final number equals the reference answer's; 0 otherwise (Cobbe et al. 2021, arXiv
    2110.14168).

    The reference is the text after ``####`` (the whole answer if there is no ``####``). The completion's answer is the
    text after its last ``####``, up to the first non-mathematical word, or else its last number. math-verify compares
    them as numbers, so ``72``, ``$72.00`` and ``\\frac{144}{2}`` are equal. Every call ends quickly, whatever the
    completion: anything but a short sum, product, fraction or percentage counts as wrong without being computed.
    """
    return [
        float(_same_number(_completion_answer(_text(found)), _tidy(expected.rpartition("####")[2])))
        for found, expected in zip(completions, answer, strict=True)
    ]


def environment_reward(
    *,
    prompts: Sequence[Text],
    completions: Sequence[Text],
    answer: Sequence[str],
    environment_reward: Sequence[float | None],
    **columns: Any,
) -> list[float | None]:
    """Return the reward that the environment of each rollout gives (``get_reward``)."""
    return list(environment_reward)


def _text(completion: Text) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def _completion_answer(text: str) -> str:
    _, mark, after = text.rpartition("####")
    if mark:
        found = _tidy(after.lstrip().partition("\n")[0])
        leading = _NUMBER.match(found)
        return leading[0] if leading and not _is_harmless(found) else found
    numbers = _NUMBER.findall(text)
    return _tidy(numbers[-1]) if numbers else ""


def _tidy(answer: str) -> str:
    """Remove thousands separators, dollar signs, a leading plus, and a final full stop."""
    return (
        re.sub(r"(?<=\d),(?=\d{3})", "", answer)
        .replace("\\$", "")
        .replace("$", "")
        .strip(" \t\r\n")
        .rstrip(".")
        .lstrip("+")
    )


def _is_harmless(answer: str) -> bool:
    return len(answer) <= _LONGEST_ANSWER and "**" not in answer.replace(" ", "") and bool(_HARMLESS.fullmatch(answer))


@lru_cache(maxsize=65_536)
def _same_number(found: str, expected: str) -> bool:
    """True if two final answers are the same number. Pure and cached, so that repeated answers cost nothing."""
    if not found or not _is_harmless(found):
        return False
    if found == expected:
        return True
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about the missing time limit, see below
    from math_verify import parse, verify

    # Its own time limit is an alarm signal: it works in the main thread only and disturbs other users of the alarm.
    # Harmless input ends by itself.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sympy warns about the odd expressions that an untrained model writes
        parsed = [parse(text, parsing_timeout=None) for text in (expected, found)]
        return bool(verify(*parsed, timeout_seconds=None))


# ---------------------------------------------------------------------------------------------------------------------
# Loading and calling


def load_reward(path: str) -> RewardFunction:
    """Import a reward function.

    Args:
        path: ``module:function``.

    Raises:
        BadConfig: the module does not import, or has no such function.
    """
    return imported(path, f"reward function {path}")


def imported(path: str, what: str) -> Callable[..., Any]:
    """Import a function or class of the user.

    Args:
        path: ``module:function``.
        what: beginning of the message of an error.

    Raises:
        BadConfig: the module does not import, or has no such function.
    """
    module_name, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except Exception as error:  # user code may raise anything while it is imported
        raise BadConfig(f"{what}: importing {module_name} failed: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise BadConfig(f"{what}: {module_name} has no function or class {name}")
    return found  # type: ignore[no-any-return]


@dataclass(frozen=True)
class RewardArguments:
    """Arguments of a reward function, each a list with one entry per completion."""

    always: dict[str, list[Any]]
    """Prompts, completions, answers and the columns of the data."""
    named: dict[str, list[Any]]
    """Those of :data:`OPTIONAL`, only for functions that name them."""


@dataclass(frozen=True)
class RewardCall:
    """Result of one call of a reward function."""

    values: list[float | None] = field(default_factory=list)
    """One reward per completion: None for those that the function does not judge, 0 for those in :attr:`problems`."""
    problems: dict[int, str] = field(default_factory=dict)
    """Description of an invalid result, by index of the completion: ``returned nan``."""
    failure: str = ""
    """Reason for having no result at all, as the end of a sentence (``raised KeyError: 'level'``); otherwise empty."""
    error: Exception | None = None
    """Exception that it raised, if called in this process."""
    trace: str = ""
    """Traceback of its exception, if called in its own process."""
    returned: bool = True
    """False if the call was ended: it exceeded its time, or its process exited."""


def call_reward(function: RewardFunction, arguments: RewardArguments) -> RewardCall:
    """Call a reward function in this process. Any exception becomes part of the result.

    Asynchronous functions run in one event loop of this process, so that clients they keep between calls stay usable.

    Args:
        arguments: as built by :func:`reward_arguments`.
    """
    count = len(arguments.always["completions"])  # before the call: the function may change the list that it is given
    try:
        returned: object = function(**_taken(function, arguments))
        if isinstance(returned, Coroutine):
            returned = result_of(returned)
        return _checked(returned, count)
    except Exception as error:  # noqa: BLE001 - user code may raise anything; the run must say whose code it was
        return RewardCall(failure=_error_text(error), error=error)


def result_of(coroutine: Coroutine[object, object, object]) -> object:
    """Result of a coroutine. If it raises, everything else that it started is cancelled, as by ``asyncio.run``: the
    call may be repeated, and its requests must not go on beside those of the next one."""
    import asyncio

    loop = _event_loop()
    try:
        return loop.run_until_complete(coroutine)
    except Exception:
        if left := asyncio.all_tasks(loop):
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        raise


@lru_cache(maxsize=1)
def _event_loop() -> "AbstractEventLoop":
    import asyncio

    return asyncio.new_event_loop()


def _taken(function: RewardFunction, arguments: RewardArguments) -> dict[str, list[Any]]:
    """The arguments, of the optional ones only those that the function names."""
    parameters: Collection[str] = ()
    with contextlib.suppress(TypeError, ValueError):  # it has no readable signature
        parameters = inspect.signature(function).parameters
    return {**{name: of for name, of in arguments.named.items() if name in parameters}, **arguments.always}


def reward_arguments(
    rows: Sequence["Row"], completions: Sequence["Completion"], conversations: Conversations = "text"
) -> RewardArguments:
    """Arguments of a reward function for these completions.

    Args:
        rows: the row of each completion (repeated for each of its samples).
        completions: one for each row.
    """
    chats = [row.chat if conversations == "messages" else None for row in rows]
    names = dict.fromkeys(name for row in rows for name in row.columns)
    arguments: dict[str, list[Any]] = {name: [row.columns.get(name) for row in rows] for name in names}
    pairs: list[tuple[Any, Any]] = [
        (row.prompt, made.last_text if conversations == "last_turn" else made.text)
        if chat is None
        else _messages(chat, made)
        for row, made, chat in zip(rows, completions, chats, strict=True)
    ]
    if any(row.source for row in rows):  # a column of that name, which data prepared for verl has, replaces it
        arguments["data_source"] = [row.columns.get("data_source", row.source) for row in rows]
    arguments["prompts"] = [prompt for prompt, _ in pairs]
    arguments["completions"] = [completion for _, completion in pairs]
    arguments["answer"] = [row.answer for row in rows]
    named: dict[str, list[Any]] = {
        "completion_ids": [list(made.token_ids) for made in completions],
        "finished": [made.finished for made in completions],
        "environment_reward": [made.episode.reward if made.episode else None for made in completions],
    }
    return RewardArguments(arguments, named)


def _messages(chat: "Conversation", made: "Completion") -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Prompt and completion as messages, of several turns with the results of tools in between. A message of the model
    that the prompt begins belongs to the completion, as in TRL 1.16.0 (``GRPOTrainer``)."""
    prompt: list[dict[str, Any]] = [dict(message) for message in chat.prompt]
    begun = str(prompt.pop().get("content") or "") if prompt[-1].get("role") == "assistant" else ""
    turns = made.episode.messages if made.episode else ({"role": "assistant", "content": made.text},)
    first, *others = (dict(message) for message in turns)
    return prompt, [{**first, "content": f"{begun}{first.get('content') or ''}"}, *others]


def rewards_of(
    name: str,
    function: RewardFunction,
    rows: Sequence["Row"],
    completions: Sequence["Completion"],
    conversations: Conversations = "text",
) -> list[float | None]:
    """Rewards of one function, called in this process without a time limit; None for what it does not judge.

    Raises:
        RewardFailed: the function raised, or did not return a finite number or None for each completion.
    """
    called = call_reward(function, reward_arguments(rows, completions, conversations))
    if called.failure:
        raise RewardFailed(f"reward function {name} {called.failure}") from called.error
    for index, problem in called.problems.items():
        raise RewardFailed(
            f"reward function {name} {problem} for completion {index} ({shown(completions[index].text)}); expected a "
            f"finite number"
        )
    return called.values


def _error_text(error: BaseException) -> str:
    """Format an exception with the line that raised it, unless the line is ours."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"raised {type(error).__name__}: {error}{place}{relative_path_advice(error)}"


def _checked(returned: object, count: int) -> RewardCall:
    """Check for a finite float or None for each of ``count`` completions; any other result becomes a problem or
    failure."""
    expected = f"expected a list of {count} numbers"
    try:
        # A set is in any order, and a list of a mapping has its keys.
        values = None if isinstance(returned, Set | Mapping | str) else list(returned)  # type: ignore[call-overload]
    except TypeError:
        values = None
    if values is None:
        return RewardCall(failure=f"returned {shown(returned)}; {expected}")
    if len(values) != count:
        return RewardCall(failure=f"returned {len(values)} values for {count} completions; {expected}")
    numbers: list[float | None] = []
    problems: dict[int, str] = {}
    for index, value in enumerate(values):
        if value is None:
            numbers.append(None)
            continue
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            problems[index] = f"returned {shown(value)}"
            number = 0.0
        numbers.append(number)
    return RewardCall(numbers, problems)


def shown(value: object, limit: int = 80) -> str:
    """Format a value for a message."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
