"""Follow the commands of a shell script in the order in which a shell would run them, without running any. Pure."""

import fnmatch
import posixpath
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from rlhf_core.shell.assignments import DECLARING, NAME, Assignments
from rlhf_core.shell.conditions import (
    ConditionWord,
    Ended,
    Outcome,
    both,
    either,
    opposite,
    outcome_of_calculation,
    outcome_of_test,
)
from rlhf_core.shell.lexer import REDIRECTIONS, ShellLexer, ShellPiece, ShellToken, UnclosedShell
from rlhf_core.shell.values import ShellCommand, ShellValue

_MAX_COMMANDS = 10_000
_MAX_ROUNDS = 100
"""Most rounds of one loop that are followed."""
_MAX_NESTED = 12
"""Most functions, sourced files and texts of ``eval`` within each other."""
_MAX_BLOCKS = 50
"""Most branches, loops and groups within each other, those of functions included."""
_MAX_STEPS = 20_000
"""Most commands that are followed in loops, functions and other files."""
_MAX_TEXTS = 100
"""Most sourced files and texts of ``eval``."""

_CHANGED = re.compile(r"([A-Za-z_]\w*)\s*(?:\+\+|--|[-+*/%]?=(?!=))|(?:\+\+|--)([A-Za-z_]\w*)", re.ASCII)
_SEPARATORS = frozenset(["\n", ";", "&", ";;", ")", "|", "|&", "&&", "||"])
_CLOSING = frozenset(["then", "elif", "else", "fi", "do", "done", "esac", "}"])
_TESTS = frozenset(["[", "[[", "test"])
_SHELLS = frozenset(["bash", "sh", "zsh", "dash", "sbatch"])
"""Programs that run a script from their standard input."""
_END = ShellToken(0)


