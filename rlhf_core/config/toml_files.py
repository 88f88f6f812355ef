"""TOML files of users, read within bounds."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_core.errors import BadConfig
from rlhf_core.files.reading import UnfitFile, read_document
from rlhf_core.schemas.base import storable_text

MAX_CONFIG_BYTES = 128 << 10
"""Maximum size of a TOML file: a config with every setting has about 30 KiB, and parsing a megabyte takes a second."""
_MAX_DEPTH = 20
_MAX_VALUES = 20_000
_MAX_INTEGER = 10**100
SHOWN_CHARACTERS = 200

_TOML_TEXT = re.compile(r'''"""(?:\\.|[^\\])*?"""|\'{3}.*?\'{3}|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|\#[^\n]*''', re.DOTALL)
"""Strings and comments."""
_TOML_MARKS = re.compile(r"[=,{}\[\]]")


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file, with bounded time and memory for any content.

    Raises:
        BadConfig: it is too large, not UTF-8, not TOML, or contains something that no setting accepts; names the place.
        OSError: it does not exist or cannot be read.
    """
    try:
        # Some editors begin files with a byte order mark, which tomllib does not accept.
        text = read_document(path, MAX_CONFIG_BYTES, follow_link=True).decode("utf-8-sig")
        require_short_keys(text, str(path))
        content = tomllib.loads(text)
    except UnfitFile as error:
        raise BadConfig(f"{path} is not a readable config: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise BadConfig(f"{path} is not UTF-8 text: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise BadConfig(f"{path} is not valid TOML: {error}{_key_at(text, error)}{_unclosed(text)}") from None
    except RecursionError:
        raise BadConfig(f"{path}: found arrays or tables nested too deeply, expected at most {_MAX_DEPTH}") from None
    except ValueError:  # raised by int() for more digits than Python converts
        raise BadConfig(f"{path}: found an integer of thousands of digits") from None
    require_bounded(content, str(path))
    return content


def _key_at(text: str, error: tomllib.TOMLDecodeError) -> str:
    """Name the key or table of the line that an error names: the parser says only that a value is there already."""
    place = re.search(r"at line (\d+)", str(error))
    line = text.split("\n")[int(place[1]) - 1] if place else ""
    # Only the key: a value may be a secret.
    key = re.match(r"\s*(\[+[^\]]*\]+|[\w.-]+(?=\s*=))", line)
    return f", in {readable(key[1])}" if key else ""


def _unclosed(text: str) -> str:
    """Name the first bracket that is never closed: the parser reports only a later line that does not fit into it."""
    blank = _TOML_TEXT.sub(lambda found: re.sub(r"[^\n]", "_", found[0]), text)
    opened: list[tuple[str, int]] = []
    for number, line in enumerate(blank.splitlines(), 1):
        for mark in re.findall(r"[\[\]{}]", line):
            if mark in "[{":
                opened.append((mark, number))
            elif opened:
                opened.pop()
    return f"; the {opened[0][0]} in line {opened[0][1]} is never closed" if opened else ""


def require_short_keys(text: str, source: str) -> None:
    """Refuse keys of very many parts: Python's parser takes time quadratic in their number.

    Raises:
        BadConfig: a key has too many parts.
    """
    for number, line in enumerate(_TOML_TEXT.sub("_", text).splitlines(), 1):
        if max(part.count(".") for part in _TOML_MARKS.split(line)) > _MAX_DEPTH:
            raise BadConfig(f"{source}: found a key of more than {_MAX_DEPTH} parts, near line {number}")


def require_bounded(content: Mapping[str, Any], source: str) -> None:
    """Refuse content that no setting accepts, before processing that takes time or memory for each part of it.

    Raises:
        BadConfig: too deep, too many values, an integer too large, or text that cannot be stored.
    """
    left: list[tuple[str, Any, int]] = [("", content, 0)]
    num_values = 0
    while left:
        name, value, depth = left.pop()
        num_values += 1
        problem = _unbounded(value, depth, num_values)
        if problem:
            raise BadConfig(f"{source}: {shortened(name)}: {problem}" if name else f"{source}: {problem}")
        if isinstance(value, Mapping):
            for key, item in value.items():
                if storable_text(key) != key:
                    raise BadConfig(f"{source}: found the key {shortened(key)}, which cannot be stored")
                left.append((f"{name}.{key}"[-SHOWN_CHARACTERS:].lstrip("."), item, depth + 1))
        elif isinstance(value, list):
            left += [(name, item, depth + 1) for item in value]


def _unbounded(value: Any, depth: int, num_values: int) -> str:
    if depth > _MAX_DEPTH:
        return f"found arrays or tables nested more deeply than {_MAX_DEPTH}"
    if num_values > _MAX_VALUES:
        return f"found more than {_MAX_VALUES} values, expected the settings of one run"
    if isinstance(value, int) and abs(value) > _MAX_INTEGER:
        return "found an integer of more than 100 digits"
    if isinstance(value, str) and storable_text(value) != value:
        return f"found {shortened(value)}, which has a NUL character or invalid Unicode and cannot be stored"
    return ""


def shortened(found: Any) -> str:
    """Format a value for a message: as Python writes it, but shortened."""
    return readable(repr(found))


def readable(text: str) -> str:
    """Return the beginning of a long text, with its length; return a short text unchanged."""
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}... ({len(text)} characters)"
