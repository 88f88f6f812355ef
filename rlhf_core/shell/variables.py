"""Variables and arguments of a shell script, and the expansion of its words. Pure."""

import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from rlhf_core.shell.lexer import REDIRECTIONS, ShellPiece, ShellToken
from rlhf_core.shell.values import ShellValue, calculated, distinct, split, trimmed

MAX_VALUE = 1 << 16
"""Longest value of a variable: assignments that double it would exhaust the memory."""
_MAX_FILLED = 8 << 20
_MAX_ITEMS = 1000


@dataclass
class ShellVariables:
    """Variables as far as they are known."""

    known: dict[str, ShellValue]
    arguments: Sequence[ShellValue] = ()
    budget: int = _MAX_FILLED
    """Number of characters that may still be expanded."""
    absent: dict[str, None] = field(default_factory=dict)
    """Arguments of the script that it uses without a default, but that are not given."""
    tested: dict[str, None] = field(default_factory=dict)
    """Those of which it only asks whether they are given."""
    in_test: bool = False
    in_function: bool = False

    def set_arguments(self, arguments: Sequence[ShellValue]) -> None:
        """Set ``$1``, ``$@`` and the like."""
        self.arguments = arguments
        whole = ShellValue(" ".join(argument.text for argument in arguments), distinct(arguments))
        self.known |= {"@": whole, "*": whole, "#": ShellValue(str(len(arguments)))}
        self.known |= dict.fromkeys("123456789", ShellValue(""))
        self.known |= {str(number): value for number, value in enumerate(arguments[:9], 1)}

    def words(self, pieces: Iterable[ShellPiece]) -> list[ShellValue]:
        """Words of a token: none for an empty variable, several for an unquoted one with spaces, or for an array."""
        pieces = [*self._filled_in(pieces)]
        spread = [piece for piece in pieces if piece.text or piece.kind != "text"]
        if len(spread) == 1 and (items := self._all_items(spread[0])) is not None:
            self.budget -= sum(len(item.text) for item in items)
            return items if self.budget >= 0 else []
        fields: list[str] = []
        values: list[ShellValue] = []
        current, begun = "", False
        for number, piece in enumerate(pieces):
            value = self._value(piece)
            if number == 0 and piece.kind == "text" and not piece.quoted and re.match(r"~(/|$)", value.text):
                home = self.known.get("HOME", ShellValue("~", ("~",)))
                value = ShellValue(home.text + value.text[1:], home.unread)
            values.append(value)
            first, *others = [value.text] if piece.quoted else split(value)
            if others:
                if begun or first:
                    fields.append(current + first)
                fields += others[:-1]
                current, begun = others[-1], bool(others[-1])
                continue
            current += first
            begun = begun or bool(first) or piece.quoted or bool(value.unread)
        fields += [current] if begun else []
        return [ShellValue(text[:MAX_VALUE], distinct(values)) for text in fields]

    def _filled_in(self, pieces: Iterable[ShellPiece]) -> Iterator[ShellPiece]:
        """Parts of a word, with the word of ``${X:-word}`` and the like in place of the variable where it applies."""
        for piece in pieces:
            found = self._element(piece) if piece.operator in ("-", "=", "+") else None
            # A default applies if the script sets no value: the user's environment is not read.
            is_empty = found is None or not found.text
            if piece.operator == ("-" if is_empty else "+"):
                yield from self._filled_in(piece.default)
                continue
            if piece.operator == "=" and is_empty and piece.index is None:
                self.known[piece.text] = self.assigned(piece.default)
            yield piece

    def _all_items(self, piece: ShellPiece) -> list[ShellValue] | None:
        """Words of ``$@`` or ``${A[@]}``, one per argument or element; None for anything else."""
        if piece.kind != "variable" or piece.operator.startswith(("#", "%")):
            return None
        if piece.text == "@" and not piece.operator:
            return [*self.arguments]
        found = self.known.get(piece.text)
        if piece.index != "@" or found is None or found.items is None:
            return None
        if piece.quoted:
            return [*found.items]
        return [ShellValue(part, item.unread) for item in found.items for part in split(item) if part]

    def assigned(self, pieces: Iterable[ShellPiece]) -> ShellValue:
        """Value of an assignment, which is not split."""
        pieces = [*self._filled_in(pieces)]
        if [piece.kind for piece in pieces if piece.text or piece.kind != "text"] == ["array"]:
            return self._array(pieces[-1])
        values = [self._value(piece) for piece in pieces]
        text = "".join(value.text for value in values)
        if len(text) > MAX_VALUE:
            return ShellValue("", (f"a value of {len(text)} characters",))
        return ShellValue(text, distinct(values))

    def _array(self, piece: ShellPiece) -> ShellValue:
        tokens = [token for token in piece.tokens if token.operator != "\n"]
        if any(token.operator for token in tokens):
            return ShellValue(piece.source, (piece.source,))
        items = [word for token in tokens for word in self.words(token.pieces)]
        if len(items) > _MAX_ITEMS or any(re.match(r"\[.*\]=", item.text) for item in items):
            return ShellValue(piece.source, (piece.source,))
        first = items[0] if items else ShellValue("")
        return ShellValue(first.text, first.unread, tuple(items))

    def _value(self, piece: ShellPiece) -> ShellValue:
        if piece.kind == "text":
            return ShellValue(piece.text)
        unread = ShellValue(piece.source, (piece.source,))
        if piece.kind == "variable":
            found = self._element(piece)
            is_absent = piece.text.isdigit() and int(piece.text) > len(self.arguments)
            if is_absent and not piece.operator and not self.in_function:
                (self.tested if self.in_test else self.absent)[f"${piece.text}"] = None
            self.budget -= len(found.text) if found else 0
            if self.budget < 0:
                return unread
            return (self._trimmed(piece, found) if piece.operator.startswith(("#", "%")) else found) or unread
        if piece.kind == "length":
            found = self.known.get(piece.text)
            items = found.items if found and piece.index in ("@", "*") else None
            return ShellValue(str(len(items))) if items is not None and _are_whole(items) else unread
        if piece.kind == "command":
            return self._output(piece.tokens) or unread
        if piece.kind == "arithmetic":
            found_number = self.number(piece.text)
            return unread if found_number is None else ShellValue(str(found_number))
        return unread

    def _output(self, tokens: Iterable[ShellToken]) -> ShellValue | None:
        """Output of the commands with which scripts find folders and calculate; None for any others."""
        commands, words, rest = [list[str]()], list[ShellValue](), iter(tokens)
        for token in rest:
            if token.operator in REDIRECTIONS:
                next(rest, None)
            elif token.operator in ("&&", ";"):
                commands.append([])
            elif token.operator:
                return None
            else:
                words = self.words(token.pieces)
                commands[-1] += [word.text for word in words if word.text != "--"]
            if any(word.unread for word in words):
                return None
        match commands:
            case [[]]:  # a comment between the lines of a long command
                return ShellValue("")
            case [["pwd", *_]]:
                return self.known.get("PWD")
            case [["cd", path], ["pwd", *_]] | [["readlink", "-f", path]] | [["realpath", path]] if "PWD" in self.known:
                return ShellValue(posixpath.normpath(posixpath.join(self.known["PWD"].text, path)))
            case [["dirname", path]]:
                return ShellValue(str(PurePosixPath(path).parent))
            case [["expr", *terms]] if (number := self.number(" ".join(terms))) is not None:
                return ShellValue(str(number))
        return None

    def _trimmed(self, piece: ShellPiece, found: ShellValue | None) -> ShellValue | None:
        """Value of ``${X#PATTERN}`` and the like; None if it is unknown."""
        pattern = self.assigned(piece.default)
        if found is None or found.unread or pattern.unread:
            return None
        return ShellValue(trimmed(found.text, piece.operator, pattern.text))

    def _element(self, piece: ShellPiece) -> ShellValue | None:
        """Value of a variable, or of the element of an array; None if it is unknown."""
        found = self.known.get(piece.text)
        if found is None or piece.index is None:
            return found
        if found.items is None:
            return found if piece.index in ("0", "@", "*") and not found.unread else None
        if piece.index in ("@", "*"):
            text = " ".join(item.text for item in found.items)
            return ShellValue(text, distinct(found.items)) if len(text) <= MAX_VALUE else None
        index = self.number(piece.index)
        if index is None or not _are_whole(found.items[: index + 1]):
            return None
        return found.items[index] if index < len(found.items) else ShellValue("")

    def number(self, expression: str) -> int | None:
        """Value of an integer expression with variables; None if it is unknown."""
        return calculated(self.filled(expression))

    def filled(self, expression: str) -> str:
        """Integer expression with the numbers of variables in their place."""
        return re.sub(r"\$?\{?([A-Za-z_]\w*|(?<=\$)#|(?<=\{)#)\}?", lambda name: self._digits(name[1]), expression)

    def _digits(self, name: str) -> str:
        found = self.known[name].text if name in self.known else ""
        return found if re.fullmatch(r"\d+", found, re.ASCII) else name


def _are_whole(items: Iterable[ShellValue]) -> bool:
    return all(item.is_whole for item in items)
