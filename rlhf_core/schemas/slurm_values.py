"""Values of ``[slurm]``, which are used in batch scripts and options of sbatch: their types, and what Slurm reads."""

import functools
import re
from collections.abc import Iterable
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


def is_named(name: str, texts: Iterable[str]) -> bool:
    """Return True if a node is one of those that these texts name, as names or in Slurm's short form."""
    return any(_is_in(name, pattern, ranges) for text in texts for pattern, ranges in _parsed(text))


@functools.lru_cache(maxsize=1024)
def _parsed(text: str) -> tuple[tuple[re.Pattern[str], tuple[str, ...]], ...]:
    """A pattern for each item of a list, with the ranges of its numbers: those of ``rack[1-2]node[01-16]`` are ``1-2``
    and ``01-16``."""
    parsed = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        literal_or_ranges = re.split(r"\[([^\[\]]*)\]", item)
        pattern = r"(\d+)".join(map(re.escape, literal_or_ranges[::2]))
        parsed.append((re.compile(pattern, re.ASCII), tuple(literal_or_ranges[1::2])))
    return tuple(parsed)


def _is_in(name: str, pattern: re.Pattern[str], ranges: tuple[str, ...]) -> bool:
    found = pattern.fullmatch(name)
    return found is not None and all(map(_contains, ranges, found.groups()))


def _contains(ranges: str, number: str) -> bool:
    """True if ``1-3,7`` contains a number; with as many digits as a range has that begins with zeros."""
    bounds = [(low, high or low) for low, _, high in (one.partition("-") for one in ranges.split(","))]
    return any(
        int(low) <= int(number) <= int(high) and len(number) == max(len(low), len(str(int(number))))
        for low, high in bounds
        if low.isdecimal() and high.isdecimal()
    )


def slurm_seconds(text: str) -> int | None:
    """Parse a Slurm time to seconds: minutes, ``m:s``, ``h:m:s``, ``d-h``, ``d-h:m``, ``d-h:m:s``."""
    found = re.fullmatch(r"(?:(\d{1,4})-)?(\d{1,7})(?::(\d{1,2}))?(?::(\d{1,2}))?", text, re.ASCII)
    if not found:
        return None
    days, first, second, third = (int(part) if part else 0 for part in found.groups())
    if found[1] is not None or found[4] is not None:
        seconds = days * 86_400 + first * 3600 + second * 60 + third
    else:
        seconds = first * 60 + second
    return seconds or None


OneLine = Annotated[str, _without(CONTROL, "one line without control characters")]
"""Value of an option."""
Lines = Annotated[str, _without(_CONTROL_IN_LINES, "text without control characters except line breaks")]
"""Shell code of the user, or the value of a variable."""
NodeName = Annotated[str, _matching(NODE_NAMES, "the name of a node, or names in Slurm's short form: node[1-3]")]
SbatchOption = Annotated[OneLine, _matching(_OPTION, "an option of sbatch as --option=value")]
VariableName = Annotated[str, _matching(VARIABLE, "the name of a variable: letters, digits and _, no digit first")]
