"""Quoting of all text that goes into a batch script or onto a command line.

Quotes do not help against a line break in an ``#SBATCH`` line: the rest becomes a line of the script. So control
characters are rejected here, whatever was validated before.
"""

import shlex
from collections.abc import Iterable

from rlhf_core.errors import SubmissionFailed
from rlhf_core.schemas.slurm_values import CONTROL, NODE_NAMES, VARIABLE


def one_line(name: str, value: str) -> str:
    """Return the value of an option unchanged, if it is one line.

    Raises:
        SubmissionFailed: it contains a control character, such as a line break; the message names the option.
    """
    if CONTROL.search(value):
        raise SubmissionFailed(
            f"{name}: found {value!r}, expected text without control characters, because it becomes part of a batch "
            "script. Correct it in the config, or move the run to a folder with a path without them"
        )
    return value


def command_line(words: Iterable[str]) -> str:
    """Quote words as a shell command. Inside quotes, a line break is harmless.

    Raises:
        SubmissionFailed: a word contains a NUL character, which would terminate it.
    """
    return shlex.join(_without_nul("command", word) for word in words)


def exported(name: str, value: str) -> str:
    """The line that exports a variable; its value may span several lines.

    Raises:
        SubmissionFailed: the name is invalid, or the value contains a NUL character.
    """
    if not VARIABLE.fullmatch(name):
        raise SubmissionFailed(f"found {name!r}, expected the name of a variable: letters, digits and _")
    return f"export {name}={shlex.quote(_without_nul(name, value))}"


def _without_nul(name: str, value: str) -> str:
    if "\0" in value:
        raise SubmissionFailed(f"{name}: found a NUL character in {value!r}, expected text without it; remove it")
    return value


def is_node_name(text: str) -> bool:
    """True if the text is a valid node name, or names in Slurm's short form (``node[1-3]``)."""
    return NODE_NAMES.fullmatch(text) is not None
