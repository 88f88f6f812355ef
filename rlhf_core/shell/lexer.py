"""Words and operators of shell scripts, with what is quoted and what the shell would expand. Pure.

The grammar of tree-sitter is no substitute: version 0.25 for bash reads ``A=out/$B/$C.yaml`` as a command ``C.yaml``,
``"a$ b"`` as an expansion of ``b``, and a few more words of usual scripts as others, without an error.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

_MAX_NESTED = 20
_MAX_HERE_DOCUMENTS = 100

REDIRECTIONS = frozenset(["&>>", "&>", ">>", "<<<", ">&", "<&", ">|", ">", "<"])
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#]", re.ASCII)
_BRACED = re.compile(
    r"(?P<length>#?)(?P<name>[A-Za-z_]\w*|[0-9@*#])(?:\[(?P<index>[^\]]*)\])?(?::?(?P<operator>[-=+])|(?P<trim>##?|%%?))?",
    re.ASCII,
)
_OPERATOR = re.compile(r"&&|\|\||\|&|;;|&>>|&>|>>|<<<|<<-|<<|>&|<&|>\||[|&;><()\n]")
_SKIPPED = re.compile(r"(?:[ \t\r]|\\\r?\n|#.*)+")
_CONTINUED = re.compile(r"\\\r?\n")
_DELIMITER = re.compile(r"[ \t]*(['\"\\]?)([\w.-]+)['\"]?")
_TEXT = re.compile(r"[^\s\\'\"$`|&;<>()}]+|.", re.DOTALL)
_QUOTED_TEXT = re.compile(r"""[^'"\\$`}]+|\\\r?\n|\\.|.""", re.DOTALL)
_RAW = re.compile(r"'[^']*'")
_BACKTICKS = re.compile(r"`(?:\\.|[^\\`])*`", re.DOTALL)
_ESCAPED = re.compile(r"\$'(?:\\.|[^'\\])*'", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}


@dataclass(frozen=True)
class ShellPiece:
    """Part of a word."""

    kind: str
    """text, variable, length, arithmetic, array, command, condition or unread."""
    text: str
    """The text, name or expression; for the other kinds, their source."""
    source: str
    quoted: bool
    default: tuple["ShellPiece", ...] = ()
    """Word after the operator of a variable."""
    operator: str = ""
    """Operator of a variable in braces: ``-``, ``=`` or ``+``, without its colon; ``#``, ``##``, ``%`` or ``%%``."""
    index: str | None = None
    """Index of an array: a number, a variable, ``@`` or ``*``."""
    tokens: tuple["ShellToken", ...] = ()
    """Words of an array, or commands of ``$(...)``."""


@dataclass(frozen=True)
class ShellToken:
    line: int
    operator: str = ""
    pieces: tuple[ShellPiece, ...] = ()
    """Parts of a word, or the body of a here-document."""

    @cached_property
    def plain(self) -> str:
        """The word as written, if nothing in it is quoted or expanded; otherwise empty."""
        if any(piece.kind != "text" or piece.quoted for piece in self.pieces):
            return ""
        return "".join(piece.text for piece in self.pieces)


class UnclosedShell(Exception):
    """A quote or bracket is never closed; ends the lexing."""


@dataclass
class ShellLexer:
    """Tokens of a script."""

    text: str
    at: int = 0
    line: int = 1
    nested: int = 0
    """Brackets that are open."""
    _here_end: int = 0
    _here_documents: int = 0

    def tokens(self) -> Iterator[ShellToken]:
        """Yield words and operators.

        Raises:
            UnclosedShell: a quote or bracket is not closed; ``line`` is then that of its word.
        """
        while self.at < len(self.text):
            line = self.line
            try:
                if skipped := _SKIPPED.match(self.text, self.at):
                    self._advance(skipped.end())
                elif self.text.startswith("((", self.at) and (condition := self._condition()):
                    yield condition
                elif operator := _OPERATOR.match(self.text, self.at):
                    yield self._operator(operator[0])
                else:
                    yield self._word()
            except UnclosedShell:
                self.line = line
                raise

    def _advance(self, to: int) -> str:
        passed = self.text[self.at : to]
        self.line += passed.count("\n")
        self.at = to
        return passed

    def _condition(self) -> ShellToken | None:
        """The calculation ``((...))``; None for brackets of another kind."""
        line, end = self.line, self._closing(self.at)
        if not self.text.startswith("))", end - 2):
            return None
        source = self._advance(end)
        return ShellToken(line, pieces=(ShellPiece("condition", source[2:-2], source, quoted=True),))

    def _operator(self, text: str) -> ShellToken:
        token = ShellToken(self.line, operator=text)
        self._advance(self.at + len(text))
        if text in ("<<", "<<-"):
            return self._here_document(token)
        if text == "\n" and self._here_end > self.at:
            self._advance(self._here_end)
        return token

    def _here_document(self, token: ShellToken) -> ShellToken:
        self._here_documents += 1
        delimiter = _DELIMITER.match(self.text, self.at)
        if self._here_documents > _MAX_HERE_DOCUMENTS:
            raise UnclosedShell(f"more than {_MAX_HERE_DOCUMENTS} here-documents")
        if not delimiter:
            raise UnclosedShell("a here-document has no name that ends it")
        self.at = delimiter.end()
        start = max(self.text.find("\n", self.at) + 1, self._here_end)
        end = re.compile(rf"^\t*{re.escape(delimiter[2])}[ \t]*$", re.MULTILINE).search(self.text, start)
        if not end:
            raise UnclosedShell(f"the here-document {delimiter[2]} is not closed")
        self._here_end = end.end()
        body = self.text[start : end.start()]
        if delimiter[1]:
            return replace(token, pieces=(ShellPiece("text", body, body, quoted=True),))
        return replace(token, pieces=tuple(ShellLexer(body, line=token.line).quoted("")))

    def _word(self) -> ShellToken:
        line, pieces = self.line, list[ShellPiece]()
        while self.at < len(self.text):
            found = self.text[self.at]
            if found in " \t\r":
                break
            if continued := _CONTINUED.match(self.text, self.at):  # an escaped line break does not end a word
                self._advance(continued.end())
                continue
            if operator := _OPERATOR.match(self.text, self.at):
                last = pieces[-1] if pieces else None
                if found == "(" and last and not last.quoted and last.source.endswith("="):
                    pieces.append(self._bracketed("array", self.at, quoted=True))
                    continue
                if found in "<>" and last and len(pieces) == 1 and last.source.isdigit():
                    return replace(self._operator(operator[0]), line=line)
                break
            pieces += self._pieces(found)
        return ShellToken(line, pieces=tuple(pieces))

    def _pieces(self, found: str) -> Iterator[ShellPiece]:
        if found == "'":
            source = self._match(_RAW)
            yield ShellPiece("text", source[1:-1], source, quoted=True)
        elif found == '"':
            self.at += 1
            yield ShellPiece("text", "", '"', quoted=True)
            yield from self.quoted('"')
            self._close('"', '"')
        elif found == "\\":
            source = self._advance(min(self.at + 2, len(self.text)))
            yield ShellPiece("text", source[1:], source, quoted=True)
        elif found in "$`":
            yield self._expansion(quoted=False)
        else:
            source = self._match(_TEXT)
            yield ShellPiece("text", source, source, quoted=False)

    def quoted(self, end: str) -> Iterator[ShellPiece]:
        """Yield the parts of a double-quoted text, up to the character that ends it; an empty ``end`` means the whole
        rest."""
        while self.at < len(self.text) and (found := self.text[self.at]) != end:
            if found in "$`":
                yield self._expansion(quoted=True)
                continue
            # Within ${...}, single quotes hide a bracket, although they stay.
            source = self._match(_RAW if found == "'" and end == "}" else _QUOTED_TEXT)
            text = "" if _CONTINUED.fullmatch(source) else source
            yield ShellPiece("text", re.sub(r'\\([\\"$`])', r"\1", text), source, quoted=True)

    def _default(self, *, quoted: bool) -> Iterator[ShellPiece]:
        """Yield the parts of the word up to ``}``. The shell removes quotes in it; between double quotes, only double
        ones."""
        if quoted:
            yield from (piece for piece in self.quoted("}") if piece.source != '"')
            return
        while self.at < len(self.text) and (found := self.text[self.at]) != "}":
            yield from self._pieces(found)

    def _expansion(self, quoted: bool) -> ShellPiece:
        start, text = self.at, self.text
        if text.startswith("$((", start) and text.startswith("))", (end := self._closing(start + 1)) - 2):
            source = self._advance(end)
            return ShellPiece("arithmetic", source[3:-2], source, quoted)
        if text.startswith("$(", start):
            self.at += 1
            return self._bracketed("command", start, quoted=quoted)
        if text[start] == "`":
            source = self._match(_BACKTICKS)
            inner = re.sub(r"\\([\\$`])", r"\1", source[1:-1])
            return ShellPiece("command", source, source, quoted, tokens=tuple(ShellLexer(inner).tokens()))
        if text.startswith("${", start):
            return self._braced(quoted=quoted)
        if name := _NAME.match(text, start + 1):
            return ShellPiece("variable", name[0], self._advance(name.end()), quoted)
        if not quoted and (found := _ESCAPED.match(text, start)):
            self._advance(found.end())
            return _unescaped(found[0])
        is_known = text[start + 1 : start + 2] not in tuple("?$!-")
        source = self._advance(start + (1 if is_known else 2))
        return ShellPiece("text" if is_known else "unread", source, source, quoted)

    def _braced(self, *, quoted: bool) -> ShellPiece:
        """The variable ``${...}``."""
        start = self.at
        self._enter()
        head = _BRACED.match(self.text, start + 2)
        self._advance(head.end() if head else start + 2)
        word = tuple(self._default(quoted=quoted))
        self._close("{", "}")
        self.nested -= 1
        source = self.text[start : self.at]
        operator = (head["operator"] or head["trim"] or "") if head else ""
        if not head or (word and not operator) or (head["length"] and operator):
            return ShellPiece("unread", source, source, quoted)
        kind = "length" if head["length"] else "variable"
        return ShellPiece(kind, head["name"], source, quoted, word, operator, head["index"])

    def _bracketed(self, kind: str, start: int, *, quoted: bool) -> ShellPiece:
        """The part that begins at ``start`` and ends with the bracket that closes the next one."""
        self._enter()
        self.at += 1
        tokens, depth = list[ShellToken](), 1
        for token in self.tokens():
            depth += (token.operator == "(") - (token.operator == ")")
            if not depth:
                self.nested -= 1
                source = self.text[start : self.at]
                return ShellPiece(kind, source, source, quoted, tokens=tuple(tokens))
            tokens.append(token)
        raise UnclosedShell("the bracket ( is not closed")

    def _enter(self) -> None:
        self.nested += 1
        if self.nested > _MAX_NESTED:
            raise UnclosedShell(f"more than {_MAX_NESTED} brackets within each other")

    def _match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.at)
        if not found:
            raise UnclosedShell(f"the quote {self.text[self.at]} is not closed")
        return self._advance(found.end())

    def _close(self, opening: str, closing: str) -> None:
        if self.text[self.at : self.at + 1] != closing:
            raise UnclosedShell(f"the {'bracket' if opening == '{' else 'quote'} {opening} is not closed")
        self.at += 1

    def _closing(self, start: int) -> int:
        """Index after the bracket that closes a calculation."""
        depth = 0
        for found in re.compile(r"\\.|'[^']*'|[()]", re.DOTALL).finditer(self.text, start):
            depth += (found[0] == "(") - (found[0] == ")")
            if depth == 0:
                return found.end()
        raise UnclosedShell("the bracket ( is not closed")


def _unescaped(source: str) -> ShellPiece:
    """A text in ``$'...'``; one with escape sequences other than the usual ones stays as written."""
    if set(re.findall(r"\\(.)", source, re.DOTALL)) - _ESCAPES.keys():
        return ShellPiece("unread", source, source, quoted=True)
    text = re.sub(r"\\(.)", lambda found: _ESCAPES[found[1]], source[2:-1])
    return ShellPiece("text", text, source, quoted=True)
