"""Branches, loops and lists of a shell script, and whether their commands run. Pure."""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlhf_core.shell.conditions import Outcome, both, either, opposite
from rlhf_core.shell.lexer import ShellToken

OPENING = frozenset(["if", "while", "until", "for", "case", "select", "{"])
CLOSING = frozenset(["fi", "done", "esac", "}"])
PREFIXES = frozenset(["then", "do", "else", "elif", "!", "time"])


@dataclass
class CommandList:
    """Commands joined by ``&&`` and ``||``."""

    guard: Outcome = True
    """Outcome that decides whether the next command runs."""
    sure: Outcome = None
    """Outcome of the list, if it is known."""
    likely: Outcome = True
    """The same if commands other than tests succeed, as they usually do."""
    joint: str = ""
    is_negated: bool = False

    def negate(self) -> None:
        """Turn the outcome of the next command around."""
        self.is_negated = not self.is_negated

    def done(self, outcome: Outcome, *, likely: bool | None = None) -> None:
        """Add the outcome of a command.

        Args:
            likely: The likely outcome of a command that is no test.
        """
        expected = outcome if likely is None else likely
        if self.is_negated:
            outcome, expected, self.is_negated = opposite(outcome), None if likely else opposite(expected), False
        if self.joint == "&&":
            self.sure, self.likely = both(self.sure, outcome), both(self.likely, expected)
        elif self.joint == "||":
            self.sure, self.likely = either(self.sure, outcome), either(self.likely, expected)
        else:
            self.sure, self.likely = outcome, expected

    def end(self, operator: str) -> None:
        """Go on after an operator."""
        if operator == "&&":
            self.joint, self.guard = operator, self.likely
        elif operator == "||":
            self.joint, self.guard = operator, opposite(self.sure)
        elif operator not in ("|", "|&"):
            self.joint, self.guard = "", True


@dataclass
class Block:
    """A branch, a loop or a group that is open."""

    kind: str
    outer: Outcome
    """State of the place where it begins."""
    start: int
    """Index of its first token."""
    runs: Outcome = True
    """State of its current part; a condition runs."""
    taken: Outcome = False
    """True if an earlier part of it ran."""
    word: str | None = None
    """Word of a ``case``; None if it is unknown."""
    at_pattern: bool = False
    assigned: dict[str, int] = field(default_factory=dict)
    """Lines in which the current part sets variables, if it may or may not run."""
    in_condition: bool = False
    """True in the condition of a loop."""
    may_change: bool = False
    """True if that condition has variables."""
    is_left: bool = False
    rounds: int = 0

    def go_on(self, keyword: str, outcome: Outcome) -> None:
        """Enter the part after ``then``, ``elif``, ``else`` or ``do``.

        Args:
            outcome: That of the condition.
        """
        if keyword == "then":
            self.runs = both(opposite(self.taken), outcome)
            self.taken = either(self.taken, self.runs)
        elif keyword in ("else", "elif"):
            self.runs = opposite(self.taken)
        self.in_condition = False
        if keyword == "do" and self.kind in ("while", "until"):
            self.runs = opposite(outcome) if self.kind == "until" else outcome

    def enter(self, patterns: Sequence[tuple[str, bool]]) -> None:
        """Enter the part of a ``case`` with these patterns.

        Args:
            patterns: Their texts, and whether they are known.
        """
        found: Outcome = False
        for text, is_known in patterns:
            known = None if self.word is None or not is_known else fnmatch.fnmatchcase(self.word, text)
            found = either(found, True if text == "*" else known)
        self.runs = both(opposite(self.taken), found)
        self.taken = either(self.taken, self.runs)
        self.at_pattern = False

    @property
    def is_again(self) -> bool:
        """True for a loop that ran and whose condition decides whether it runs again."""
        is_loop = self.kind in ("while", "until")
        return is_loop and self.runs is True and self.may_change and not self.is_left

    def begin_again(self) -> None:
        """Evaluate the condition of a loop once more."""
        self.rounds += 1
        self.runs = self.in_condition = True


def end_of_group(tokens: Sequence[ShellToken], at: int) -> int | None:
    """Index of the bracket that closes the group that begins here, ``{ ... }`` or ``( ... )``; None without one."""
    if at >= len(tokens):
        return None
    opening = tokens[at].plain or tokens[at].operator
    closing = {"{": "}", "(": ")"}.get(opening)
    depth, is_first = 0, True
    for index in range(at, len(tokens) if closing else at):
        token = tokens[index]
        mark = (token.plain if opening == "{" and is_first else "") or (token.operator if opening == "(" else "")
        depth += (mark == opening) - (mark == closing)
        if depth == 0:
            return index
        is_first = bool(token.operator) or token.plain in OPENING | PREFIXES | CLOSING
    return None


def is_pattern_of(words: Sequence[ShellToken]) -> bool:
    """True within ``[[ ... ]]``, where operators of the shell have another meaning."""
    first = next((word.plain for word in words if word.plain not in PREFIXES | OPENING), "")
    return first == "[[" and words[-1].plain != "]]"
