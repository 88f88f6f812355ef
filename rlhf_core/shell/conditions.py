"""Conditions of shell scripts, as far as their outcome is known without running anything. Pure."""

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rlhf_core.shell.values import calculated

_MAX_NESTED = 50

Outcome = bool | None
"""True or false; None if only a shell would know."""


class Ended(NamedTuple):
    """The way in which commands end."""

    sure: Outcome = None
    likely: Outcome = True
    """The same if commands other than tests succeed, as they usually do."""

    def then(self, joint: str, other: "Ended") -> "Ended":
        """The way of both, joined by ``&&`` or ``||``."""
        join = both if joint == "&&" else either
        return Ended(join(self.sure, other.sure), join(self.likely, other.likely))


@dataclass(frozen=True)
class ConditionWord:
    """Word of a condition."""

    text: str
    is_known: bool = True
    is_quoted: bool = False
    """True for a word in quotes, which is neither an operator nor a pattern."""


def both(one: Outcome, other: Outcome) -> Outcome:
    """One and the other."""
    return False if False in (one, other) else None if None in (one, other) else True


def either(one: Outcome, other: Outcome) -> Outcome:
    """One or the other."""
    return True if True in (one, other) else None if None in (one, other) else False


def opposite(outcome: Outcome) -> Outcome:
    """The outcome of ``!``."""
    return None if outcome is None else not outcome


def outcome_of_test(words: Sequence[ConditionWord]) -> Outcome:
    """Outcome of ``[ ... ]``, ``[[ ... ]]`` or ``test ...``, given the words between the brackets."""
    if sum(word.text in ("(", "!") for word in words) > _MAX_NESTED:
        return None
    return _Test([*words]).outcome()


def outcome_of_calculation(expression: str) -> Outcome:
    """Outcome of ``((...))``, with the numbers of variables in their place."""
    found: Outcome = False
    for part in expression.split("||"):
        met: Outcome = True
        for comparison in part.split("&&"):
            met = both(met, _compared(comparison))
        found = either(found, met)
    return found


def _compared(text: str) -> Outcome:
    sides = re.fullmatch(r"([^<>=!]+)(==|!=|<=|>=|<|>)([^<>=!]+)", text)
    if not sides:
        value = calculated(text)
        return None if value is None else value != 0
    left, right = calculated(sides[1]), calculated(sides[3])
    return None if left is None or right is None else _NUMBERS[sides[2]](left, right)


_NUMBERS = {
    "==": int.__eq__, "!=": int.__ne__, "<": int.__lt__, "<=": int.__le__, ">": int.__gt__, ">=": int.__ge__,
    "-eq": int.__eq__, "-ne": int.__ne__, "-lt": int.__lt__, "-le": int.__le__, "-gt": int.__gt__, "-ge": int.__ge__,
}  # fmt: skip
_EQUAL = {"=": True, "==": True, "!=": False}


@dataclass
class _Test:
    words: list[ConditionWord]
    at: int = 0

    def outcome(self) -> Outcome:
        if not self.words:
            return False
        found = self._either()
        return found if self.at >= len(self.words) else None

    def _next(self) -> str:
        """The next word if it may be an operator; empty otherwise."""
        word = self.words[self.at] if self.at < len(self.words) else ConditionWord("")
        return word.text if word.is_known and not word.is_quoted else ""

    def _either(self) -> Outcome:
        found = self._both()
        while self._next() in ("||", "-o"):
            self.at += 1
            found = either(found, self._both())
        return found

    def _both(self) -> Outcome:
        found = self._single()
        while self._next() in ("&&", "-a"):
            self.at += 1
            found = both(found, self._single())
        return found

    def _single(self) -> Outcome:
        if self._next() == "!":
            self.at += 1
            return opposite(self._single())
        if self._next() == "(":
            self.at += 1
            found = self._either()
            self.at += 1
            return found
        rest = self.words[self.at :]
        if len(rest) >= 3 and not rest[1].is_quoted and (rest[1].text in _EQUAL or rest[1].text in _NUMBERS):
            self.at += 3
            return _related(rest[0], rest[1].text, rest[2])
        if len(rest) >= 2 and re.fullmatch(r"-[a-zA-Z]", self._next()) and rest[1].text not in ("&&", "||"):
            self.at += 2
            if rest[0].text not in ("-z", "-n") or not rest[1].is_known:
                return None
            return (rest[1].text == "") == (rest[0].text == "-z")
        self.at += 1
        return (rest[0].text != "" if rest[0].is_known else None) if rest else None


def _related(left: ConditionWord, sign: str, right: ConditionWord) -> Outcome:
    if not left.is_known or not right.is_known:
        return None
    if sign in _EQUAL:
        is_pattern = not right.is_quoted and re.search(r"[*?\[]", right.text)
        equal = fnmatch.fnmatchcase(left.text, right.text) if is_pattern else left.text == right.text
        return equal == _EQUAL[sign]
    numbers = [calculated(side.text) for side in (left, right)]
    return _NUMBERS[sign](*numbers) if None not in numbers else None  # type: ignore[arg-type]
