"""Tables of metrics."""

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from rlhf_core.history.tables.base import Base, run_key


class MetricKey(Base):
    """Name of a metric, stored once."""

    __tablename__ = "metric_keys"

    key_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    """Id."""
    name: Mapped[str] = mapped_column(unique=True)
    """Name, for instance ``reward/mean``; units are in the names."""


class Metric(Base):
    """One value of one optimizer step. Append-only: a step repeated after a rewind is another row with a different
    attempt or restart; view ``run_curve`` has the valid ones.

    A non-finite value has ``value`` null and is named in ``non_finite``, because SQLite cannot store NaN, and it would
    turn sums and means into NaN.

    Without foreign keys, because their check was half of the cost of a row: the writing transaction has claimed the row
    of its run and written the names of metrics, which are never removed. The trigger ``metrics_follow_runs`` removes
    the metrics of a removed run; a migration that recreates the table ``runs`` must recreate the trigger.

    ``rlhf db prune`` removes rows of runs that ended long ago, except step times and evaluations.
    """

    __tablename__ = "metrics"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    """Run."""
    key_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Name, in ``metric_keys``."""
    step: Mapped[int] = mapped_column(primary_key=True)
    """Optimizer step, from 1."""
    attempt: Mapped[int] = mapped_column(primary_key=True)
    """Attempt, from 1."""
    restart: Mapped[int] = mapped_column(primary_key=True)
    """Restart, from 0."""
    value: Mapped[float | None]
    """Value; null if it is not finite."""
    non_finite: Mapped[str | None]
    """``NaN``, ``Infinity`` or ``-Infinity``; null for a finite value."""
    time: Mapped[datetime]
    """End of the step."""

    __table_args__ = (
        CheckConstraint("(value IS NULL) <> (non_finite IS NULL)", name="value_or_non_finite"),
        {"sqlite_with_rowid": False},
    )


class LatestMetric(Base):
    """The newest value of each metric of a run: highest attempt, restart, step."""

    __tablename__ = "latest_metrics"

    run_id: Mapped[str] = run_key()
    """Run."""
    key_id: Mapped[int] = mapped_column(ForeignKey("metric_keys.key_id"), primary_key=True)
    """Name, in ``metric_keys``."""
    step: Mapped[int]
    """Optimizer step, from 1."""
    attempt: Mapped[int]
    """Attempt, from 1."""
    restart: Mapped[int]
    """Restart, from 0."""
    value: Mapped[float | None]
    """Value; null if it is not finite."""
    non_finite: Mapped[str | None]
    """``NaN``, ``Infinity`` or ``-Infinity``; null for a finite value."""
    time: Mapped[datetime]
    """End of the step."""

    __table_args__ = (CheckConstraint("(value IS NULL) <> (non_finite IS NULL)", name="value_or_non_finite"),)
