"""Views of the history, declared for queries and for ``docs/database.md``. Their SQL is in ``view_sql``."""

from datetime import datetime
from typing import TypeVar

from sqlalchemy import Double, Integer, MetaData
from sqlalchemy.orm import DeclarativeBase, InstrumentedAttribute, Mapped, mapped_column

from rlhf_core.history.tables.attempts import Attempt, NodeTelemetry, Restart
from rlhf_core.history.tables.base import CleanText, UtcDateTime
from rlhf_core.history.tables.incidents import Incident
from rlhf_core.history.tables.metrics import Metric
from rlhf_core.history.tables.runs import GoodputCache, Run, RunEvent

T = TypeVar("T")


class ViewBase(DeclarativeBase):
    """Base class of the views. SQLAlchemy demands their primary keys; exports sort by them."""

    metadata = MetaData()
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it from the class
        str: CleanText,
        int: Integer,
        float: Double,
        datetime: UtcDateTime,
    }


def as_in(column: InstrumentedAttribute[T]) -> Mapped[T]:
    """Column with the type and the meaning of a table's column, which ``info["as_in"]`` leads to."""
    stored = column.expression
    return mapped_column(stored.type, primary_key=stored.primary_key, nullable=stored.nullable, info={"as_in": column})


class RunCurve(ViewBase):
    """Valid metrics, by step. A restart rewinds to before its first step; values of earlier restarts from that step on
    belong to discarded weights and are omitted."""

    __tablename__ = "run_curve"

    run_id = as_in(Metric.run_id)
    key: Mapped[str] = mapped_column(primary_key=True)
    """Name of the metric, as in ``metric_keys``."""
    step = as_in(Metric.step)
    attempt = as_in(Metric.attempt)
    restart = as_in(Metric.restart)
    value = as_in(Metric.value)
    non_finite = as_in(Metric.non_finite)
    time = as_in(Metric.time)


class AttemptTimes(ViewBase):
    """Times of each attempt. If no controller was there, agents recorded them: table ``attempts`` has the times at
    which a controller noticed."""

    __tablename__ = "attempt_times"

    run_id = as_in(Attempt.run_id)
    attempt = as_in(Restart.attempt)
    submitted_at = as_in(Attempt.submitted_at)
    started_at: Mapped[datetime | None]
    """Earliest sign that the job runs: of its workers, or to a controller; null while it waits in the queue, and if it
    never started."""
    ended_at: Mapped[datetime | None]
    """Time of its outcome; without one, the time at which a controller noticed its end. Null before it."""


class UndrivenTime(ViewBase):
    """Times in which nothing drove a run, which its other times leave out: from its end to its resume; and, if a
    controller died, from the last event or step to the next controller, unless that finds the workers alive. The wait
    of a job in a queue is not part of them."""

    __tablename__ = "undriven_times"

    run_id = as_in(RunEvent.run_id)
    began_at: Mapped[datetime] = mapped_column(primary_key=True)
    """Start."""
    ended_at: Mapped[datetime]
    """Time of the resume."""
    seconds: Mapped[float]
    """Length."""


class RunGoodput(ViewBase):
    """Goodput of each run: the share of its time spent on valid steps."""

    __tablename__ = "run_goodput"

    run_id = as_in(GoodputCache.run_id)
    name = as_in(Run.name)
    state = as_in(Run.state)
    wall_s = as_in(GoodputCache.wall_s)
    queue_s = as_in(GoodputCache.queue_s)
    productive_s = as_in(GoodputCache.productive_s)
    repeated_s = as_in(GoodputCache.repeated_s)
    lost_s = as_in(GoodputCache.lost_s)
    ettr = as_in(GoodputCache.ettr)


class AllGoodput(ViewBase):
    """``run_goodput`` for queries over many runs: cached for runs that have ended (table ``goodput_cache``)."""

    __tablename__ = "all_goodput"

    run_id = as_in(GoodputCache.run_id)
    name = as_in(Run.name)
    state = as_in(Run.state)
    created_at = as_in(Run.created_at)
    wall_s = as_in(GoodputCache.wall_s)
    queue_s = as_in(GoodputCache.queue_s)
    productive_s = as_in(GoodputCache.productive_s)
    repeated_s = as_in(GoodputCache.repeated_s)
    lost_s = as_in(GoodputCache.lost_s)
    ettr = as_in(GoodputCache.ettr)


class DuplicateIncident(ViewBase):
    """Incidents of agents that ended all workers and that the controller found too, in the same attempt and restart.
    Its finding counts instead: it also sees the agents of other nodes."""

    __tablename__ = "duplicate_incidents"

    run_id = as_in(Incident.run_id)
    incident_id = as_in(Incident.incident_id)


class Interruption(ViewBase):
    """Incidents that ended all workers, each once; those that the run survived are omitted."""

    __tablename__ = "interruptions"

    run_id = as_in(Incident.run_id)
    incident_id = as_in(Incident.incident_id)
    attempt = as_in(Incident.attempt)
    restart = as_in(Incident.restart)
    failure_kind = as_in(Incident.failure_kind)
    detected_after_s = as_in(Incident.detected_after_s)
    seen_at = as_in(Incident.seen_at)


