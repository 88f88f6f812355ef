"""Output of every command: tables for users, JSON for programs, errors for both.

Results go to standard output; notes, progress and errors go to standard error, so that ``rlhf ... --json | jq`` works.
"""

import codecs
import io
import json
import math
import os
import sys
import tempfile
import traceback
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from enum import Enum
from itertools import compress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rlhf_core.errors import RlhfError
from rlhf_core.files import private as private_files
from rlhf_core.text.escaping import json_text, storable, terminal
from rlhf_core.text.formatting import duration, figure
from rlhf_core.text.redaction import masked

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
"""Option ``--json`` of every command that reads."""

STATE_STYLES: Mapping[str, str] = {
    "completed": "green",
    "completed, regressed": "yellow",
    "passed": "green",
    "training": "cyan",
    "evaluating": "cyan",
    "running": "cyan",
    "warning": "yellow",
    "skipped": "dim",
    "failed": "red",
    "blocked": "red",
    "lost": "red",
    "cancelled": "magenta",
    "preempted": "magenta",
}
"""Colours of states, the same in every table."""

_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def escape_unprintable() -> None:
    """Escape characters that the encoding of standard output lacks, as of completions on a terminal without UTF-8,
    instead of raising. The escape sequence is that of JSON, so JSON remains the same data."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error("rlhf-escape", _escaped)
        sys.stdout.reconfigure(errors="rlhf-escape")


def _escaped(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def output() -> Console:
    """Console on standard output. Created at every call, because tests and pipes replace the stream."""
    return _console(sys.stdout)


def errors() -> Console:
    """Console on standard error."""
    return _console(sys.stderr)


def _console(stream: Any) -> Console:
    # A pipe or log file has no width, and 80 columns, the default, would wrap tables beyond reading or searching.
    width = None if stream.isatty() or "COLUMNS" in os.environ else 160
    # No emoji: in `rewards:star: it raised ...`, `:star:` is part of a function's name.
    return Console(file=stream, width=width, highlight=False, emoji=False, soft_wrap=False)


def print_json(value: object) -> None:
    """Print a value as JSON: schemas, dataclass-like mappings, times and paths included; NaN as the text ``"NaN"``."""
    sys.stdout.write(json_text(jsonable(value), indent=2, allow_nan=False) + "\n")


def print_json_rows(rows: Iterable[object], limit: int | None = None) -> bool:
    """Print values as a JSON list, each as soon as it is available; return True if there were more than the limit.

    If ``rows`` raises, the list stays open, so that a partial result cannot be mistaken for a complete one.
    """
    before = "["
    for number, row in enumerate(rows):
        if number == limit:
            sys.stdout.write("\n]\n")
            return True
        text = json_text(jsonable(row), indent=2, allow_nan=False).replace("\n", "\n  ")
        sys.stdout.write(f"{before}\n  {text}")
        before = ","
    sys.stdout.write("[]\n" if before == "[" else "\n]\n")
    return False


def jsonable(value: object) -> Any:
    """Convert a value to plain JSON types."""
    if isinstance(value, bool | int | str) or value is None:
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else _NOT_FINITE[str(value)]
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "model_dump"):
        return jsonable(value.model_dump(mode="python"))
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, Iterable):
        return [jsonable(item) for item in value]
    raise TypeError(f"found a {type(value).__name__} in what --json prints, expected plain data")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "", width: int | None = None) -> Table:
    """Build a table; cells are printed verbatim, without markup. Columns of numbers are right-aligned.

    Args:
        width: width of the terminal in characters. If given, sentences are folded rather than names and figures, where
            possible.
    """
    content = [[_cell(value) for value in row] for row in rows]
    built = Table(
        title=escape(terminal(title)) or None,
        title_justify="left",
        header_style="bold",
        show_edge=False,
        pad_edge=False,
        show_header=any(columns),
    )
    widths = None if width is None else _widths(columns, content, width)
    for index, name in enumerate(columns):
        numeric = bool(content) and all(_is_number(row[index]) for row in content)
        built.add_column(
            escape(terminal(name)),
            justify="right" if numeric else "left",
            overflow="fold",
            width=None if widths is None else widths[index],
        )
    for row in content:
        built.add_row(*(_styled(text) for text in row))
    return built


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "", spare: str = "") -> None:
    """Print a table to standard output; if it is far too wide, its rows one below the other.

    Args:
        spare: name of the column to omit if the table is too wide.
    """
    width = output().width
    content = [[_cell(value) for value in row] for row in rows]
    if spare and _widths(columns, content, width) is None:
        kept = [name != spare for name in columns]
        columns, content = [*compress(columns, kept)], [[*compress(row, kept)] for row in content]
    if content and _would_fold_words(columns, content, width):
        if title:
            print_text(title)
        print_records(columns, content)
    else:
        output().print(table(columns, content, title, width))


def print_section(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str = "", spare: str = "") -> None:
    """Print a table below an empty line; nothing if it has no rows."""
    if rows:
        print_text("")
        print_table(columns, rows, title, spare)


def fits(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> bool:
    """True if a table fits on standard output without folding a name or a figure."""
    return _widths(columns, [[_cell(value) for value in row] for row in rows], output().width) is not None


def print_records(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows one below the other, with one line per value, for data that is too wide for a table."""
    widest = max(map(cell_len, columns))
    blocks = [
        "\n".join(f"{set_cell_size(name, widest)}  {_cell(value)}" for name, value in zip(columns, row, strict=True))
        for row in rows
    ]
    print_text("\n\n".join(blocks))


