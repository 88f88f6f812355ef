"""Rows of data files, and the names in the templates that are filled from them.

The preflight checks and the run itself use the same readers, which name the file and number of a bad line.
"""

import codecs
import csv
import json
import math
import string
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue


@dataclass(frozen=True)
class Malformed:
    """Problem of an invalid row, without its place."""

    problem: str
    ends_file: bool = False
    """True if nothing after it can be read."""


FileRow = tuple[int, Mapping[str, JsonValue] | Malformed]
"""Place of a row in its file (lines from 1, rows of Parquet from 0), and its columns."""


def place(path: Path, number: int) -> str:
    """Name the place of a row for a message."""
    return f"{path}: row {number}" if path.suffix.lower() == ".parquet" else f"{path}:{number}"


def _read_jsonl(path: Path) -> Iterator[FileRow]:
    with path.open("rb") as file:
        for number, line in enumerate(_without_mark(file), start=1):
            if line.strip():
                yield number, _parse_line(line)


def _parse_line(line: bytes) -> Mapping[str, JsonValue] | Malformed:
    try:
        content = json.loads(line.decode().rstrip())
    except UnicodeDecodeError as error:
        return Malformed(f"not UTF-8 at byte {error.start + 1} of the line")
    except json.JSONDecodeError as error:
        return Malformed(f"not valid JSON: {error.msg} (character {error.pos + 1} of the line)")
    except ValueError:  # Python's own limit; nothing else is refused
        return Malformed(f"found an integer of more than {sys.get_int_max_str_digits()} digits; write it as text")
    except RecursionError:
        return Malformed("JSON is nested too deeply")
    if not isinstance(content, dict):
        return Malformed(f"expected a JSON object, found {type(content).__name__}")
    return content


def _read_csv(path: Path) -> Iterator[FileRow]:
    """Yield rows with every value as text: ``007`` is an answer, not the number 7."""
    with path.open("rb") as file:
        csv.field_size_limit(sys.maxsize)  # applies to the process; long texts exceed the default of 128 KiB
        reader = csv.reader((line.decode() for line in _without_mark(file)), strict=True)
        try:
            header = next(reader, [])
            if repeated := [name for name, times in Counter(header).items() if name and times > 1]:
                problem = f"found the column {repeated[0]!r} more than once: rename or remove all but one of them"
                yield reader.line_num, Malformed(problem, ends_file=True)
                return
            for cells in reader:
                if cells and len(cells) == len(header):
                    yield reader.line_num, dict(zip(header, cells, strict=True))
                elif cells:
                    yield reader.line_num, Malformed(f"found {len(cells)} values for {len(header)} columns")
        except csv.Error as error:
            yield reader.line_num, Malformed(f"not valid CSV: {error}", ends_file=True)
        except UnicodeDecodeError as error:
            problem = f"not UTF-8 at byte {error.start + 1} of the line"
            yield reader.line_num + 1, Malformed(problem, ends_file=True)


def _without_mark(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Lines of a file without the byte order mark that some programs write at its beginning."""
    for number, line in enumerate(lines):
        yield line if number else line.removeprefix(codecs.BOM_UTF8)


READERS: Mapping[str, Callable[[Path], Iterator[FileRow]]] = {".jsonl": _read_jsonl, ".csv": _read_csv}
"""Reader of each kind of text file, by file name suffix. Parquet is read on the nodes, which have a library for it
(``training/data/loading.py``)."""

KINDS = (*READERS, ".parquet")
"""File name suffixes of data files."""


def absent_value(value: object) -> str:
    """Name of a value that stands for none: null or NaN; empty for any other value."""
    if value is None:
        return "null"
    # Programs that write missing numbers as NaN are common; the text "nan" would be trained on.
    return "NaN" if isinstance(value, float) and math.isnan(value) else ""


def pair_problem(chosen: object, rejected: object) -> str:
    """Problem of a pair of completions; empty if the pair is usable for training."""
    for name, value in (("chosen", chosen), ("rejected", rejected)):
        if isinstance(value, Sized) and not value:  # the number 0 is a completion
            return f"the {name} completion is empty"
    return "the chosen and the rejected completion are the same" if chosen == rejected else ""


def first_answer(messages: Sequence[object]) -> int | None:
    """Index of the first message of the model in a conversation; None if it has none."""
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
    return roles.index("assistant") if "assistant" in roles else None


def label_of(value: object) -> bool | None:
    """Boolean of a label: true or false, 1 or 0, also as text; None for anything else."""
    return {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}.get(str(value).lower())


def template_columns(template: str) -> tuple[list[str], str]:
    """Names in a template, and its problem (empty if it is well-formed).

    Only plain ``{column}`` is allowed; ``{{`` and ``}}`` stand for braces.
    """
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        return [], f"{error}; write {{{{ and }}}} for literal braces"
    names = []
    for _, name, form, conversion in parts:
        if name is None:
            continue
        if not name or form or conversion or "." in name or "[" in name:
            shown = name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
            return [], f"found {{{shown}}}, expected {{column}} with a plain column name"
        names.append(name)
    return list(dict.fromkeys(names)), ""
