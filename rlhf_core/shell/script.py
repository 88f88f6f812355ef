"""Shell scripts, parsed without a shell: their commands and variables, and what only running them would reveal. Pure.

Nothing is executed. Variables that the script assigns are expanded; everything that depends on the machine or on the
control flow of the script (command substitution, arrays, branches, its own arguments) stays as written and is reported.
"""

import ast
import operator
import posixpath
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rlhf_core.shell.lexer import ShellLexer, ShellPiece, ShellToken, UnclosedShell

MAX_CHARACTERS = 1 << 20
"""Longest script that is parsed."""
_MAX_VALUE = 1 << 16
"""Longest value of a variable: assignments that double it would exhaust the memory."""
_MAX_FILLED = 8 << 20
_MAX_EXPORTED = 1000
_MAX_UNREAD = 100
_MAX_COMMANDS = 10_000

_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?=)(.*)", re.ASCII | re.DOTALL)
_REDIRECTIONS = frozenset(["&>>", "&>", ">>", "<<<", ">&", "<&", ">|", ">", "<"])
_SBATCH = re.compile(r"^[ \t]*#SBATCH[ \t]+(.*)$", re.MULTILINE)
_OPENING = frozenset(["if", "while", "until", "for", "case", "select", "{"])
_CLOSING = frozenset(["fi", "done", "esac", "}"])
_PREFIXES = frozenset(["if", "while", "until", "then", "do", "else", "elif", "!", "{", "time"])
_DECLARING = frozenset(["export", "readonly", "declare", "typeset", "local"])


@dataclass(frozen=True)
class ShellCommand:
    """A simple command of a script."""

    argv: tuple[str, ...]
    """Words with known variables expanded; other expansions stay as written."""
    variables: Mapping[str, str]
    """Variables that the script sets for it: exported earlier, or assigned before the command."""
    line: int
    """Number of its first line, from 1."""
    in_background: bool = False
    is_conditional: bool = False
    """True in a branch, a loop or a function, after ``||``, or after a test and ``&&``: it may or may not run."""
    unread: tuple[str, ...] = ()
    """Expansions in its words and variables that stay as written, for instance ``$(hostname)``."""


@dataclass(frozen=True)
class ShellScript:
    """Content of a script, as far as it is known without running it."""

    commands: tuple[ShellCommand, ...]
    sbatch: tuple[str, ...]
    """Texts after ``#SBATCH``, without comments."""
    unread: tuple[str, ...]
    """Constructs that were not understood, each with its line."""


@dataclass(frozen=True)
class _Value:
    """Value of a variable; unknown parts of it stay as written."""

    text: str
    unread: tuple[str, ...] = ()


def _split(value: _Value) -> list[str]:
    """Fields of a value; expansions that stay as written are not split."""
    text = value.text
    kept = {f"\ue000{number}\ue001": name for number, name in enumerate(value.unread) if name in text}
    for mark, name in kept.items():
        text = text.replace(name, mark)
    fields = re.split(r"[ \t\n]+", text)
    return [re.sub("\ue000\\d+\ue001", lambda mark: kept.get(mark[0], mark[0]), field) for field in fields]


def _distinct(values: Iterable[_Value]) -> tuple[str, ...]:
    """Unread parts of values, once each: they would double with every assignment that uses a variable twice."""
    return tuple(dict.fromkeys(name for value in values for name in value.unread))[:_MAX_UNREAD]


_OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _calculated(expression: str) -> int | None:
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