class IncidentLostTime(ViewBase):
    """Time lost to each interruption. The times of two interruptions of a run never overlap."""

    __tablename__ = "incident_lost_time"

    run_id = as_in(Incident.run_id)
    incident_id = as_in(Incident.incident_id)
    failure_kind = as_in(Incident.failure_kind)
    downtime_s: Mapped[float]
    """From the last step finished before the incident to the start of the first step of a later restart, including the
    wait for a new attempt, but no ``undriven_times``; or to the next interruption or the end of the run, whichever came
    first. Without step times, to the first metric of a later restart."""
    repeated_s: Mapped[float]
    """Time of the steps of its restart that were repeated later, as in ``run_goodput``."""
    lost_s: Mapped[float]
    """downtime_s + repeated_s."""


class RunLostTime(ViewBase):
    """Time lost to interruptions, by run and kind of failure."""

    __tablename__ = "run_lost_time"

    run_id = as_in(Incident.run_id)
    failure_kind: Mapped[str] = mapped_column(primary_key=True)
    """Kind of failure."""
    num_incidents: Mapped[int]
    """Incidents that interrupted the run."""
    downtime_s: Mapped[float]
    """Sum of ``incident_lost_time.downtime_s``."""
    repeated_s: Mapped[float]
    """Sum of ``incident_lost_time.repeated_s``."""
    lost_s: Mapped[float]
    """downtime_s + repeated_s."""


class RunStepTime(ViewBase):
    """Parts of the time of valid steps, by run. Give the run as its id: with a subquery for it, SQLite reads the
    metrics of all runs."""

    __tablename__ = "run_step_time"

    run_id = as_in(Metric.run_id)
    key: Mapped[str] = mapped_column(primary_key=True)
    """Metric ``time/...``; ``time/step_s`` is the whole step."""
    num_steps: Mapped[int]
    """Number of steps with this metric."""
    total_s: Mapped[float]
    """Sum over the steps."""
    mean_s: Mapped[float]
    """Mean over the steps."""
    share: Mapped[float | None]
    """Share of the whole steps, 0 to 1; null without ``time/step_s``."""


class RunRecovery(ViewBase):
    """Recovery from each interruption."""

    __tablename__ = "run_recoveries"

    run_id = as_in(Incident.run_id)
    incident_id = as_in(Incident.incident_id)
    attempt = as_in(Incident.attempt)
    restart = as_in(Incident.restart)
    failure_kind = as_in(Incident.failure_kind)
    detected_after_s = as_in(Incident.detected_after_s)
    seen_at = as_in(Incident.seen_at)
    first_step_at: Mapped[datetime | None]
    """End of the first step of a later restart; null if there is none."""
    recovery_s: Mapped[float | None]
    """From seen_at to first_step_at, without ``undriven_times``."""
    new_step_at: Mapped[datetime | None]
    """End of the first new step; null if there is none."""
    caught_up_s: Mapped[float | None]
    """From seen_at to new_step_at, without ``undriven_times``."""


class NodeHealth(ViewBase):
    """Use and strikes of each node, over all runs."""

    __tablename__ = "node_health"

    node: Mapped[str] = mapped_column(primary_key=True)
    """Node."""
    num_attempts: Mapped[int]
    """Attempts that ran on it."""
    num_runs: Mapped[int]
    """Runs that ran on it."""
    num_strikes: Mapped[int]
    """Incidents that count against it, each once."""
    last_strike_at: Mapped[datetime | None]
    """Time of the newest; null without one."""
    last_failure_kind: Mapped[str | None]
    """Kind of the newest; null without one."""


class NodeFigure(ViewBase):
    """Telemetry of the nodes with one row per value."""

    __tablename__ = "node_figures"

    run_id = as_in(NodeTelemetry.run_id)
    attempt = as_in(NodeTelemetry.attempt)
    restart = as_in(NodeTelemetry.restart)
    node = as_in(NodeTelemetry.node)
    time = as_in(NodeTelemetry.time)
    seconds = as_in(NodeTelemetry.seconds)
    key: Mapped[str] = mapped_column(primary_key=True)
    """Name of the value, for instance ``gpu0_power_w``; ``docs/telemetry.md`` lists them. Units are in the names."""
    value: Mapped[float]
    """Mean over the interval."""


class NodeImbalance(ViewBase):
    """Differences between the nodes of a restart, found in telemetry."""

    __tablename__ = "node_imbalance"

    run_id = as_in(NodeTelemetry.run_id)
    attempt = as_in(NodeTelemetry.attempt)
    restart = as_in(NodeTelemetry.restart)
    finding: Mapped[str] = mapped_column(primary_key=True)
    """The node and its difference, in one sentence."""
    began_at: Mapped[datetime] = mapped_column(primary_key=True)
    """Start."""
    ended_at: Mapped[datetime | None]
    """End; null if it lasted until the end of its restart."""
