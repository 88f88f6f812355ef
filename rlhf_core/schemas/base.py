"""The base of every schema: frozen, strict about unknown keys, described under its fields."""

from datetime import UTC, datetime

from pydantic import BaseModel, ConfigDict


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
