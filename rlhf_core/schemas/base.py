"""Base class of all schemas (frozen, strict about unknown keys), and field types.

Data that crosses a process boundary may be stored, and a file may contain anything. So numbers are limited to the range
of both databases' columns, times have a time zone, and texts are converted to a form that both can store. Only lines
outside these limits are skipped.
"""

import ast
import functools
import inspect
import itertools
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field

LABEL_CHARACTERS = 256
"""Longest searchable text of the history: PostgreSQL's index takes 2,704 bytes of a row."""
MESSAGE_CHARACTERS = 65_536
"""Longest message."""
NUL = "\x00"
NUL_SHOWN = "␀"
"""Replacement of a NUL character, which PostgreSQL cannot store."""

_CUT = "…"


def storable_text(text: str, limit: int | None = None) -> str:
    """Convert a text for both databases and UTF-8 files: without NUL and lone surrogates, truncated at a limit.

    Args:
        limit: maximum number of characters; None for no limit.
    """
    if not text.isascii():
        text = text.encode("utf-8", errors="backslashreplace").decode("utf-8")
    text = text.replace(NUL, NUL_SHOWN)
    return text if limit is None or len(text) <= limit else text[: limit - 1] + _CUT


def label_problem(text: str) -> str:
    """Describe the problem with a name given by a user; empty if it can be stored and shown unchanged."""
    if len(text) > LABEL_CHARACTERS:
        return f"found {len(text)} characters, expected at most {LABEL_CHARACTERS}"
    if storable_text(text) != text or not text.isprintable():
        return f"found {text!r}, expected text without control characters"
    return ""


def _storable(limit: int) -> BeforeValidator:
    return BeforeValidator(lambda value: storable_text(value, limit) if isinstance(value, str) else value)


Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
"""Range of an ``INTEGER`` column: steps, attempts, ranks, counts."""
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
"""Range of a ``BIGINT`` column: bytes, positions, sequences, tokens."""
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""Count of at least 1, for settings."""
NonNegative = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""Count of at least 0, for settings."""
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
LONGEST_S = 2**31 - 1
"""Longest duration of a setting in seconds, 68 years: clocks and timers overflow after 292."""
PositiveSeconds = Annotated[float, Field(gt=0, le=LONGEST_S, allow_inf_nan=False)]
NonNegativeSeconds = Annotated[float, Field(ge=0, le=LONGEST_S, allow_inf_nan=False)]
UnitInterval = Annotated[float, Field(ge=0, le=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
"""A measured value; SQLite has no NaN."""
Moment = Annotated[AwareDatetime, Field(ge=datetime(1900, 1, 1, tzinfo=UTC), lt=datetime(3000, 1, 1, tzinfo=UTC))]
"""An aware time within the range of every time zone and both databases."""
Label = Annotated[str, _storable(LABEL_CHARACTERS)]
"""A name of a node, a user or a run. Converted to a storable form, never rejected; :func:`label_problem` checks
input."""
Message = Annotated[str, _storable(MESSAGE_CHARACTERS)]
"""Message or path."""

ImportPath = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
"""Python object in a module, as `module:function`."""
OptionalImportPath = Annotated[str, Field(pattern=r"^([A-Za-z_][\w.]*:[A-Za-z_]\w*)?$")]
"""The same, or empty."""


class Schema(BaseModel):
    """Immutable data. An unknown key is an error; the string under a field is its meaning (:func:`field_docs`).

    NaN and infinity are legal in floats and stored in JSON as the strings ``NaN`` / ``Infinity``, because a diverged
    run must be able to report them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


@functools.cache
def field_docs(schema: type[BaseModel]) -> Mapping[str, str]:
    """The string under each field of a schema as one line, by the field's name; inherited fields included.

    Read from the source on request, for help, documentation and forms. pydantic can read it too
    (``use_attribute_docstrings``), but then does so at every start, which took a third of the time to import them.
    """
    found: dict[str, str] = {}
    for base in reversed(schema.__bases__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            found |= field_docs(base)
    return found | strings_under_names(schema)


def strings_under_names(described: type) -> dict[str, str]:
    """The string under each name in the body of a class, as one line; without those of its base classes."""
    found = {}
    for statement, below in itertools.pairwise(_class_definitions(described.__module__)[described.__name__].body):
        match statement, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.split())
    return found


@functools.cache
def _class_definitions(module: str) -> Mapping[str, ast.ClassDef]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def utc_now() -> datetime:
    """Return the current time. All times in files and rows are aware and in UTC."""
    return datetime.now(UTC)
