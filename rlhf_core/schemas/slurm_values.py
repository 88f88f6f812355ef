"""Types of the values of ``[slurm]``, which become lines of a batch script and options of sbatch."""

import re
from typing import Annotated

from pydantic import AfterValidator

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_CONTROL_IN_LINES = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
_NODE = re.compile(r"[A-Za-z0-9][\w.,\[\]-]*", re.ASCII)
_OPTION = re.compile(r"(?:--)?[a-z][a-z0-9_-]*(?:=.*)?", re.DOTALL)
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def _one_line(text: str) -> str:
    if _CONTROL.search(text):
        raise ValueError(f"found {text!r}, expected one line without control characters; remove them")
    return text


def _lines(text: str) -> str:
    if _CONTROL_IN_LINES.search(text):
        raise ValueError(f"found {text!r}, expected text without control characters but line breaks; remove them")
    return text


def _node(text: str) -> str:
    if not _NODE.fullmatch(text):
        raise ValueError(f"found {text!r}, expected the name of a node, or names in Slurm's short form: node[1-3]")
    return text


def _option(text: str) -> str:
    if not _OPTION.fullmatch(_one_line(text)):
        raise ValueError(f"found {text!r}, expected an option of sbatch as --option=value")
    return text


def _variable(text: str) -> str:
    if not _VARIABLE.fullmatch(text):
        raise ValueError(f"found {text!r}, expected the name of a variable: letters, digits and _, no digit first")
    return text


OneLine = Annotated[str, AfterValidator(_one_line)]
"""A value of an option."""
Lines = Annotated[str, AfterValidator(_lines)]
"""Shell code of the user, or the value of a variable."""
NodeName = Annotated[str, AfterValidator(_node)]
SbatchOption = Annotated[str, AfterValidator(_option)]
VariableName = Annotated[str, AfterValidator(_variable)]
