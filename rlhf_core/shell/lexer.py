"""Words and operators of shell scripts, with what is quoted and what the shell would expand. Pure."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

_MAX_NESTED = 20
_MAX_HERE_DOCUMENTS = 100

_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_BRACED = re.compile(
    r"(?P<length>#?)(?P<name>[A-Za-z_]\w*|[0-9@*#])(?:\[(?P<index>[^\]]*)\])?"
    r"(?::?(?P<operator>[-=+])(?P<word>.*)|(?P<trim>##?|%%?)(?P<pattern>.*))?",
    re.ASCII | re.DOTALL,
)
_OPERATOR = re.compile(r"&&|\|\||\|&|;;|&>>|&>|>>|<<<|<<-|<<|>&|<&|>\||[|&;><()\n]")
_EXPR = re.compile(r"\s*expr\s+(.*)", re.DOTALL)
_ESCAPED = re.compile(r"\$'(?:\\.|[^'\\])*'", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
_DIRNAME = (
    r"\$\(\s*dirname\s+(?:--\s+)?(?P<quote>['\"]?)(?P<absolute>\$\((?:readlink -f|realpath) (?:--\s+)?)?(?P<inner>\"?)"
    r"(?:\$0|\$\{0\}|\$BASH_SOURCE|\$\{BASH_SOURCE(?:\[0\])?(?::-\$0)?\})(?P=inner)(?(absolute)\))(?P=quote)\s*\)"
)
_FOLDER_OF_SCRIPT = re.compile(_DIRNAME)
_CHANGED_FOLDER = re.compile(
    r"\$\(\s*cd\s+(?:--\s+)?(?P<folder>[^;&|<>\n]+?)(?:\s*&?[12]?>+\s*(?:/dev/null|&1))*\s*(?:&&|;)\s*pwd(?:\s+-[LP])?\s*\)"
)
"""The usual way to an absolute folder, such as that of the script."""

FOLDER_OF_SCRIPT = "dirname of $0"
"""Name under which the folder of the script is looked up: not a valid name of a variable."""


@dataclass(frozen=True)
class ShellPiece:
    """Part of a word."""

    kind: str
    """text, variable, length, arithmetic, array, folder, condition or unread."""
    text: str
    """The text, name or expression; the words of an array; the folder of ``$(cd FOLDER && pwd)``; for unread
    pieces, their source."""
    source: str
    quoted: bool
    default: str | None = None
    """Word after the operator of a variable."""
    operator: str = ""
    """Operator of a variable in braces: ``-``, ``=`` or ``+``, without its colon; ``#``, ``##``, ``%`` or ``%%``."""
    index: str | None = None
    """Index of an array: a number, a variable, ``@`` or ``*``."""


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
    _here_end: int = 0
    _here_documents: int = 0

    def tokens(self) -> Iterator[ShellToken]:
        """Yield words and operators.

        Raises:
            UnclosedShell: a quote or bracket is not closed.
        """
        while self.at < len(self.text):
            found = self.text[self.at]
            if found in " \t\r":
                self.at += 1
            elif self.text.startswith(("\\\n", "\\\r\n"), self.at):
                self._advance(self.text.index("\n", self.at) + 1)
            elif found == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif self.text.startswith("((", self.at) and (condition := self._condition()):
                yield condition
            elif operator_found := _OPERATOR.match(self.text, self.at):
                yield self._operator(operator_found[0])
            else:
                yield self._word()

    def _advance(self, to: int) -> str:
        passed = self.text[self.at : to]
        self.line += passed.count("\n")
        self.at = to
        return passed

    def _condition(self) -> ShellToken | None:
        """The calculation ``((...))``; None for brackets of another kind."""
        line, end = self.line, self._closing(self.at, "(", ")")
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
        delimiter = re.compile(r"[ \t]*(['\"]?)([\w.-]+)\1").match(self.text, self.at)
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
            if self.text.startswith(("\\\n", "\\\r\n"), self.at):  # an escaped line break does not end a word
                self._advance(self.text.index("\n", self.at) + 1)
                continue
            if _OPERATOR.match(self.text, self.at):
                last = pieces[-1] if pieces else None
                if found == "(" and last and not last.quoted and last.source.endswith("="):
                    source = self._advance(self._closing(self.at, "(", ")"))
                    pieces.append(ShellPiece("array", source[1:-1], source, quoted=True))
                    continue
                if found in "<>" and last and len(pieces) == 1 and last.source.isdigit():
                    return replace(self._operator(_OPERATOR.match(self.text, self.at)[0]), line=line)  # type: ignore[index]
                break
            pieces += self._pieces(found)
        return ShellToken(line, pieces=tuple(pieces))

    def _pieces(self, found: str) -> Iterator[ShellPiece]:
        if found == "'":
            source = self._advance(self._find("'", self.at + 1) + 1)
            yield ShellPiece("text", source[1:-1], source, quoted=True)
        elif found == '"':
            self.at += 1
            yield ShellPiece("text", "", '"', quoted=True)
            yield from self.quoted('"')
            self.at += 1
        elif found == "\\":
            source = self._advance(min(self.at + 2, len(self.text)))
            yield ShellPiece("text", source[1:], source, quoted=True)
        elif found in "$`":
            yield self._expansion(quoted=False)
        else:
            source = self._advance(re.compile(r"[^\s\\'\"$`|&;<>()]+|.", re.DOTALL).match(self.text, self.at).end())  # type: ignore[union-attr]
            yield ShellPiece("text", source, source, quoted=False)

    def quoted(self, end: str) -> Iterator[ShellPiece]:
        """Yield the parts of a double-quoted text, up to the character that ends it; an empty ``end`` means the whole
        rest."""
        part = re.compile(r'[^"\\$`]+|\\\r?\n|\\.|"', re.DOTALL)
        while self.at < len(self.text):
            found = self.text[self.at]
            if found == end:
                return
            if found in "$`":
                yield self._expansion(quoted=True)
                continue
            match = part.match(self.text, self.at)
            source = self._advance(match.end() if match else self.at + 1)
            text = "" if source in ("\\\n", "\\\r\n") else source
            yield ShellPiece("text", re.sub(r'\\([\\"$`])', r"\1", text), source, quoted=True)
        if end:
            raise UnclosedShell(f'the quote "{end}" is not closed')

    def default(self, *, in_quotes: bool) -> Iterator[ShellPiece]:
        """Yield the parts of the word after ``:-``. The shell removes quotes in it; between double quotes, only double
        ones."""
        if in_quotes:
            yield from (piece for piece in self.quoted("") if piece.source != '"')
            return
        while self.at < len(self.text):
            yield from self._pieces(self.text[self.at])

    def _expansion(self, quoted: bool) -> ShellPiece:
        start, text = self.at, self.text
        if text.startswith("$((", start):
            source = self._advance(self._closing(start + 1, "(", ")"))
            kind = "arithmetic" if source.endswith("))") else "unread"
            return ShellPiece(kind, source[3:-2] if kind == "arithmetic" else source, source, quoted)
        if text.startswith("$(", start):
            source = self._advance(self._closing(start + 1, "(", ")"))
            if source == "$(pwd)":
                return ShellPiece("variable", "PWD", source, quoted)
            if _FOLDER_OF_SCRIPT.fullmatch(source):
                return ShellPiece("variable", FOLDER_OF_SCRIPT, source, quoted)
            if (folder := _CHANGED_FOLDER.fullmatch(source)) and source.count("$") <= _MAX_NESTED:
                return ShellPiece("folder", folder["folder"], source, quoted)
            found = _EXPR.fullmatch(source[2:-1])
            return ShellPiece("arithmetic" if found else "unread", found[1] if found else source, source, quoted)
        if text[start] == "`":
            source = self._advance(self._find("`", start + 1) + 1)
            if source == "`pwd`":
                return ShellPiece("variable", "PWD", source, quoted)
            if source[1:].lstrip().startswith("#"):  # a comment between the lines of a long command
                return ShellPiece("text", "", source, quoted)
            return ShellPiece("unread", source, source, quoted)
        if text.startswith("${", start):
            source = self._advance(self._closing(start + 1, "{", "}"))
            found = _BRACED.fullmatch(source[2:-1])
            if not found or source.count("$") > _MAX_NESTED or (found["length"] and found["operator"]):
                return ShellPiece("unread", source, source, quoted)
            word = found["word"] if found["operator"] else found["pattern"]
            kind = "length" if found["length"] else "variable"
            mark = found["operator"] or found["trim"] or ""
            return ShellPiece(kind, found["name"], source, quoted, word, mark, found["index"])
        name = _NAME.match(text, start + 1)
        if name:
            return ShellPiece("variable", name[0], self._advance(name.end()), quoted)
        if re.compile(r"[0-9@*#]", re.ASCII).match(text, start + 1):
            source = self._advance(start + 2)
            return ShellPiece("variable", source[1], source, quoted)
        if not quoted and (found := _ESCAPED.match(text, start)):
            self._advance(found.end())
            return _unescaped(found[0])
        if re.compile(r"[?$!-]").match(text, start + 1):
            self._advance(start + 2)
            return ShellPiece("unread", text[start : start + 2], text[start : start + 2], quoted)
        self.at += 1
        return ShellPiece("text", "$", "$", quoted)

    def _find(self, character: str, start: int) -> int:
        end = self.text.find(character, start)
        if end < 0:
            raise UnclosedShell(f"the quote {character} is not closed")
        return end

    def _closing(self, start: int, opening: str, closing: str) -> int:
        depth, at = 0, start
        marks = re.compile(rf"\\.|'[^']*'|[\{opening}\{closing}]", re.DOTALL)
        while found := marks.search(self.text, at):
            depth += (found[0] == opening) - (found[0] == closing)
            at = found.end()
            if depth == 0:
                return at
        raise UnclosedShell(f"the bracket {opening} is not closed")


def _unescaped(source: str) -> ShellPiece:
    """A text in ``$'...'``; one with escape sequences other than the usual ones stays as written."""
    if set(re.findall(r"\\(.)", source, re.DOTALL)) - _ESCAPES.keys():
        return ShellPiece("unread", source, source, quoted=True)
    text = re.sub(r"\\(.)", lambda found: _ESCAPES[found[1]], source[2:-1])
    return ShellPiece("text", text, source, quoted=True)


def ends_in_pipe(text: str) -> bool:
    """True if the last command of a script is a pipe."""
    pipes, before = ("|", "|&"), ""
    is_pipe = is_next = False
    with suppress(UnclosedShell):
        for token in ShellLexer(text).tokens():
            if token.operator in pipes:
                is_pipe, is_next = True, False
            elif token.operator in (";", "&", "&&", "||", "\n"):
                is_next = before not in pipes  # a line may end in a pipe
            elif is_next and token.pieces:
                is_pipe = is_next = False
            before = token.operator
    return is_pipe