@dataclass
class _Reader:
    """State of the parser: the variables so far, and whether the current position is certain to be reached."""

    known: dict[str, _Value]
    arguments: Sequence[str] = ()
    exported: set[str] = field(default_factory=set)
    budget: int = _MAX_FILLED
    """Number of characters that may still be expanded."""
    depth: int = 0
    is_guarded: bool = False
    """True if the command before decides whether the next one runs."""
    commands: list[ShellCommand] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def set_arguments(self, arguments: Sequence[str]) -> None:
        """Set ``$1``, ``$@`` and the like."""
        self.arguments = arguments
        given = {"@": " ".join(arguments), "*": " ".join(arguments), **dict.fromkeys("123456789", "")}
        given |= {str(number): value for number, value in enumerate(arguments[:9], 1)}
        self.known |= {name: _Value(value) for name, value in given.items()}

    def expand(self, pieces: Iterable[ShellPiece]) -> list[_Value]:
        """Words of a token: none for an empty variable, several for an unquoted one with spaces."""
        pieces = [*pieces]
        spread = [piece for piece in pieces if piece.text or piece.kind != "text"]
        if len(spread) == 1 and spread[0].kind == "variable" and spread[0].text == "@":
            return [_Value(argument) for argument in self.arguments]  # one word per argument
        fields: list[str] = []
        values: list[_Value] = []
        current, begun = "", False
        for number, piece in enumerate(pieces):
            value = self._value(piece)
            values.append(value)
            text = value.text
            if number == 0 and piece.kind == "text" and not piece.quoted and re.match(r"~(/|$)", text):
                home = self.known.get("HOME", _Value("~", ("~",)))
                values.append(home)
                text = home.text + text[1:]
            if self._is_split(piece):
                first, *others = _split(value)
                if others:
                    if begun or first:
                        fields.append(current + first)
                    fields += others[:-1]
                    current, begun = others[-1], bool(others[-1])
                    continue
            current += text
            begun = begun or bool(text) or piece.quoted or bool(value.unread)
        fields += [current] if begun else []
        return [_Value(text[:_MAX_VALUE], _distinct(values)) for text in fields]

    def assigned(self, pieces: Iterable[ShellPiece]) -> _Value:
        """Value of an assignment, which is not split."""
        values = [self._value(piece) for piece in pieces]
        text = "".join(value.text for value in values)
        if len(text) > _MAX_VALUE:
            return _Value("", (f"a value of {len(text)} characters",))
        return _Value(text, _distinct(values))

    def _value(self, piece: ShellPiece) -> _Value:
        if piece.kind == "text":
            return _Value(piece.text)
        if piece.kind == "variable":
            self.budget -= len(self.known[piece.text].text) if piece.text in self.known else 0
            if self.budget < 0:
                return _Value(piece.source, (piece.source,))
            # A default applies if the script sets no value: the user's environment is not read.
            if piece.default is not None and self._is_default(piece):
                return self.assigned(ShellLexer(piece.default).default(in_quotes=piece.quoted))
            if piece.text in self.known:
                return self.known[piece.text]
        if piece.kind == "arithmetic":
            filled = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda name: self._number(name[1]), piece.text)
            number = _calculated(filled.replace("\\*", "*"))
            if number is not None:
                return _Value(str(number))
        return _Value(piece.source, (piece.source,))

    def _is_default(self, piece: ShellPiece) -> bool:
        return piece.default is not None and (piece.text not in self.known or not self.known[piece.text].text)

    def _is_split(self, piece: ShellPiece) -> bool:
        """True if spaces in the value of a part separate words."""
        in_quotes = piece.quoted or (self._is_default(piece) and piece.source.endswith(('"}', "'}")))
        return piece.kind == "variable" and not in_quotes

    def _number(self, name: str) -> str:
        found = self.known[name].text if name in self.known else ""
        return found if re.fullmatch(r"\d+", found, re.ASCII) else name

    def assign(self, name: str, value: _Value, line: int, *, adds: bool = False) -> None:
        """Set a variable; if set in a branch, its value is unknown afterwards."""
        if self.depth or self.is_guarded:
            value = _Value(f"${name}", (f"${name} (assigned in a branch, line {line})",))
        elif adds and name in self.known:
            before = self.known[name]
            value = _Value((before.text + value.text)[:_MAX_VALUE], _distinct([before, value]))
        self.known[name] = value

    def here_document(self, tokens: list[ShellToken], body: ShellToken) -> None:
        """Process ``read NAME <<END``, which sets a variable; report any other here-document."""
        words = [token.plain for token in tokens]
        if words[:1] == ["read"] and _NAME.fullmatch(words[-1]):
            self.assign(words[-1], self.assigned(body.pieces), body.line)
        else:
            self.notes.append(f"here-document in line {body.line}")

    def command(self, words: Iterable[ShellToken], end: str) -> None:
        """Process the words between two separators."""
        tokens = deque(words)
        while tokens and tokens[0].plain in _PREFIXES | _CLOSING:
            token = tokens.popleft()
            if token.plain in _OPENING:
                self.notes.append(f"{token.plain} in line {token.line}")
            self.depth = max(0, self.depth + (token.plain in _OPENING) - (token.plain in _CLOSING))
        if tokens and tokens[0].plain in _OPENING:
            self.depth += 1
            self.notes.append(f"{tokens[0].plain} in line {tokens[0].line}")
            if tokens[0].plain == "for" and len(tokens) > 1:
                self.assign(tokens[1].plain, _Value(""), tokens[0].line)
            return
        assignments = list[tuple[str, _Value, bool]]()
        line = tokens[0].line if tokens else 0
        while tokens and (found := self._assignment(tokens[0])):
            assignments.append(found)
            tokens.popleft()
        if not tokens:
            for name, value, adds in assignments:
                self.assign(name, value, line, adds=adds)
            return
        if tokens[0].plain in _DECLARING:
            self._declare(list(tokens))
            return
        if tokens[0].plain == "unset":
            self._unset(list(tokens))
        if tokens[0].plain == "shift" and not self.depth:
            self.set_arguments(self.arguments[1:])
        filled = [word for token in tokens for word in self.expand(token.pieces)]
        if filled and filled[0].text == "cd":
            self._change_folder(filled)
        if len(self.commands) >= _MAX_COMMANDS:
            raise UnclosedShell(f"more than {_MAX_COMMANDS} commands")
        given = {name: self.known[name] for name in sorted(self.exported & self.known.keys())}
        given |= {name: value for name, value, _ in assignments}
        self.commands.append(
            ShellCommand(
                argv=tuple(word.text for word in filled),
                variables={name: value.text for name, value in given.items()},
                line=line,
                in_background=end == "&",
                is_conditional=self.depth > 0 or self.is_guarded,
                unread=tuple(dict.fromkeys(text for value in [*filled, *given.values()] for text in value.unread)),
            )
        )

    def _change_folder(self, words: list[_Value]) -> None:
        before = self.known.pop("PWD", None)
        if before and len(words) > 1 and not words[1].unread and not self.depth and not self.is_guarded:
            self.known["PWD"] = _Value(posixpath.normpath(posixpath.join(before.text, words[1].text)))

    def _assignment(self, token: ShellToken) -> tuple[str, _Value, bool] | None:
        first = token.pieces[0] if token.pieces else None
        if first is None or first.kind != "text" or first.quoted:
            return None
        found = _ASSIGNED.fullmatch(first.text)
        if not found:
            return None
        rest = (replace(first, text=found[3], source=found[3]), *token.pieces[1:])
        return found[1], self.assigned(rest), found[2] == "+="

    def _unset(self, tokens: list[ShellToken]) -> None:
        if any(token.plain == "-f" for token in tokens):
            return  # functions
        for token in tokens[1:]:
            self.assign(token.plain, _Value(""), token.line)
            if not self.depth and not self.is_guarded:
                self.exported.discard(token.plain)

    def _declare(self, tokens: list[ShellToken]) -> None:
        exports = tokens[0].plain == "export" or any(token.plain == "-x" for token in tokens)
        if tokens[0].plain == "export" and any(token.plain == "-n" for token in tokens):
            self.exported -= {token.plain for token in tokens}
            return
        for token in tokens[1:]:
            found = self._assignment(token)
            if found:
                self.assign(found[0], found[1], token.line)
            name = found[0] if found else token.plain
            if exports and _NAME.fullmatch(name) and len(self.exported) < _MAX_EXPORTED:
                self.exported.add(name)