def print_text(text: str) -> None:
    """Print a sentence to standard output, without markup."""
    output().print(terminal(text), markup=False, soft_wrap=True)


def note(text: str) -> None:
    """Print a remark to standard error."""
    errors().print(terminal(text), markup=False, style="dim", soft_wrap=True)


def warn(text: str) -> None:
    """Print a warning to standard error; the command continues."""
    errors().print(terminal(f"warning: {text}"), markup=False, style="yellow", soft_wrap=True)


def print_error(error: RlhfError) -> None:
    """Print the message of an expected error, without a traceback."""
    console = errors()
    console.print("error: ", style="bold red", end="")
    console.print(terminal(str(error)), markup=False, soft_wrap=True)


def report_unexpected(error: BaseException, folder: Path | None) -> None:
    """Print one sentence about an unexpected error, and write its traceback to a file for a bug report.

    Args:
        folder: Folder for the file; None for a temporary one.
    """
    text = storable(masked(f"{' '.join(sys.argv)}\n\n{''.join(traceback.format_exception(error))}"))
    name = f"error-{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}.log"
    for candidate in (folder, None):
        try:
            target = _private_folder(candidate)
            private_files.write_new(target / name, text)
        except OSError:
            continue
        location = f"The traceback is in {target / name}; please report it as a bug."
        break
    else:
        location = f"Its traceback could not be stored:\n{text}"
    console = errors()
    console.print("unexpected error: ", style="bold red", end="")
    console.print(terminal(f"{type(error).__name__}: {error}\n{location}"), markup=False, soft_wrap=True)


def _private_folder(folder: Path | None) -> Path:
    if folder is None:
        return Path(tempfile.mkdtemp(prefix="rlhf-error-"))
    private_files.make_folder(folder)
    return folder


def open_page(path: Path) -> None:
    """Open a page in a browser; warn if there is none."""
    import webbrowser

    if not webbrowser.open(path.as_uri()):
        warn("found no browser to open it with")


def seconds_text(seconds: float | None) -> str:
    """Format a duration; ``-`` if unknown."""
    return "-" if seconds is None else duration(seconds)


def measured_text(measured: Mapping[str, Any] | None) -> str:
    """Format the value of an evaluation with its interval: ``0.930 [0.880, 0.980]``; ``-`` if there is none."""
    if measured is None or measured["value"] is None:
        return "-"
    low, high = measured["ci_low"], measured["ci_high"]
    interval = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
    return f"{measured['value']:.3f}{interval}"


_SHORT, _SHORT_FIGURE = 12, 20
"""Lengths up to which cells are never folded: of states and names; of durations, dates and values with an interval."""

_BETWEEN = 3
"""Number of characters between two columns."""


def _widths(columns: Sequence[str], content: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """Column widths at which the table fits and only sentences are folded; None if it cannot fit.

    Chinese, Japanese and Korean characters take two columns of a terminal each.
    """
    cells = [[name, *(row[index] for row in content)] for index, name in enumerate(columns)]
    whole = [max(map(cell_len, column)) for column in cells]
    least = [max(map(_unfolded, column)) for column in cells]
    available = width - _BETWEEN * (len(columns) - 1)
    if sum(whole) <= available:
        return whole
    if sum(least) > available:
        return None
    excess = [whole_width - least_width for whole_width, least_width in zip(whole, least, strict=True)]
    remaining = available - sum(least)
    return [least_width + remaining * more // sum(excess) for least_width, more in zip(least, excess, strict=True)]


def _would_fold_words(columns: Sequence[str], content: Sequence[Sequence[str]], width: int) -> bool:
    """True if the table is so wide that even short words would be folded, and not only paths or long names."""
    least = [max(map(_unfolded, (name, *column))) for name, *column in zip(columns, *content, strict=True)]
    return sum(min(each, _SHORT) for each in least) > width - _BETWEEN * (len(columns) - 1)


def _unfolded(text: str) -> int:
    """Width of the longest part of a cell that must not be folded."""
    short = _SHORT_FIGURE if any(map(str.isdigit, text)) else _SHORT
    return cell_len(text) if cell_len(text) <= short else max(map(cell_len, text.split()), default=0)


def _cell(value: object) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return figure(value)
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, tuple | list | set | frozenset):
        return ", ".join(_cell(item) for item in value) or "-"
    return terminal(str(value))


def _styled(text: str) -> str:
    style = STATE_STYLES.get(text)
    return f"[{style}]{escape(text)}[/]" if style else escape(text)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text == "-"
    return True
