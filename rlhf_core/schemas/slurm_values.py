"""Types of the values of ``[slurm]``, which are used in batch scripts and options of sbatch."""

import re
from typing import Annotated

from pydantic import AfterValidator

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
"""Line breaks and invisible characters."""
NODE_NAMES = re.compile(r"[A-Za-z0-9][\w.,\[\]-]*", re.ASCII)
"""A node name, or several in Slurm's short form."""
VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
"""Name of a variable."""
_CONTROL_IN_LINES = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
_OPTION = re.compile(r"(?:--)?[a-z][a-z0-9_-]*(?:=.*)?", re.DOTALL)


def _without(characters: re.Pattern[str], expected: str) -> AfterValidator:
    def check(text: str) -> str:
        if characters.search(text):
            raise ValueError(f"found {text!r}, expected {expected}; remove them")
        return text

    return AfterValidator(check)


def _matching(pattern: re.Pattern[str], expected: str) -> AfterValidator:
    def check(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError(f"found {text!r}, expected {expected}")
        return text

    return AfterValidator(check)


OneLine = Annotated[str, _without(CONTROL, "one line without control characters")]
"""Value of an option."""
Lines = Annotated[str, _without(_CONTROL_IN_LINES, "text without control characters except line breaks")]
"""Shell code of the user, or the value of a variable."""
NodeName = Annotated[str, _matching(NODE_NAMES, "the name of a node, or names in Slurm's short form: node[1-3]")]
SbatchOption = Annotated[OneLine, _matching(_OPTION, "an option of sbatch as --option=value")]
VariableName = Annotated[str, _matching(VARIABLE, "the name of a variable: letters, digits and _, no digit first")]
