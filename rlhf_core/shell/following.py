"""Follow the commands of a shell script in the order in which a shell would run them, without running any. Pure."""

import posixpath
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from rlhf_core.shell.assignments import DECLARING, NAME, Assignments, doubtful
from rlhf_core.shell.blocks import CLOSING, OPENING, PREFIXES, Block, CommandList, end_of_group, is_pattern_of
from rlhf_core.shell.conditions import ConditionWord, Outcome, outcome_of_calculation, outcome_of_test
from rlhf_core.shell.lexer import FOLDER_OF_SCRIPT, ShellLexer, ShellPiece, ShellToken, UnclosedShell
from rlhf_core.shell.values import ShellCommand, ShellValue

_MAX_COMMANDS = 10_000
_MAX_ROUNDS = 100
"""Most rounds of one loop that are followed."""
_MAX_NESTED = 12
"""Most functions, sourced files and texts of ``eval`` within each other."""
_MAX_STEPS = 20_000
"""Most commands that are followed in loops, functions and other files."""
_MAX_TEXTS = 100
"""Most sourced files and texts of ``eval``."""

_CHANGED = re.compile(r"([A-Za-z_]\w*)\s*(?:\+\+|--|[-+*/%]?=(?!=))|(?:\+\+|--)([A-Za-z_]\w*)", re.ASCII)
_REDIRECTIONS = frozenset(["&>>", "&>", ">>", "<<<", ">&", "<&", ">|", ">", "<"])
_TESTS = frozenset(["[", "[[", "test"])
_SHELLS = frozenset(["bash", "sh", "zsh", "dash", "sbatch"])
"""Programs that run a script from their standard input."""