@dataclass
class ScriptFollower(Assignments):
    """State of a shell at a place of the script."""

    sourced: Callable[[str], str | None]
    commands: list[ShellCommand] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    functions: dict[str, Sequence[ShellToken]] = field(default_factory=dict)
    tokens: Sequence[ShellToken] = ()
    at: int = 0
    """Index of the next token."""
    nested: int = 0
    blocks: int = 0
    """Branches, loops and groups around the place."""
    steps: int = 0
    texts: int = 0
    subshells: tuple[int, ...] = ()
    """Subshells that are open, each by the number of commands before it."""
    ends_in_pipe: bool = False
    """True if the last command so far is the last one of a pipe."""
    piped: ShellToken | None = None
    """Here-document that goes to the next command through a pipe."""

    def follow(self, found: Iterable[ShellToken]) -> None:
        """Follow the tokens of a script.

        Raises:
            UnclosedShell: it has too many commands or blocks, or the tokens end with this error.
        """
        tokens: list[ShellToken] = []
        try:
            tokens.extend(found)
        finally:  # those before an error are followed, too
            self._run(tokens)

    # -- control flow

    @property
    def _token(self) -> ShellToken:
        return self.tokens[self.at] if self.at < len(self.tokens) else _END

    @property
    def _mark(self) -> str:
        """The next token if it is an operator or a plain word; otherwise empty."""
        return self._token.operator or self._token.plain

    def _pass(self, *marks: str) -> bool:
        """Go on after the next token if it is one of these."""
        found = self._mark in marks
        self.at += found
        return found

    def _run(self, tokens: Sequence[ShellToken]) -> None:
        before, self.tokens, self.at = (self.tokens, self.at), tokens, 0
        self._statements()
        self.tokens, self.at = before

    def _statements(self, *ends: str) -> Ended:
        """Follow commands up to one of these marks, which closes them; return the way in which the last one ends."""
        ended = Ended()
        while self.at < len(self.tokens) and self._mark not in ends:
            if not self._pass(*_SEPARATORS, *_CLOSING):
                ended = self._list()
        return ended

    def _list(self) -> Ended:
        ended = self._pipeline()
        while (joint := self._mark) and self._pass("&&", "||"):
            runs = ended.likely if joint == "&&" else opposite(ended.sure)
            with self.part(runs):
                other = self._pipeline()
            if runs is not False:
                ended = ended.then(joint, other)
        return ended

    def _pipeline(self) -> Ended:
        is_negated = False
        self._pass_lines()
        while (mark := self._mark) and self._pass("!", "time"):
            is_negated ^= mark == "!"
        ended = self._command()
        while self._pass("|", "|&"):
            self._pass_lines()
            ended = self._command()
            self.ends_in_pipe = True
        return Ended(opposite(ended.sure), opposite(ended.sure)) if is_negated else ended

    def _pass_lines(self) -> None:
        while self._pass("\n"):
            pass

    def _command(self) -> Ended:
        self.blocks += 1
        if self.blocks > _MAX_BLOCKS:
            raise UnclosedShell(f"more than {_MAX_BLOCKS} blocks within each other")
        ended = self._block()
        self.blocks -= 1
        return ended

    def _block(self) -> Ended:
        """Follow a block, a definition of a function, or a simple command."""
        if self._mark in ("while", "until"):
            self._while()
        elif self._pass("if"):
            self._if()
        elif self._pass("for", "select"):
            self._for()
        elif self._pass("case"):
            self._case()
        elif self._pass("{"):
            self._statements("}")
            self._pass("}")
        elif self._pass("("):
            self._subshell()
        elif self._pass("function") or [one.operator for one in self.tokens[self.at + 1 : self.at + 3]] == ["(", ")"]:
            self._define()
        else:
            return self._simple()
        self._words()  # redirections
        return Ended()

    def _if(self) -> None:
        taken: Outcome = False
        goes_on = True
        while goes_on:
            with self.part(opposite(taken)):
                met = self._statements("then").sure
            runs = both(opposite(taken), met)
            with self.part(runs):
                self._statements("elif", "else", "fi")
            taken = either(taken, runs)
            goes_on = self._pass("elif")
        with self.part(opposite(taken)):  # without an `else`, it is empty
            self._statements("fi")
        self._pass("fi")

    def _while(self) -> None:
        is_until, start = self._mark == "until", self.at + 1
        with self.part(True, is_loop=True) as loop:
            for _ in range(_MAX_ROUNDS + 1):
                self.at, loop.runs = start, True
                met = self._statements("do").sure
                condition = self.tokens[start : self.at]
                loop.runs = opposite(met) if is_until else met
                self._statements("done")
                if loop.state is not True or loop.is_left or not _vary(condition) or self.steps >= _MAX_STEPS:
                    break
            loop.runs = None  # the values of a further round are unknown
        self._pass("done")

    def _for(self) -> None:
        variable = self._token
        found = NAME.match(variable.pieces[0].text.strip()) if variable.pieces else None  # NAME in, ((NAME = 0
        with self.part(None, is_loop=True):
            if found and self.state is not False:
                self.doubt(found[0], self.line or variable.line)
            while self.at < len(self.tokens) and self._mark not in ("do", "\n", ";"):
                self.at += 1
            self._statements("done")
        self._pass("done")

    def _case(self) -> None:
        word = self._condition_word(self._token)
        taken: Outcome = False
        self.at += 2
        self._pass_lines()
        while self.at < len(self.tokens) and not self._pass("esac"):
            found: Outcome = False
            while self.at < len(self.tokens) and not self._pass(")"):
                if self._token.pieces:
                    found = either(found, _is_of_pattern(word, self._condition_word(self._token)))
                self.at += 1
            runs = both(opposite(taken), found)
            taken = either(taken, runs)
            with self.part(runs):
                self._statements(";;", "esac")
            self._pass(";;")
            self._pass_lines()

    def _subshell(self) -> None:
        """Follow ``( ... )``, whose variables and folder end with it."""
        variables, exported, outer = self.variables, self.exported, self.subshells
        known, arguments = variables.known, variables.arguments
        variables.known, self.exported, self.subshells = {**known}, {*exported}, (*outer, len(self.commands))
        with self.body() as body:
            self._statements(")")
            body.assigned.clear()
        variables.known, variables.arguments, self.exported, self.subshells = known, arguments, exported, outer
        self._pass(")")

    def _define(self) -> None:
        """Keep the body of a function for its calls."""
        name = self._token.plain
        self.at += 1
        self.at += 2 * (self._mark == "(")  # f(), function f()
        self._pass_lines()
        start = self.at
        in_function, self.variables.in_function = self.variables.in_function, True  # its arguments are its own
        with self.part(False):
            self._command()
        self.variables.in_function = in_function
        if self.state is not False:
            self.functions[name] = self.tokens[start : self.at]

    # -- commands

    def _words(self) -> tuple[list[ShellToken], ShellToken | None, ShellToken]:
        """Go on to the end of a command; return its words, its here-document, and the file that it redirects to."""
        words, here, target = list[ShellToken](), None, _END
        is_condition = self._mark == "[["
        while self.at < len(self.tokens):
            token = self._token
            if token.operator in ("<<", "<<-"):
                here = token
            elif token.pieces:
                words.append(token)
                is_condition &= token.plain != "]]"
            elif is_condition:
                operator = ShellPiece("text", token.operator, token.operator, quoted=False)
                words += [] if token.operator == "\n" else [replace(token, operator="", pieces=(operator,))]
            elif token.operator in REDIRECTIONS:
                self.at += 1
                target = self._token
            else:
                break
            self.at += 1
        return words, here, target

    def _simple(self) -> Ended:
        """Follow a command without keywords."""
        tokens, here, target = self._words()
        if here is not None and self.state is not False:
            self._here_document(tokens, here, target)
        if not tokens or self.state is False:
            return Ended()
        self.steps += 1
        self.ends_in_pipe = False
        if tokens[0].pieces[0].kind == "condition":
            return self._calculation(tokens[0].pieces[0].text)
        if tokens[0].plain in _TESTS:
            inner = tokens[1:-1] if tokens[0].plain != "test" and tokens[-1].plain in ("]", "]]") else tokens[1:]
            outcome = outcome_of_test([self._condition_word(token) for token in inner])
            return Ended(outcome, outcome)
        line, assignments = tokens[0].line, list[tuple[str, ShellValue, bool]]()
        while tokens and (found := self.assignment(tokens[0])):
            assignments.append(found)
            tokens.pop(0)
        if not tokens:
            for name, value, adds in assignments:
                self.assign(name, value, line, adds=adds)
        elif (ended := self._builtin(tokens)) is not None:
            return ended
        else:
            words = [word for token in tokens for word in self.variables.words(token.pieces)]
            words += self._piped_words(words)
            self._external(words, {name: value for name, value, _ in assignments}, line)
        return Ended()

    def _builtin(self, tokens: list[ShellToken]) -> Ended | None:
        """Follow a command of the shell itself; None for any other."""
        name = tokens[0].plain
        if name in ("true", ":", "false"):
            for token in tokens[1:]:
                self.variables.words(token.pieces)  # : "${NAME:=value}"
            return Ended(name != "false", name != "false")
        if name == "getopts":
            return Ended() if self.variables.arguments else Ended(False, False)
        if name in DECLARING:
            self.declare(tokens)
        elif name == "unset":
            self.unset(tokens)
        elif name in ("break", "continue", "exit", "return"):
            self._leave_loops(name)
        elif name in ("shift", "set") and self.state is True:
            self._arguments(tokens)
        else:
            return None
        return Ended()

    def _leave_loops(self, name: str) -> None:
        loops = [part for part in self.parts if part.is_loop]
        left = loops[-1:] if name == "break" else loops if name in ("exit", "return") else []
        if self.state is True and left:
            for part in self.parts[self.parts.index(left[0]) :]:
                part.runs = False
        for part in left:
            part.is_left = True
        # Any other exit may be the answer to arguments that are not known here.
        if name == "exit" and not self.nested and len(self.parts) == 1:
            self.parts[0].runs = False

    def _arguments(self, tokens: list[ShellToken]) -> None:
        words = [word for token in tokens[1:] for word in self.variables.words(token.pieces)]
        if tokens[0].plain == "set":
            if words and words[0].text == "--":
                self.variables.set_arguments(words[1:])
            return
        count = int(words[0].text) if words and re.fullmatch(r"\d{1,4}", words[0].text, re.ASCII) else 1
        if count <= len(self.variables.arguments):  # a shell refuses to shift by more
            self.variables.set_arguments(self.variables.arguments[count:])

    def _external(self, words: list[ShellValue], given: dict[str, ShellValue], line: int) -> None:
        name = words[0].text if words else ""
        if name in self.functions and not words[0].unread:
            self._within(self.functions[name], words[1:])
            return
        if name == "eval" and len(words) > 1 and self._is_text(words[1:]):
            self._text(" ".join(word.text for word in words[1:]), None, line)
            return
        if name in ("source", ".") and len(words) > 1 and not words[1].unread:
            text = self.sourced(posixpath.join(self.folder(), words[1].text))
            if text is not None and self.nested < _MAX_NESTED:
                before = self.variables.known.get("BASH_SOURCE", ShellValue("$BASH_SOURCE", ("$BASH_SOURCE",)))
                self.variables.known["BASH_SOURCE"] = words[1]
                self._text(text, words[2:] or None, line)
                self.variables.known["BASH_SOURCE"] = before
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
                in_background=self._mark == "&",
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

    def _text(self, text: str, arguments: Sequence[ShellValue] | None, line: int) -> None:
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

    def _within(self, tokens: Sequence[ShellToken], arguments: Sequence[ShellValue] | None) -> None:
        """Follow tokens in this place, with arguments of their own if they have some."""
        if self.nested >= _MAX_NESTED or self.steps > _MAX_STEPS:
            return
        before, in_function, hidden = self.variables.arguments, self.variables.in_function, self.hidden
        self.nested += 1
        with self.body() as body:
            if arguments is not None:
                self.variables.set_arguments(arguments)
                self.variables.in_function, self.hidden = True, {}
            self._run(tokens)
            if arguments is not None:
                for name, value in self.hidden.items():
                    body.assigned.pop(name, None)
                    self.variables.known.pop(name, None)
                    self.variables.known |= {} if value is None else {name: value}
                self.variables.set_arguments(before)
                self.variables.in_function, self.hidden = in_function, hidden
        self.nested -= 1

    def _calculation(self, text: str) -> Ended:
        for found in _CHANGED.finditer(text):
            name = found[1] or found[2]
            if name in self.variables.known:
                self.variables.known[name] = ShellValue(f"${name}", (f"${name}",))
        outcome = outcome_of_calculation(self.variables.filled(text))
        return Ended(outcome, outcome)

    def _condition_word(self, token: ShellToken) -> ConditionWord:
        self.variables.in_test = True
        value = self.variables.assigned(token.pieces)
        self.variables.in_test = False
        is_quoted = any(piece.quoted for piece in token.pieces)
        return ConditionWord(value.text, not value.unread, is_quoted)

    # -- here-documents

    def _here_document(self, words: list[ShellToken], body: ShellToken, target: ShellToken) -> None:
        """Process a here-document: the value of ``read``, a script for a shell, or a file."""
        plain = [token.plain for token in words]
        if plain[:1] == ["read"] and NAME.fullmatch(plain[-1]):
            self.assign(plain[-1], self.variables.assigned(body.pieces), body.line)
        elif {*plain[:1], *plain[-1:]} & _SHELLS or (plain == ["cat"] and self._mark == "|"):
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


def _is_of_pattern(word: ConditionWord, pattern: ConditionWord) -> Outcome:
    """True if the word of a ``case`` is one of a pattern."""
    if pattern.text == "*":
        return True
    return fnmatch.fnmatchcase(word.text, pattern.text) if word.is_known and pattern.is_known else None


def _vary(condition: Iterable[ShellToken]) -> bool:
    """True for the condition of a loop whose outcome may change from one round to the next."""
    pieces = [piece for token in condition for piece in token.pieces]
    return any(re.search("[A-Za-z]", one.text) if one.kind == "condition" else one.kind != "text" for one in pieces)
