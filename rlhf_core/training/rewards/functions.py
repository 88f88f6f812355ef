"""Worth of completions: reward functions, and how they are loaded and called. Imports no torch.

A reward function is called as ``function(prompts=, completions=, answer=, **columns)`` with one list entry per
completion and returns one finite number per completion (the convention of TRL). ``answer`` is always the reference
answer of the row; ``columns`` are the columns of the data under their own names. It must take ``**columns`` for those
it does not use.
"""

import importlib
import logging
import math
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import BadConfig, RewardFailed

if TYPE_CHECKING:  # the process that reward functions run in starts in a tenth of the time without it
    from rlhf_core.training.types import Row

RewardFunction = Callable[..., Sequence[float]]

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)", re.ASCII)
_LONGEST_ANSWER = 64
"""Characters. A longer answer is no number that a grade-school problem has."""
# What the parser may see: sums, products, fractions and percentages. Powers and factorials could take for ever and
# cannot be interrupted, because Python computes a big integer without looking at signals.
_HARMLESS = re.compile(r"(?:[\d\s.,+\-*/()%$]|\\[dt]?frac|\\cdot|\\times|[{}])*", re.ASCII)


# ---------------------------------------------------------------------------------------------------------------------
# The functions


def exact_match(
    *, prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **columns: Any
) -> list[float]:
    """1 where the completion is the reference answer, white space around both left aside; 0 otherwise."""
    return [float(found.strip() == expected.strip()) for found, expected in zip(completions, answer, strict=True)]


def gsm8k_answer(
    *, prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **columns: Any
) -> list[float]:
    """1 where the completion's final number equals the reference answer's; 0 otherwise (Cobbe et al. 2021, arXiv
    2110.14168).

    The reference is what stands after ``####`` (the whole answer where there is no ``####``). The completion's answer
    is what stands after its last ``####``, up to the first word that is no mathematics, or else its last number. They
    are compared as numbers by math-verify, so ``72``, ``$72.00`` and ``\\frac{144}{2}`` are the same. Whatever the
    completion holds, a call ends quickly: anything but a short sum, product, fraction or percentage is wrong without
    being computed.
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
    """Without thousands separators, dollar signs, a plus in front, and the dot of a sentence."""
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
    """True if two final answers are the same number. Pure, so that repeated answers cost nothing."""
    if not found or not _is_harmless(found):
        return False
    if found == expected:
        return True
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about the missing time limit, see below
    from math_verify import parse, verify

    # Its own time limit is an alarm signal: it works in the main thread only and disturbs other users of the alarm.
    # What is harmless ends by itself.
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


def reward_names(paths: Sequence[str]) -> dict[str, str]:
    """Names that the metrics of reward functions have, to their paths: the function's name, or the whole path where two
    share it."""
    repeated = Counter(path.partition(":")[2] for path in paths)
    return {(path if repeated[name] > 1 else name): path for path, name in ((p, p.partition(":")[2]) for p in paths)}


@dataclass(frozen=True)
class RewardCall:
    """The answer of one reward function to one call."""

    values: list[float] = field(default_factory=list)
    """One per completion; 0 where :attr:`problems` has one."""
    problems: dict[int, str] = field(default_factory=dict)
    """Answer that came instead of a number for a completion, by its index: ``returned nan``."""
    failure: str = ""
    """Reason why there is no answer at all, as the end of a sentence (``raised KeyError: 'level'``); else empty."""
    error: Exception | None = None
    """Exception that it raised, in this process."""
    trace: str = ""
    """Stack of what it raised in a process of its own."""


def call_reward(function: RewardFunction, arguments: Mapping[str, Sequence[Any]]) -> RewardCall:
    """Call a reward function in this process. Whatever it raises is part of the answer.

    Args:
        arguments: of :func:`reward_arguments`.
    """
    try:
        returned = function(**arguments)
    except Exception as error:  # noqa: BLE001 - user code may raise anything; the run must say whose code it was
        return RewardCall(failure=_told(error), error=error)
    return _checked(returned, arguments["completions"])


def reward_arguments(rows: Sequence["Row"], completions: Sequence[str]) -> dict[str, list[Any]]:
    """Arguments of a reward function for these completions, each a list of their length.

    Args:
        rows: the row of each completion (a row comes once per sample).
        completions: texts, as many.
    """
    names = dict.fromkeys(name for row in rows for name in row.columns)
    arguments: dict[str, list[Any]] = {name: [row.columns.get(name) for row in rows] for name in names}
    arguments["prompts"] = [row.prompt for row in rows]
    arguments["completions"] = list(completions)
    arguments["answer"] = [row.answer for row in rows]
    return arguments


def rewards_of(name: str, function: RewardFunction, rows: Sequence["Row"], completions: Sequence[str]) -> list[float]:
    """Rewards by one function, called in this process without a time limit.

    Raises:
        RewardFailed: it raised, or returned something else than one finite number per completion.
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


def _told(error: BaseException) -> str:
    """An exception with the line that raised it, as far as it is not ours."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"raised {type(error).__name__}: {error}{place}"


def _checked(returned: object, completions: Sequence[str]) -> RewardCall:
    """One finite float per completion, or what came instead."""
    expected = f"expected a list of {len(completions)} numbers"
    try:
        values = list(returned)  # type: ignore[call-overload]
    except TypeError:
        return RewardCall(failure=f"returned {shown(returned)}; {expected}")
    if len(values) != len(completions):
        return RewardCall(failure=f"returned {len(values)} values for {len(completions)} completions; {expected}")
    numbers, problems = [], {}
    for index, value in enumerate(values):
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            problems[index] = f"returned {shown(value)}"
            number = 0.0
        numbers.append(number)
    return RewardCall(numbers, problems)


def shown(value: object, limit: int = 80) -> str:
    """A value as a message shows it."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
