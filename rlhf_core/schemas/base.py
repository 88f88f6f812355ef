"""Base class of every schema (frozen, strict about unknown keys), and the types of its fields.

Data that crosses a process boundary may be stored, and a file may hold anything. So numbers are bounded to the range of
both databases' columns, times carry a time zone, and texts are made storable in both. A line outside these bounds is
skipped, and nothing else is.
"""

from datetime import UTC, datetime
from typing import Annotated

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field

LABEL_CHARACTERS = 256
"""Longest text that the history searches by: PostgreSQL's index takes 2,704 bytes of a row."""
MESSAGE_CHARACTERS = 65_536
"""Longest message."""
NUL = "\x00"
NUL_SHOWN = "␀"
"""Replacement of a NUL character, which PostgreSQL cannot hold."""

_CUT = "…"


def storable_text(text: str, limit: int | None = None) -> str:
    """Make a text storable in both databases and UTF-8 files: without NUL and lone surrogates, and cut at a limit.

    Args:
        limit: most characters; None for any number.
    """
    if not text.isascii():
        text = text.encode("utf-8", errors="backslashreplace").decode("utf-8")
    text = text.replace(NUL, NUL_SHOWN)
    return text if limit is None or len(text) <= limit else text[: limit - 1] + _CUT


def label_problem(text: str) -> str:
    """Describe the problem with a name that a user gives; empty if it can be stored and shown unchanged."""
    if len(text) > LABEL_CHARACTERS:
        return f"found {len(text)} characters, expected at most {LABEL_CHARACTERS}"
    if storable_text(text) != text or not text.isprintable():
        return f"found {text!r}, expected text without control characters"
    return ""


def _storable(limit: int) -> BeforeValidator:
    return BeforeValidator(lambda value: storable_text(value, limit) if isinstance(value, str) else value)


Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
"""Number of a column ``INTEGER``: steps, attempts, ranks, counts."""
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
"""Number of a column ``BIGINT``: bytes, positions, sequences, tokens."""
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""Setting that counts something, at least one of it."""
NonNegative = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""Setting that counts something, or 0."""
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
"""A measure that was taken: SQLite has no NaN."""
Moment = Annotated[AwareDatetime, Field(ge=datetime(1900, 1, 1, tzinfo=UTC), lt=datetime(3000, 1, 1, tzinfo=UTC))]
"""An aware time that every time zone and both databases can express."""
Label = Annotated[str, _storable(LABEL_CHARACTERS)]
"""A name: of a node, a user, a run. Made storable, never refused: :func:`label_problem` is for doors."""
Message = Annotated[str, _storable(MESSAGE_CHARACTERS)]
"""Message or path."""

ImportPath = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
"""Python object of a module, as `module:function`."""
OptionalImportPath = Annotated[str, Field(pattern=r"^([A-Za-z_][\w.]*:[A-Za-z_]\w*)?$")]
"""The same, or nothing."""


class Schema(BaseModel):
    """Immutable data. An unknown key is an error; the string under a field is its meaning.

    NaN and infinity are legal in floats and travel through JSON as the strings ``NaN`` / ``Infinity``, because a
    diverged run must be able to say so.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        ser_json_inf_nan="strings",
    )


def utc_now() -> datetime:
    """The present moment, with its time zone. All times in files and rows are UTC."""
    return datetime.now(UTC)
