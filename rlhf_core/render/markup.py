"""HTML without a template language, which escapes all text not built here, and number formats for readers."""

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from rlhf_core.schemas.regression import REGRESSED, Regression
from rlhf_core.text.escaping import page
from rlhf_core.text.formatting import duration as plain_duration

_HARD_SPACE = "\u00a0"


class Markup(str):
    """Text that is already HTML. Only this module, the drawings and the style sheet create it."""

    __slots__ = ()


def markup(value: object) -> Markup:
    """Convert a value to HTML, escaped unless it is :class:`Markup`."""
    return value if isinstance(value, Markup) else Markup(page(str(value)))


def join(parts: Iterable[object], separator: str = "") -> Markup:
    """Join several values."""
    return Markup(separator.join(markup(part) for part in parts))


def tag(name: str, *content: object, **attributes: object) -> Markup:
    """Build an element. Attribute names lose a trailing ``_`` (``class_``), and other ``_`` become ``-``; an attribute
    that is None or False is left out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{page(str(value))}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Markup(f"<{name}{written}>{join(content)}</{name}>")


def table(headers: Sequence[str], rows: Sequence[Sequence[object]], *, class_: str | None = None) -> Markup:
    """Build a table that scrolls sideways on a narrow screen. Columns of numbers are right-aligned."""
    numeric = [bool(rows) and all(_is_number(row[index]) for row in rows) for index in range(len(headers))]
    kinds = ["number" if is_numeric else None for is_numeric in numeric]
    head = tag("tr", *(tag("th", header, class_=kind) for header, kind in zip(headers, kinds, strict=True)))
    body = [
        tag("tr", *(tag("td", _cell(value), class_=kind) for value, kind in zip(row, kinds, strict=True)))
        for row in rows
    ]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body), class_=class_), class_="scroll")


def facts(pairs: Iterable[tuple[str, object]]) -> Markup:
    """Names and values side by side; pairs without a value are omitted."""
    rows = [tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs if value not in (None, "")]
    return tag("dl", *rows, class_="facts")


def remark(text: object) -> Markup:
    """A paragraph of secondary text."""
    return tag("p", text, class_="note")


def section(title: str, *content: object, note: object = "") -> Markup:
    """Build a titled part of the page."""
    return tag("section", tag("h2", title), remark(note) if note else "", *content)


def fold(summary: object, *content: object, is_open: bool = False) -> Markup:
    """Build a collapsible part, closed unless ``is_open``."""
    return tag("details", tag("summary", summary), *content, open="open" if is_open else None)


def figure(title: str, svg: str, caption: str) -> Markup:
    """A drawing with its title and an optional caption."""
    return tag("figure", tag("h3", title), Markup(svg), tag("figcaption", caption) if caption else "")


def code(text: object) -> Markup:
    """A name or a path in monospace."""
    return tag("code", text)


def badge(state: str) -> Markup:
    """A state as a coloured badge."""
    return tag("span", state, class_=f"badge {_STATE_CLASS.get(state, 'plain')}")


def badges(state: str, regressed: Sequence[Regression]) -> Markup:
    """The state of a run, with a second badge if a held-out score dropped."""
    beside = (badge(REGRESSED),) if state == "completed" and regressed else ()
    return join([badge(state), *beside], " ")


_STATE_CLASS: Mapping[str, str] = {
    "completed": "good",
    "passed": "good",
    "promoted": "good",
    "approved": "good",
    REGRESSED: "bad",
    "failed": "bad",
    "lost": "bad",
    "blocked": "bad",
    "cancelled": "warn",
    "preempted": "warn",
    "warning": "warn",
    "waiting": "warn",
    "refused": "warn",
    "expired": "warn",
}


# ---------------------------------------------------------------------------------------------------------------------
# Numbers and times


def number(value: float | None, digits: int = 4) -> str:
    """A number to ``digits`` significant digits; an en dash if there is none."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    if float(value).is_integer() and abs(value) < 10**6:
        return f"{int(value)}"
    if 1 <= abs(value) < 10**6:
        return f"{value:,.{max(0, digits - 1 - int(math.log10(abs(value))))}f}"
    return f"{value:.{digits}g}"


def signed(value: float) -> str:
    """A change with three decimals and its sign."""
    return f"{value:+.3f}".replace("-", "−")


def words(name: object) -> str:
    """A name as words: ``exact_match`` -> ``exact match``."""
    return str(name).replace("_", " ")


def duration(seconds: float | None) -> str:
    """A readable duration (:func:`rlhf_core.text.formatting.duration`); an en dash if unknown.

    Non-breaking spaces keep numbers and units together.
    """
    return "–" if seconds is None else plain_duration(seconds).replace(" ", _HARD_SPACE)


def as_time(value: object) -> datetime | None:
    """A time from the history, from a datetime or ISO text; None if there is none."""
    if isinstance(value, str) and value:
        value = datetime.fromisoformat(value)
    if not isinstance(value, datetime):
        return None
    return value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)


def moment(value: object) -> str:
    """A time to the second, UTC; an en dash if there is none."""
    found = as_time(value)
    return f"{found:%Y-%m-%d %H:%M:%S} UTC" if found else "–"


def clock(value: object) -> str:
    """The time of day, UTC; an en dash if there is none."""
    found = as_time(value)
    return f"{found:%H:%M:%S}" if found else "–"


def _cell(value: object) -> object:
    if value is None or value == "":
        return "–"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, datetime):
        return moment(value)
    if isinstance(value, list | tuple):
        return ", ".join(str(item) for item in value) or "–"
    return value


def _is_number(value: object) -> bool:
    return (isinstance(value, int | float) and not isinstance(value, bool)) or value is None
