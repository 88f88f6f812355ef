"""Reward functions, and their loading and calling. Does not import torch.

A reward function is called as ``function(prompts=, completions=, answer=, **columns)`` with one list entry per
completion and returns one finite number per completion (the convention of TRL). ``answer`` is always the reference
answer of the row; ``columns`` are the columns of the data under their own names. The function must accept ``**columns``
for those it does not use.
"""

import importlib
import logging
import math
import re
import traceback
import warnings
from collections.abc import Callable, Coroutine, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import BadConfig, RewardFailed
from rlhf_core.survival import relative_path_advice

if TYPE_CHECKING:  # without it, the process of the reward functions starts in a tenth of the time
    from rlhf_core.training.types import Row

RewardFunction = Callable[..., Sequence[float]]

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)", re.ASCII)
_LONGEST_ANSWER = 64
"""Maximum length in characters. No answer to a grade-school problem is a longer number."""
# Input allowed to the parser: sums, products, fractions and percentages. Powers and factorials could take forever and
# cannot be interrupted, because Python computes big integers without checking for signals.
_HARMLESS = re.compile(r"(?:[\d\s.,+\-*/()%$]|\\[dt]?frac|\\cdot|\\times|[{}])*", re.ASCII)


# ---------------------------------------------------------------------------------------------------------------------
# The functions


def exact_match(
    *, prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **columns: Any
) -> list[float]:
    """Return 1 if the completion equals the reference answer, ignoring surrounding white space; 0 otherwise."""
    return [float(found.strip() == expected.strip()) for found, expected in zip(completions, answer, strict=True)]


def gsm8k_answer(
    *, prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **columns: Any
) -> list[float]:
    """Return 1 if the completion's final number equals the reference answer's; 0 otherwise (Cobbe et al. 2021, arXiv
    2110.14168).

    The reference is the text after ``####`` (the whole answer if there is no ``####``). The completion's answer is the
    text after its last ``####``, up to the first non-mathematical word, or else its last number. math-verify compares
    them as numbers, so ``72``, ``$72.00`` and ``\\frac{144}{2}`` are equal. Every call ends quickly, whatever the
    completion: anything but a short sum, product, fraction or percentage counts as wrong without being computed.
    """
    return [
        float(_same_number(_completion_answer(found), _tidy(expected.rpartition("####")[2])))
        for found, expected in zip(completions, answer, strict=True)
    ]


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
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # user code may raise anything while it is imported
        raise BadConfig(
            f"reward function {path}: importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise BadConfig(f"reward function {path}: {module_name} has no function {name}")
    return function  # type: ignore[no-any-return]


@dataclass(frozen=True)
class RewardCall:
    """Result of one call of a reward function."""

    values: list[float] = field(default_factory=list)
    """One reward per completion; 0 for those in :attr:`problems`."""
    problems: dict[int, str] = field(default_factory=dict)
    """Description of an invalid result, by index of the completion: ``returned nan``."""
    failure: str = ""
    """Reason for having no result at all, as the end of a sentence (``raised KeyError: 'level'``); otherwise empty."""
    error: Exception | None = None
    """Exception that it raised, if called in this process."""
    trace: str = ""
    """Traceback of its exception, if called in its own process."""


def call_reward(function: RewardFunction, arguments: Mapping[str, Sequence[Any]]) -> RewardCall:
    """Call a reward function in this process. Any exception becomes part of the result.

    Args:
        arguments: as built by :func:`reward_arguments`.
    """
    count = len(arguments["completions"])  # before the call: the function may change the list that it is given
    try:
        return _checked(function(**arguments), count)
    except Exception as error:  # noqa: BLE001 - user code may raise anything; the run must say whose code it was
        return RewardCall(failure=_error_text(error), error=error)


def reward_arguments(rows: Sequence["Row"], completions: Sequence[str]) -> dict[str, list[Any]]:
    """Arguments of a reward function for these completions, each a list of the same length.

    Args:
        rows: the row of each completion (repeated for each of its samples).
        completions: texts, one for each row.
    """
    names = dict.fromkeys(name for row in rows for name in row.columns)
    arguments: dict[str, list[Any]] = {name: [row.columns.get(name) for row in rows] for name in names}
    arguments["prompts"] = [row.prompt for row in rows]
    arguments["completions"] = list(completions)
    arguments["answer"] = [row.answer for row in rows]
    return arguments


def rewards_of(name: str, function: RewardFunction, rows: Sequence["Row"], completions: Sequence[str]) -> list[float]:
    """Rewards of one function, called in this process without a time limit.

    Raises:
        RewardFailed: the function raised, or did not return one finite number per completion.
    """
    called = call_reward(function, reward_arguments(rows, completions))
    if called.failure:
        raise RewardFailed(f"reward function {name} {called.failure}") from called.error
    for index, problem in called.problems.items():
        raise RewardFailed(
            f"reward function {name} {problem} for completion {index} ({shown(completions[index])}); expected a finite "
            f"number"
        )
    return called.values


def _error_text(error: BaseException) -> str:
    """Format an exception with the line that raised it, unless the line is ours."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"raised {type(error).__name__}: {error}{place}{relative_path_advice(error)}"


def _checked(returned: object, count: int) -> RewardCall:
    """Check for one finite float for each of ``count`` completions; any other result becomes a problem or failure."""
    expected = f"expected a list of {count} numbers"
    if isinstance(returned, Coroutine):
        returned.close()  # or Python warns that it was never awaited
        return RewardCall(failure=f"is an async function; {expected}: call it with asyncio.run in an ordinary function")
    try:
        # A set is in any order, and a list of a mapping has its keys.
        values = None if isinstance(returned, Set | Mapping | str) else list(returned)  # type: ignore[call-overload]
    except TypeError:
        values = None
    if values is None:
        return RewardCall(failure=f"returned {shown(returned)}; {expected}")
    if len(values) != count:
        return RewardCall(failure=f"returned {len(values)} values for {count} completions; {expected}")
    numbers, problems = [], {}
    for index, value in enumerate(values):
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