def _guards(tokens: Sequence[ShellToken], end: str) -> bool:
    """True if the next command depends on the result of this one. Others than tests usually succeed."""
    is_test = bool(tokens) and (tokens[0].plain in ("[", "[[", "test") or tokens[-1].plain in ("]", "]]"))
    return end == "||" or (end == "&&" and is_test)


def read_shell(text: str, known: Mapping[str, str] | None = None, arguments: Sequence[str] = ()) -> ShellScript:
    """Parse a shell script. Never raises: constructs that are not understood are reported.

    Args:
        text: The script; one longer than ``MAX_CHARACTERS`` is not parsed at all.
        known: Variables known to have the same value on the machine that will run it, for instance HOME.
        arguments: Arguments of the script.
    """
    if len(text) > MAX_CHARACTERS:
        return ShellScript((), (), (f"the script: it has {len(text)} characters, more than {MAX_CHARACTERS}",))
    lexer = ShellLexer(text)
    reader = _Reader({name: _Value(value) for name, value in (known or {}).items()})
    reader.set_arguments(arguments)
    tokens: list[ShellToken] = []
    drops_next = False
    here: ShellToken | None = None
    try:
        for token in lexer.tokens():
            if token.operator in ("<<", "<<-"):
                here = token
            elif token.pieces:
                if not drops_next:
                    tokens.append(token)
                drops_next = False
            elif token.operator in _REDIRECTIONS:
                drops_next = True
            elif token.operator == "(" and len(tokens) == 1:
                reader.notes.append(f"function in line {token.line}")
                tokens = []
            elif token.operator:
                if here is not None:
                    reader.here_document(tokens, here)
                reader.command(tokens, token.operator)
                here = None
                if tokens or token.operator != "\n":  # a command may go on in the line after || or &&
                    reader.is_guarded = _guards(tokens, token.operator)
                tokens, drops_next = [], False
        reader.command(tokens, "")
    except UnclosedShell as error:
        reader.notes.append(f"everything from line {lexer.line}: {error}")
    sbatch = tuple(re.sub(r"\s#.*", "", found[1]).strip() for found in _SBATCH.finditer(text))
    return ShellScript(tuple(reader.commands), sbatch, tuple(reader.notes))
