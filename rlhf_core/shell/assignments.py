"""Assignments of a shell script, in branches as well, where their values are known only for a while. Pure."""

import posixpath
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from rlhf_core.shell.conditions import Outcome, both
from rlhf_core.shell.lexer import ShellToken
from rlhf_core.shell.values import ShellValue, distinct
from rlhf_core.shell.variables import MAX_VALUE, ShellVariables

NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_MAX_EXPORTED = 1000
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?=)(.*)", re.ASCII | re.DOTALL)
DECLARING = frozenset(["export", "readonly", "declare", "typeset", "local"])


@dataclass(eq=False)
class Part:
    """Commands that all run or all do not: a branch, a loop, the right side of ``&&``, the body of a function."""

    outer: Outcome = True
    """State of the place where it begins."""
    runs: Outcome = True
    """True if it runs whenever that place does."""
    is_loop: bool = False
    is_left: bool = False
    """True for a loop with a ``break`` or ``exit`` that may have run."""
    assigned: dict[str, int] = field(default_factory=dict)
    """Lines in which it sets variables, if it may or may not run."""

    @property
    def state(self) -> Outcome:
        """True if its commands run for sure, False if never, None if only a shell would know."""
        return both(self.outer, self.runs)


@dataclass
class Assignments:
    """Variables of a shell at a place of its script."""

    variables: ShellVariables
    exported: set[str] = field(default_factory=set, init=False)
    parts: list[Part] = field(default_factory=lambda: [Part()], init=False)
    """Parts around the place, from the outermost of its function, subshell or file."""
    hidden: dict[str, ShellValue | None] = field(default_factory=dict, init=False)
    """Values that the local variables of the function that is followed have outside of it; None for unknown ones."""
    line: int = field(default=0, init=False)
    """Line of the call, while a function of another file, or a text, is followed."""

    @property
    def state(self) -> Outcome:
        """State of the innermost part."""
        return self.parts[-1].state

    @contextmanager
    def part(self, runs: Outcome, *, is_loop: bool = False) -> Iterator[Part]:
        """Follow a part that runs if the place does and with this outcome, and forget what it may have set."""
        part = Part(self.state, runs, is_loop)
        self.parts.append(part)
        yield part
        self.parts.pop()
        self._leave(part)

    @contextmanager
    def body(self) -> Iterator[Part]:
        """Follow a function, subshell or file, whose commands cannot leave the loops around it."""
        outer, body = self.parts, Part(self.state)
        self.parts = [body]
        yield body
        self.parts = outer
        self._leave(body)

    def _leave(self, part: Part) -> None:
        for name, line in part.assigned.items():
            if part.runs is None:
                self.doubt(name, line)
            elif self.state is None:
                self.parts[-1].assigned[name] = line

    def doubt(self, name: str, line: int) -> None:
        """Forget the value of a variable that a part sets which may or may not have run."""
        text = f"${name} (assigned in a branch, line {line})"
        self.variables.known[name] = ShellValue(f"${name}", (text,))
        if self.state is None:
            self.parts[-1].assigned[name] = line

    def assign(self, name: str, value: ShellValue, line: int, *, adds: bool = False) -> None:
        """Set a variable; if set in a branch that may not run, its value is unknown after the branch."""
        if self.state is False:
            return
        if adds and name in self.variables.known:
            value = _sum(self.variables.known[name], value)
        self.variables.known[name] = value
        if self.state is None:
            self.parts[-1].assigned[name] = self.line or line

    def folder(self) -> str:
        found = self.variables.known.get("PWD")
        return found.text if found else ""

    def change_folder(self, words: list[ShellValue]) -> None:
        before = self.variables.known.pop("PWD", None)
        if before and len(words) > 1 and not words[1].unread and self.state is True:
            path = posixpath.normpath(posixpath.join(before.text, words[1].text))
            self.variables.known["PWD"] = ShellValue(path)

    def assignment(self, token: ShellToken) -> tuple[str, ShellValue, bool] | None:
        first = token.pieces[0] if token.pieces else None
        if first is None or first.kind != "text" or first.quoted:
            return None
        found = _ASSIGNED.fullmatch(first.text)
        if not found:
            return None
        if found[2]:  # one element of an array
            return found[1], ShellValue(f"${found[1]}", (f"${found[1]}",)), False
        rest = (replace(first, text=found[4], source=found[4]), *token.pieces[1:])
        return found[1], self.variables.assigned(rest), found[3] == "+="

    def unset(self, tokens: list[ShellToken]) -> None:
        if any(token.plain == "-f" for token in tokens):
            return  # functions
        for token in tokens[1:]:
            self.assign(token.plain, ShellValue(""), token.line)
            if self.state is True:
                self.exported.discard(token.plain)

    def declare(self, tokens: list[ShellToken]) -> None:
        exports = tokens[0].plain == "export" or any(token.plain == "-x" for token in tokens)
        if tokens[0].plain == "export" and any(token.plain == "-n" for token in tokens):
            self.exported -= {token.plain for token in tokens}
            return
        is_array = any(re.fullmatch(r"-\w*a\w*", token.plain) for token in tokens)
        for token in tokens[1:]:
            found = self.assignment(token)
            name = found[0] if found else token.plain
            if tokens[0].plain == "local" and NAME.fullmatch(name):
                self.hidden.setdefault(name, self.variables.known.get(name))
            if found:
                self.assign(found[0], found[1], token.line, adds=found[2])
            if is_array and not found and NAME.fullmatch(name):
                self.assign(name, ShellValue("", items=()), token.line)
            if exports and NAME.fullmatch(name) and len(self.exported) < _MAX_EXPORTED:
                self.exported.add(name)


def _sum(one: ShellValue, other: ShellValue) -> ShellValue:
    """A value with another one added by ``+=``."""
    if one.items is not None:
        items = (*one.items, *(other.items if other.items is not None else (other,)))
        return ShellValue(items[0].text, items[0].unread, items) if items else one
    return ShellValue((one.text + other.text)[:MAX_VALUE], distinct([one, other]))