@dataclass
class ScriptFollower(Assignments):
    """State of a shell at a place of the script."""

    sourced: Callable[[str], str | None]
    commands: list[ShellCommand] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    functions: dict[str, Sequence[ShellToken]] = field(default_factory=dict)
    nested: int = 0
    steps: int = 0
    texts: int = 0
    subshells: tuple[int, ...] = ()
    """Subshells that are open, each by the number of commands before it."""
    piped: ShellToken | None = None
    """Here-document that goes to the next command through a pipe."""

    def follow(self, found: Iterable[ShellToken]) -> None:
        """Follow the tokens of a script.

        Raises:
            UnclosedShell: it has too many commands, or the tokens end with this error.
        """
        tokens: list[ShellToken] = []
        try:
            tokens.extend(found)
        finally:  # those before an error are followed, too
            self._run(tokens)

    # -- control flow

    def _run(self, tokens: Sequence[ShellToken]) -> None:
        at, words = 0, list[ShellToken]()
        redirected, target, here = False, ShellToken(0), None
        is_after_group = False
        while at < len(tokens):
            token = tokens[at]
            at += 1
            if self._is_at_pattern():
                if token.plain == "esac" and not words:
                    self.blocks[-1].at_pattern = False
                    words = [token]
                elif token.operator == ")":
                    self._matched(words)
                    words = []
                else:
                    words += [token] if token.pieces else []
                continue
            in_test = is_pattern_of(words)
            if token.operator in ("<<", "<<-"):
                here = token
            elif token.pieces and redirected:
                target, redirected = token, False
            elif token.pieces:
                words.append(token)
                if len(words) >= 3 and words[-3].plain == "case" and token.plain == "in":
                    self._command(words, "", tokens)
                    words = []
                elif token.plain == "{" and len(words) == 3 and words[0].plain == "function":
                    at = self._define(words[1].plain, tokens, at - 1)
                    words = []
            elif in_test:
                operator = ShellPiece("text", token.operator, token.operator, quoted=False)
                words += [] if token.operator == "\n" else [replace(token, operator="", pieces=(operator,))]
            elif token.operator in _REDIRECTIONS:
                redirected = True
            elif token.operator == "(" and words and tokens[at : at + 1] and tokens[at].operator == ")":
                at = self._define(words[-1].plain, tokens, at + 1)
                words = []
            elif token.operator == "(" and all(word.plain in PREFIXES | OPENING for word in words):
                self._command(words, "", tokens)
                end = end_of_group(tokens, at - 1) or len(tokens)
                self._subshell(tokens[at:end])
                at, words, is_after_group = end + 1, [], True
            elif token.operator:
                if here is not None:
                    self._here_document(words, here, target, token.operator)
                jump = self._command(words, token.operator, tokens)
                if words or is_after_group or token.operator != "\n":  # a command may go on in the line after || or &&
                    self.chain.end(token.operator)
                at = jump if jump is not None else at
                if token.operator == ";;" and self.blocks and self.blocks[-1].kind == "case":
                    self.leave_part(self.blocks[-1])
                    self.blocks[-1].at_pattern = True
                words, redirected, target, here = [], False, ShellToken(0), None
                is_after_group = False
        self._command(words, "", tokens)

    def _is_at_pattern(self) -> bool:
        return bool(self.blocks) and self.blocks[-1].at_pattern

    def _matched(self, patterns: Sequence[ShellToken]) -> None:
        """Enter the part of a ``case`` with these patterns."""
        values = [self._condition_word(token) for token in patterns]
        self.blocks[-1].enter([(value.text, value.is_known) for value in values])
        self.chain = CommandList()

    def _define(self, name: str, tokens: Sequence[ShellToken], at: int) -> int:
        """Keep the body of a function for its calls, and return the index after it."""
        while at < len(tokens) and tokens[at].operator == "\n":
            at += 1
        end = end_of_group(tokens, at)
        if end is None:
            return at
        self.functions[name] = tokens[at + 1 : end]
        return end + 1

    def _subshell(self, tokens: Sequence[ShellToken]) -> None:
        """Follow ``( ... )``, whose variables and folder end with it."""
        if self.state is not False:
            known, exported, outer = self.variables.known, self.exported, self.subshells
            self.variables.known, self.exported, self.subshells = {**known}, {*exported}, (*outer, len(self.commands))
            self._within(tokens, None)
            self.variables.known, self.exported, self.subshells = known, exported, outer
        self.chain.done(None, likely=True)

    def _command(self, words: Sequence[ShellToken], end: str, all_tokens: Sequence[ShellToken]) -> int | None:
        """Process the words between two separators; return the index to go on at, if a loop begins again."""
        tokens = [*words]
        while tokens and tokens[0].plain in PREFIXES | CLOSING | OPENING:
            token = tokens.pop(0)
            if token.plain in CLOSING:
                jump = self._close()
                if jump is not None:
                    return jump
            elif token.plain in OPENING:
                self._open(token, tokens, next(at for at, one in enumerate(all_tokens) if one is token))
                if token.plain in ("for", "select", "case"):
                    return None
            elif token.plain == "!":
                self.chain.negate()
            elif token.plain != "time" and self.blocks:
                self.leave_part(self.blocks[-1])
                self.blocks[-1].go_on(token.plain, self.chain.sure)
                self.chain = CommandList()
        if tokens and self.state is not False:
            self._simple(tokens, end)
        return None

    def _open(self, token: ShellToken, rest: list[ShellToken], start: int) -> None:
        kind = token.plain
        block = Block(kind, self.chain.guard, start)
        block.in_condition = kind in ("while", "until")
        if kind == "case" and rest:
            word = self._condition_word(rest[0])
            block.word = word.text if word.is_known else None
            block.at_pattern = True
        self.blocks.append(block)
        self.chain = CommandList()
        if kind in ("for", "select") and rest:
            found = NAME.match(rest[0].pieces[0].text.strip())  # for NAME in, for ((NAME = 0
            name = found[0] if found else ""
            block.runs = None
            if NAME.fullmatch(name):
                self.assign(name, ShellValue(""), token.line)

    def _close(self) -> int | None:
        """Leave the innermost block; return the index to go on at, if a loop begins again."""
        if not self.blocks:
            return None
        block = self.blocks[-1]
        again = block.is_again and self.state is True and block.rounds < _MAX_ROUNDS and self.steps < _MAX_STEPS
        if again:
            block.begin_again()
            self.chain = CommandList()
            return block.start + 1
        self.blocks.pop()
        self.leave_part(block)
        self.chain = CommandList(guard=block.outer)
        self.chain.done(None, likely=True)
        return None

    # -- commands

    def _simple(self, tokens: list[ShellToken], end: str) -> None:
        """Process a command without keywords."""
        self.steps += 1
        if self.blocks and self.blocks[-1].in_condition:
            self.blocks[-1].may_change |= any(_varies(piece) for token in tokens for piece in token.pieces)
        if tokens[0].pieces and tokens[0].pieces[0].kind == "condition":
            self._calculation(tokens[0].pieces[0].text)
            return
        if tokens[0].plain in _TESTS:
            inner = tokens[1:-1] if tokens[0].plain != "test" and tokens[-1].plain in ("]", "]]") else tokens[1:]
            self.chain.done(outcome_of_test([self._condition_word(token) for token in inner]))
            return
        assignments = list[tuple[str, ShellValue, bool]]()
        line = tokens[0].line
        while tokens and (found := self.assignment(tokens[0])):
            assignments.append(found)
            tokens.pop(0)
        outcome = self._known_outcome(tokens)
        self.chain.done(outcome, likely=True if outcome is None else None)
        if not tokens:
            for name, value, adds in assignments:
                self.assign(name, value, line, adds=adds)
            return
        if not self._builtin(tokens):
            words = [word for token in tokens for word in self.variables.words(token.pieces)]
            words += self._piped_words(words)
            self._external(words, {name: value for name, value, _ in assignments}, line, end)

    def _known_outcome(self, tokens: Sequence[ShellToken]) -> Outcome:
        """Outcome of a command that is not a test; None if only a shell would know."""
        name = tokens[0].plain if tokens else ""
        if name in ("true", ":", "false"):
            return name != "false"
        return False if name == "getopts" and not self.variables.arguments else None

    def _builtin(self, tokens: list[ShellToken]) -> bool:
        """Process a command of the shell itself; False for any other."""
        name = tokens[0].plain
        if name in DECLARING:
            self.declare(tokens)
        elif name in ("true", ":", "false"):
            for token in tokens[1:]:
                self.variables.words(token.pieces)  # : "${NAME:=value}"
        elif name == "unset":
            self.unset(tokens)
        elif name == "getopts":
            return True
        elif name in ("break", "continue", "exit", "return"):
            self._leave(name)
        elif name in ("shift", "set") and self.state is True:
            self._arguments(tokens)
        else:
            return False
        return True

    def _leave(self, name: str) -> None:
        loops = [block for block in self.blocks if block.kind in ("while", "until", "for")]
        for block in loops if name in ("exit", "return") else loops[-1:] if name == "break" else ():
            block.is_left = True
            if self.state is True:
                block.runs = False
        # Any other exit may be the answer to arguments that are not known here.
        self.has_ended |= name == "exit" and not self.blocks and not self.chain.joint

    def _arguments(self, tokens: list[ShellToken]) -> None:
        words = [word for token in tokens[1:] for word in self.variables.words(token.pieces)]
        if tokens[0].plain == "set":
            if words and words[0].text == "--":
                self.variables.set_arguments([word.text for word in words[1:]])
            return
        count = int(words[0].text) if words and re.fullmatch(r"\d{1,4}", words[0].text, re.ASCII) else 1
        if count <= len(self.variables.arguments):  # a shell refuses to shift by more
            self.variables.set_arguments(self.variables.arguments[count:])

    def _external(self, words: list[ShellValue], given: dict[str, ShellValue], line: int, end: str) -> None:
        name = words[0].text if words else ""
        if name in self.functions and not words[0].unread:
            self._within(self.functions[name], [word.text for word in words[1:]])
            return
        if name == "eval" and len(words) > 1 and self._is_text(words[1:]):
            self._text(" ".join(word.text for word in words[1:]), None, line)
            return
        if name in ("source", ".") and len(words) > 1 and not words[1].unread:
            text = self.sourced(posixpath.join(self.folder(), words[1].text))
            if text is not None and self.nested < _MAX_NESTED:
                before = self.variables.known.get(FOLDER_OF_SCRIPT)
                self.variables.known[FOLDER_OF_SCRIPT] = ShellValue(posixpath.dirname(words[1].text))
                self._text(text, [word.text for word in words[2:]] or None, line)
                self.variables.known |= {FOLDER_OF_SCRIPT: before} if before else {}
                return
        if name in ("cd", "pushd"):
            self.change_folder(words)
        if len(self.commands) >= _MAX_COMMANDS or self.steps > _MAX_STEPS:
            raise UnclosedShell(f"more than {_MAX_COMMANDS} commands")
        exported = {name: self.variables.known[name] for name in sorted(self.exported & self.variables.known.keys())}
        variables = exported | given
        self.commands.append(
            ShellCommand(
                argv=tuple(word.text for word in words),
                variables={name: value.text for name, value in variables.items()},
                line=self.line or line,
                in_background=end == "&",
                is_conditional=self.state is not True,
                unread=tuple(dict.fromkeys(name for value in [*words, *variables.values()] for name in value.unread)),
                is_known=not any(word.unread for word in words),
                folder=self.folder(),
                subshells=self.subshells,
            )
        )

    def _is_text(self, words: Sequence[ShellValue]) -> bool:
        """True for words of ``eval`` that are known but for some parts, unlike the output of a command."""
        return self.nested < _MAX_NESTED and not all(word.text in word.unread for word in words)

    def _text(self, text: str, arguments: Sequence[str] | None, line: int) -> None:
        """Follow a text in this place: that of ``eval``, or a file."""
        self.texts += 1
        if self.texts > _MAX_TEXTS:
            raise UnclosedShell(f"more than {_MAX_TEXTS} sourced files and texts of eval")
        before = self.line
        self.line = before or line
        tokens: list[ShellToken] = []
        try:
            tokens.extend(ShellLexer(text, line=line).tokens())
        except UnclosedShell as error:
            self.notes.append(f"line {self.line}: {error}")
        self._within(tokens, arguments)
        self.line = before

    def _within(self, tokens: Sequence[ShellToken], arguments: Sequence[str] | None) -> None:
        """Follow tokens in this place, with arguments of their own if they have some."""
        if self.nested >= _MAX_NESTED or self.steps > _MAX_STEPS:
            return
        before, chain, blocks = self.variables.arguments, self.chain, self.blocks
        in_function, hidden = self.variables.in_function, self.hidden
        inner = Block("function", self.state, 0)
        self.blocks = [inner]
        self.chain = CommandList()
        self.nested += 1
        if arguments is not None:
            self.variables.set_arguments(arguments)
            self.variables.in_function, self.hidden = True, {}
        self._run(tokens)
        if arguments is not None:
            for name, value in self.hidden.items():
                inner.assigned.pop(name, None)
                self.variables.known.pop(name, None)
                self.variables.known |= {} if value is None else {name: value}
            self.variables.set_arguments(before)
            self.variables.in_function, self.hidden = in_function, hidden
        self.nested -= 1
        self.blocks, self.chain = blocks, chain
        outer = doubtful(blocks)
        for name, changed in inner.assigned.items():
            if outer is not None and self.chain.guard is not None:
                outer.assigned[name] = changed
            else:
                self.doubt(name, changed, blocks)

    def _calculation(self, text: str) -> None:
        for found in _CHANGED.finditer(text):
            name = found[1] or found[2]
            if name in self.variables.known:
                self.variables.known[name] = ShellValue(f"${name}", (f"${name}",))
        self.chain.done(outcome_of_calculation(self.variables.filled(text)))

    def _condition_word(self, token: ShellToken) -> ConditionWord:
        self.variables.in_test = True
        value = self.variables.assigned(token.pieces)
        self.variables.in_test = False
        is_quoted = any(piece.quoted for piece in token.pieces)
        return ConditionWord(value.text, not value.unread, is_quoted)

    # -- here-documents

    def _here_document(self, words: list[ShellToken], body: ShellToken, target: ShellToken, end: str) -> None:
        """Process a here-document: the value of ``read``, a script for a shell, or a file."""
        if self.state is False:
            return
        plain = [token.plain for token in words]
        if plain[:1] == ["read"] and NAME.fullmatch(plain[-1]):
            self.assign(plain[-1], self.variables.assigned(body.pieces), body.line)
        elif {*plain[:1], *plain[-1:]} & _SHELLS or (plain == ["cat"] and end == "|"):
            self.piped = body
        elif plain[:1] in (["cat"], ["tee"]) and (target.pieces or len(words) > 1):
            name = self.variables.assigned((target if target.pieces else words[-1]).pieces)
            self.files[name.text] = self.variables.assigned(body.pieces).text
            self.notes.append(f"file {name.text}, written in line {body.line}")
        else:
            self.notes.append(f"here-document in line {body.line}")

    def _piped_words(self, words: list[ShellValue]) -> list[ShellValue]:
        """The words ``-c TEXT`` for a shell that reads its script from a here-document."""
        if self.piped is None or not words or words[0].text == "cat":
            return []
        body, self.piped = self.variables.assigned(self.piped.pieces), None
        if not {words[0].text, words[-1].text} & _SHELLS:
            return []
        shell = [] if words[-1].text in _SHELLS - {"sbatch"} else [ShellValue("bash")]
        return [*shell, ShellValue("-c"), body]


def _varies(piece: ShellPiece) -> bool:
    """True for a part whose value may change from one round of a loop to the next."""
    return re.search("[A-Za-z]", piece.text) is not None if piece.kind == "condition" else piece.kind != "text"
