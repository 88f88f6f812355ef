"""What a completion is worth: reward functions, and how they are loaded and called. Imports no torch.

A reward function is called as ``function(prompts=, completions=, answer=, **columns)`` with one list entry per
completion and returns one finite number per completion (the convention of TRL). ``answer`` is always the reference
answer of the row; ``columns`` are the columns of the data under their own names. It must take ``**columns`` for those
it does not use.
"""

import importlib
import logging
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from rlhf_core.errors import BadConfig, RewardFailed
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
    """Whether two final answers are the same number. Pure, so that repeated answers cost nothing."""
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


def load_rewards(paths: Sequence[str]) -> dict[str, RewardFunction]:
    """Import reward functions under the names that their metrics have: the function's, or the whole path where two
    share it."""
    repeated = Counter(path.partition(":")[2] for path in paths)
    return {
        (path if repeated[name] > 1 else name): load_reward(path)
        for path, name in ((p, p.partition(":")[2]) for p in paths)
    }


def score(
    functions: Mapping[str, RewardFunction],
    weights: Sequence[float],
    rows: Sequence[Row],
    completions: Sequence[str],
    beat: Callable[[], None],
) -> tuple[list[float], dict[str, list[float]]]:
    """Reward of each completion.

    Args:
        functions: by name (:func:`load_rewards`).
        weights: one per function in the same order; empty for 1 each.
        rows: the row of each completion (a row comes once per sample).
        completions: texts, as many.
        beat: called before and after each function.

    Returns:
        The weighted sum per completion, and the unweighted rewards per function.

    Raises:
        RewardFailed: a function raised, or returned something else than one finite number per completion.
    """
    arguments = _arguments(rows, completions)
    by_function: dict[str, list[float]] = {}
    for name, function in functions.items():
        beat()
        try:
            returned = function(**arguments)
        except Exception as error:  # user code may raise anything; the run must say whose code it was
            raise RewardFailed(f"reward function {name} raised {type(error).__name__}: {error}") from error
        by_function[name] = _checked(name, returned, completions)
    beat()
    factors = list(weights) or [1.0] * len(by_function)
    total = [
        sum(factor * value for factor, value in zip(factors, values, strict=True))
        for values in zip(*by_function.values(), strict=True)
    ]
    return total, by_function


def _arguments(rows: Sequence[Row], completions: Sequence[str]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for row in rows for name in row.columns)
    arguments: dict[str, list[Any]] = {name: [row.columns.get(name) for row in rows] for name in names}
    arguments["prompts"] = [row.prompt for row in rows]
    arguments["completions"] = list(completions)
    arguments["answer"] = [row.answer for row in rows]
    return arguments


def _checked(name: str, returned: object, completions: Sequence[str]) -> list[float]:
    """One finite float per completion, or an error that says what came instead."""
    try:
        values = list(returned)  # type: ignore[call-overload]
    except TypeError:
        raise RewardFailed(
            f"reward function {name} returned {_shown(returned)}; expected a list of {len(completions)} numbers"
        ) from None
    if len(values) != len(completions):
        raise RewardFailed(f"reward function {name} returned {len(values)} values for {len(completions)} completions")
    checked = []
    for index, value in enumerate(values):
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise RewardFailed(
                f"reward function {name} returned {_shown(value)} for completion {index} "
                f"({_shown(completions[index])}); expected a finite number"
            )
        checked.append(number)
    return checked


def _shown(value: object, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
