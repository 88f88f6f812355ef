"""Values of shell variables and commands, with the parts of them that only a shell knows. Pure."""

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

_MAX_UNREAD = 100


@dataclass(frozen=True)
class ShellValue:
    """Value of a variable or a word; unknown parts of it stay as written."""

    text: str
    unread: tuple[str, ...] = ()
    items: tuple["ShellValue", ...] | None = None
    """Elements of an array; the text is then the first of them."""

    @property
    def is_whole(self) -> bool:
        """True if it is one word in a shell as well: an unknown expansion alone may become any number of them."""
        return self.text not in self.unread


@dataclass(frozen=True)
class ShellCommand:
    """A simple command of a script."""

    argv: tuple[str, ...]
    """Words with known variables expanded; other expansions stay as written."""
    variables: Mapping[str, str]
    """Variables that the script sets for it: exported earlier, or assigned before the command."""
    line: int
    """Number of its first line, from 1."""
    in_background: bool
    is_conditional: bool
    """True in a branch or a loop, after ``||``, or after a test and ``&&``: it may or may not run."""
    unread: tuple[str, ...]
    """Expansions in its words and variables that stay as written, for instance ``$(hostname)``."""
    is_known: bool
    """True if none of them is in its words."""
    folder: str
    """Folder that it starts in; empty if it is unknown."""
    subshells: tuple[int, ...] = ()
    """Subshells around it, from the outermost; what it sets up ends with them."""


def split(value: ShellValue) -> list[str]:
    """Fields of a value; expansions that stay as written are not split."""
    text = value.text
    kept = {f"\ue000{number}\ue001": name for number, name in enumerate(value.unread) if name in text}
    for mark, name in kept.items():
        text = text.replace(name, mark)
    fields = re.split(r"[ \t\n]+", text)
    return [re.sub("\ue000\\d+\ue001", lambda mark: kept.get(mark[0], mark[0]), field) for field in fields]


def distinct(values: Iterable[ShellValue]) -> tuple[str, ...]:
    """Unread parts of values, once each: they would double with every assignment that uses a variable twice."""
    return tuple(dict.fromkeys(name for value in values for name in value.unread))[:_MAX_UNREAD]


def trimmed(text: str, mark: str, pattern: str) -> str:
    """``${X#PATTERN}`` and the like: a value without the shortest or longest prefix or suffix that matches."""
    at_start = mark.startswith("#")
    lengths = range(len(text) + 1) if len(mark) == 1 else range(len(text), -1, -1)
    for length in lengths if len(text) <= 1000 else ():
        part = text[:length] if at_start else text[len(text) - length :]
        if fnmatch.fnmatchcase(part, pattern):
            return text[length:] if at_start else text[: len(text) - length]
    return text


_OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculated(expression: str) -> int | None:
    """Value of an integer expression; None for anything else."""
    if len(expression) > 200 or not re.fullmatch(r"[\d\s()+*/%-]+", expression, re.ASCII):
        return None
    try:
        return _evaluated(ast.parse(expression.strip().replace("/", "//"), mode="eval").body)
    except (ArithmeticError, SyntaxError, ValueError, RecursionError):
        return None


def _evaluated(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value < 10**12:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        found = _OPERATIONS[type(node.op)](_evaluated(node.left), _evaluated(node.right))
        if 0 <= found < 10**15:  # shells and Python divide negative numbers differently
            return found
    raise ValueError("no number from 0")
