"""Printing for every command: tables for people, JSON for programs, errors for both.

Results go to standard output; notes, progress and errors go to standard error, so that ``rlhf ... --json | jq`` works.
"""

import math
import os
import sys
import tempfile
import traceback
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rlhf_core.errors import RlhfError
from rlhf_core.files import private as private_files
from rlhf_core.text.escaping import json_text, storable, terminal
from rlhf_core.text.formatting import duration
from rlhf_core.text.redaction import masked

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
"""The ``--json`` switch of every reading command."""

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


def output() -> Console:
    """Standard output. Made anew at every call, because tests and pipes exchange the stream."""
    return _console(sys.stdout)


def errors() -> Console:
    """Standard error."""
    return _console(sys.stderr)


def _console(stream: Any) -> Console:
    # In a pipe or a log file nothing is 80 columns wide: wrapped tables could not be read or searched there.
    width = None if stream.isatty() or "COLUMNS" in os.environ else 160
    # Without emoji: `rewards:star: it raised ...` names a function.
    return Console(file=stream, width=width, highlight=False, emoji=False, soft_wrap=False)


def print_json(value: object) -> None:
    """Print a value as JSON: schemas, dataclass-like mappings, times and paths included; NaN as the text ``"NaN"``."""
    sys.stdout.write(json_text(jsonable(value), indent=2, allow_nan=False) + "\n")


def print_json_rows(rows: Iterable[object], limit: int | None = None) -> bool:
    """Print values as a list in JSON, each as soon as it comes; True if there were more than the limit.

    The text printed before ``rows`` raises is no whole list, so that a part is not taken for the whole answer.
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
    """The value in plain JSON types."""
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
    """A table for people; cells are printed as they are, without markup. Columns of numbers are right-aligned.

    Args:
        width: columns of the terminal: sentences are then folded rather than names and figures, as far as that goes.
    """
    content = [[_cell(value) for value in row] for row in rows]
    found = Table(
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
        found.add_column(
            escape(terminal(name)),
            justify="right" if numeric else "left",
            overflow="fold",
            width=None if widths is None else widths[index],
        )
    for row in content:
        found.add_row(*(_styled(text) for text in row))
    return found


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "", spare: str = "") -> None:
    """Print a table to standard output.

    Args:
        spare: a column that is left out where the others would not fit beside it.
    """
    content = [list(row) for row in rows]
    spared = set() if fits(columns, content) else {spare}
    kept = [index for index, name in enumerate(columns) if name not in spared or not name]
    console = output()
    shown = [[row[index] for index in kept] for row in content]
    console.print(table([columns[index] for index in kept], shown, title, console.width))


def fits(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> bool:
    """True if a table has room on standard output without a name or a figure being folded."""
    return _widths(columns, [[_cell(value) for value in row] for row in rows], output().width) is not None


def print_records(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows one below the other, a line for each value: for what is too wide for a table."""
    widest = max(map(len, columns))
    blocks = [
        "\n".join(f"{name:{widest}}  {_cell(value)}" for name, value in zip(columns, row, strict=True)) for row in rows
    ]
    print_text("\n\n".join(blocks))


def print_text(text: str) -> None:
    """Print a sentence to standard output, without markup."""
    output().print(terminal(text), markup=False, soft_wrap=True)


def note(text: str) -> None:
    """Say something in passing, on standard error."""
    errors().print(terminal(text), markup=False, style="dim", soft_wrap=True)


def warn(text: str) -> None:
    """Say something that matters but does not end the command, on standard error."""
    errors().print(terminal(f"warning: {text}"), markup=False, style="yellow", soft_wrap=True)


def print_error(error: RlhfError) -> None:
    """Print an error that was raised on purpose: its message says all there is to say."""
    console = errors()
    console.print("error: ", style="bold red", end="")
    console.print(terminal(str(error)), markup=False, soft_wrap=True)


def report_unexpected(error: BaseException, folder: Path) -> None:
    """Print one sentence about an unforeseen error, and keep its traceback in a file for a bug report."""
    text = storable(masked(f"{' '.join(sys.argv)}\n\n{''.join(traceback.format_exception(error))}"))
    name = f"error-{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}.log"
    for wanted in (folder, None):
        try:
            place = _private_place(wanted)
            private_files.write_new(place / name, text)
        except OSError:
            continue
        where = f"The traceback is in {place / name}; please report it as a bug."
        break
    else:
        where = f"Its traceback could not be stored:\n{text}"
    console = errors()
    console.print("unexpected error: ", style="bold red", end="")
    console.print(terminal(f"{type(error).__name__}: {error}\n{where}"), markup=False, soft_wrap=True)


def _private_place(folder: Path | None) -> Path:
    if folder is None:
        return Path(tempfile.mkdtemp(prefix="rlhf-error-"))
    private_files.make_folder(folder)
    return folder


def open_page(path: Path) -> None:
    """Open a page in a browser, and say so where there is none."""
    import webbrowser

    if not webbrowser.open(path.as_uri()):
        warn("found no browser to open it with")


def seconds_text(seconds: float | None) -> str:
    """A duration for people; ``-`` when not known."""
    return "-" if seconds is None else duration(seconds)


def state_text(state: str, regressed: Sequence[Mapping[str, Any]]) -> str:
    """The state of a run, with what must not be missed beside it."""
    from rlhf_core.schemas import regression

    return regression.state_text(state, map(regression.Regression.model_validate, regressed))


def regression_text(regressed: Sequence[Mapping[str, Any]]) -> str:
    """Held-out scores that fell, for people."""
    from rlhf_core.schemas import regression

    return regression.regression_text(map(regression.Regression.model_validate, regressed))


def measured_text(measured: Mapping[str, Any] | None) -> str:
    """An evaluation for people: its value with its interval, ``0.930 [0.880, 0.980]``; ``-`` where there is none."""
    if measured is None or measured["value"] is None:
        return "-"
    low, high = measured["ci_low"], measured["ci_high"]
    interval = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
    return f"{measured['value']:.3f}{interval}"


_SHORT, _SHORT_FIGURE = 12, 20
"""Cells that are no longer are not folded: states and names; durations, dates, values with their interval."""

_BETWEEN = 3
"""Characters between two columns."""


def _widths(columns: Sequence[str], content: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """Widths of columns that fit together with only sentences folded; None where there are none."""
    cells = [[name, *(row[index] for row in content)] for index, name in enumerate(columns)]
    whole = [max(map(len, column)) for column in cells]
    least = [max(map(_unfolded, column)) for column in cells]
    room = width - _BETWEEN * (len(columns) - 1)
    if sum(whole) <= room:
        return whole
    if sum(least) > room:
        return None
    wishes = [most - few for most, few in zip(whole, least, strict=True)]
    left = room - sum(least)
    return [few + left * wish // sum(wishes) for few, wish in zip(least, wishes, strict=True)]


def _unfolded(text: str) -> int:
    """Length of the longest part of a cell that is to stay in one line."""
    short = _SHORT_FIGURE if any(map(str.isdigit, text)) else _SHORT
    return len(text) if len(text) <= short else max(map(len, text.split()), default=0)


def _cell(value: object) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
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
