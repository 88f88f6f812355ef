"""Shell scripts, parsed without a shell: their commands and variables, and what only running them would reveal. Pure.

Nothing is executed. Variables that the script assigns are expanded, branches and loops followed where their conditions
are known, functions and sourced files read where they are called. Everything that depends on the machine (command
substitution, files, the user's environment) stays as written and is reported.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rlhf_core.shell.following import ScriptFollower
from rlhf_core.shell.lexer import ShellLexer, UnclosedShell
from rlhf_core.shell.values import ShellCommand, ShellValue
from rlhf_core.shell.variables import ShellVariables

MAX_CHARACTERS = 1 << 20
"""Longest script that is parsed."""


@dataclass(frozen=True)
class ShellScript:
    """Content of a script, as far as it is known without running it."""

    commands: tuple[ShellCommand, ...]
    unread: tuple[str, ...]
    """Constructs that were not understood, each with its line."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files that the script writes from a here-document, by name."""
    absent: tuple[str, ...] = ()
    """Arguments that the script uses without a default, but that are not given."""
    tested: tuple[str, ...] = ()
    """Arguments of which it only asks whether they are given, and that are not."""
    ends_in_pipe: bool = False
    """True if its last command is the last one of a pipe, whose exit code is thus its own."""


def read_shell(
    text: str,
    known: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
    sourced: Callable[[str], str | None] = lambda path: None,
    first_line: int = 1,
) -> ShellScript:
    """Parse a shell script. Never raises: constructs that are not understood are reported.

    Args:
        text: The script; one longer than ``MAX_CHARACTERS`` is not parsed at all.
        known: Variables known to have the same value on the machine that will run it, for instance HOME; ``0`` is
            the path of the script.
        arguments: Arguments of the script.
        sourced: Gives the text of a file that the script reads with ``source``; None for one that stays a command.
        first_line: Number of the first line.
    """
    if len(text) > MAX_CHARACTERS:
        return ShellScript((), (f"the script: it has {len(text)} characters, more than {MAX_CHARACTERS}",))
    variables = ShellVariables({name: ShellValue(value) for name, value in (known or {}).items()})
    if "0" in variables.known:
        variables.known["BASH_SOURCE"] = variables.known["0"]
    variables.set_arguments([ShellValue(argument) for argument in arguments])
    follower = ScriptFollower(variables, sourced)
    lexer = ShellLexer(text, line=first_line)
    try:
        follower.follow(lexer.tokens())
    except UnclosedShell as error:
        follower.notes.append(f"everything from line {lexer.line}: {error}")
    tested = tuple(name for name in variables.tested if name not in variables.absent)
    return ShellScript(
        tuple(follower.commands),
        tuple(follower.notes),
        dict(follower.files),
        tuple(variables.absent),
        tested,
        follower.ends_in_pipe,
    )
