"""Column types and the base class of the tables."""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, DateTime, Dialect, Double, ForeignKey, Integer, MetaData, Text, TypeDecorator
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeEngine

from rlhf_core.schemas.base import storable_text


class UtcDateTime(TypeDecorator[datetime]):
    """An aware UTC time. In SQLite, which has no time zones, it is stored without one and read as UTC."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert to the stored form; a naive time is an error, because it is ambiguous."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"found the time {value} without a time zone, expected an aware time")
        moment = value.astimezone(UTC)
        return moment.replace(tzinfo=None) if dialect.name == "sqlite" else moment

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert from the stored form; always aware."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class CleanText(TypeDecorator[str]):
    """Text from any source. Characters that a database or UTF-8 reader cannot process (NUL, lone surrogates) are
    replaced when it is stored, on both databases."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Convert to the stored form."""
        return None if value is None else storable_text(value)


class CleanJson(TypeDecorator[Any]):
    """JSON; in PostgreSQL as ``jsonb``. Texts in it are replaced as in :class:`CleanText`."""

    impl = JSON
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """Choose the type of the database."""
        if dialect.name == "postgresql":
            return dialect.type_descriptor(JSONB(none_as_null=True))
        return dialect.type_descriptor(JSON(none_as_null=True))

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        """Convert to the stored form."""
        return _storable(value)


def _storable(value: Any) -> Any:
    match value:
        case str():
            return storable_text(value)
        case list() | tuple():
            return [_storable(item) for item in value]
        case dict():
            return {_storable(key): _storable(item) for key, item in value.items()}
        case _:
            return value


class Base(DeclarativeBase):
    """Base class of the tables: column types by annotation, names of constraints."""

    metadata = MetaData(
        naming_convention={
            "pk": "pk_%(table_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it from the class
        str: CleanText,
        int: Integer,
        float: Double,
        datetime: UtcDateTime,
        dict[str, Any]: CleanJson,
        list[Any]: CleanJson,
    }


def run_key() -> Mapped[str]:
    """Column ``run_id``: part of the primary key; a row is deleted with its run."""
    return mapped_column(ForeignKey("runs.run_id", ondelete="CASCADE"), primary_key=True)
