"""Views of the history, declared for queries and for ``docs/database.md``. Their SQL is in ``view_sql``."""

from datetime import datetime

from sqlalchemy import Double, Integer, MetaData
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from rlhf_core.history.tables.base import CleanText, UtcDateTime


class ViewBase(DeclarativeBase):
    """Base class of the views. Their primary keys are declared only for SQLAlchemy."""

    metadata = MetaData()
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it from the class
        str: CleanText,
        int: Integer,
        float: Double,
        datetime: UtcDateTime,
    }


class RunCurve(ViewBase):
    """Valid metrics, by step. A restart rewinds to before its first step; values of earlier restarts from that step on
    belong to discarded weights and are omitted."""

    __tablename__ = "run_curve"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    """Run."""
    key: Mapped[str] = mapped_column(primary_key=True)
    """Name of the metric, as in ``metric_keys``."""
    step: Mapped[int] = mapped_column(primary_key=True)
    """Optimizer step, from 1."""
    attempt: Mapped[int]
    """Attempt that ran it, from 1."""
    restart: Mapped[int]
    """Restart that ran it, from 0."""
    value: Mapped[float | None]
    """Value; null if it is not finite."""
    non_finite: Mapped[str | None]
    """``NaN``, ``Infinity`` or ``-Infinity``; null for a finite value."""
    time: Mapped[datetime]
    """End of the step."""


class AttemptTimes(ViewBase):
    """Times of each attempt. If no controller was there, agents recorded them: table ``attempts`` has the times at
    which a controller noticed."""

    __tablename__ = "attempt_times"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    """Run."""
    attempt: Mapped[int] = mapped_column(primary_key=True)
    """Attempt, from 1."""
    submitted_at: Mapped[datetime | None]
    """Time of submission."""
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

    run_id: Mapped[str] = mapped_column(primary_key=True)
    """Run."""
    began_at: Mapped[datetime] = mapped_column(primary_key=True)
    """Start."""
    ended_at: Mapped[datetime]
    """Time of the resume."""
    seconds: Mapped[float]
    """Length."""


class RunGoodput(ViewBase):
    """Goodput of each run: the share of its time spent on valid steps."""

    __tablename__ = "run_goodput"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    """Run."""
    name: Mapped[str]
    """As in ``runs``."""
    state: Mapped[str]
    """As in ``runs``."""
    wall_s: Mapped[float]
    """From the request to the end (of an active run: to its newest ingested line), without ``undriven_times``."""
    queue_s: Mapped[float]
    """From submission to start, over all attempts (view ``attempt_times``)."""
    productive_s: Mapped[float]
    """``time/step_s`` of valid steps. If an external trainer logs only some steps, their mean counts for all; if it
    reports no step times, the time from the first to the last metric of each restart counts."""
    repeated_s: Mapped[float]
    """The same of repeated steps."""
    lost_s: Mapped[float]
    """Time lost to incidents, as in ``run_lost_time``."""
    ettr: Mapped[float | None]
    """Effective training time ratio: productive_s / (wall_s - queue_s), 0 to 1; preflight, setup, waits and evaluation
    also lower it. Null for a run without any time."""


class AllGoodput(ViewBase):
    """``run_goodput`` for queries over many runs: cached for runs that have ended (table ``goodput_cache``)."""

    __tablename__ = "all_goodput"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    """Run."""
    name: Mapped[str]
    """As in ``runs``."""
    state: Mapped[str]
    """As in ``runs``."""
    created_at: Mapped[datetime]
    """As in ``runs``."""
    wall_s: Mapped[float]
    """As in ``run_goodput``."""
    queue_s: Mapped[float]
    """As in ``run_goodput``."""
    productive_s: Mapped[float]
    """As in ``run_goodput``."""
    repeated_s: Mapped[float]
    """As in ``run_goodput``."""
    lost_s: Mapped[float]
    """As in ``run_goodput``."""
    ettr: Mapped[float | None]
    """As in ``run_goodput``."""


class DuplicateIncident(ViewBase):
    """Incidents of agents that ended all workers and that the controller found too, in the same attempt and restart.
    Its finding counts instead: it also sees the agents of other nodes."""

    __tablename__ = "duplicate_incidents"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    """Run."""
    incident_id: Mapped[str] = mapped_column(primary_key=True)
    """As in ``incidents``."""


class Interruption(ViewBase):
    """Incidents that ended all workers, each once; those that the run survived are omitted."""

    __tablename__ = "interruptions"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    """Run."""
    incident_id: Mapped[str] = mapped_column(primary_key=True)
    """As in ``incidents``."""
    attempt: Mapped[int]
    """As in ``incidents``."""
    restart: Mapped[int]
    """As in ``incidents``."""
    failure_kind: Mapped[str]
    """As in ``incidents``."""
    detected_after_s: Mapped[float | None]
    """As in ``incidents``."""
    seen_at: Mapped[datetime]
    """As in ``incidents``."""


class IncidentLostTime(ViewBase):
    """Time lost to each interruption. The times of two interruptions of a run never overlap."""

    __tablename__ = "incident_lost_time"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    """Run."""
    incident_id: Mapped[str] = mapped_column(primary_key=True)
    """As in ``incidents``."""
    failure_kind: Mapped[str]
    """Kind of failure."""
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

    run_id: Mapped[str] = mapped_column(primary_key=True)
    """Run."""
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

    run_id: Mapped[str] = mapped_column(primary_key=True)
    """Run."""
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

    run_id: Mapped[str] = mapped_column(primary_key=True)
    """Run."""
    incident_id: Mapped[str] = mapped_column(primary_key=True)
    """As in ``incidents``."""
    attempt: Mapped[int]
    """Attempt of the incident, from 1."""
    restart: Mapped[int]
    """Restart of the incident, from 0."""
    failure_kind: Mapped[str]
    """Kind of failure."""
    detected_after_s: Mapped[float | None]
    """As in ``incidents``."""
    seen_at: Mapped[datetime]
    """Time of the detection."""
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

    run_id: Mapped[str] = mapped_column(primary_key=True)
    """Run."""
    attempt: Mapped[int] = mapped_column(primary_key=True)
    """Attempt, from 1."""
    restart: Mapped[int] = mapped_column(primary_key=True)
    """Restart, from 0."""
    node: Mapped[str] = mapped_column(primary_key=True)
    """Node."""
    time: Mapped[datetime] = mapped_column(primary_key=True)
    """End of the interval, by the clock of the node."""
    seconds: Mapped[float]
    """Length of the interval."""
    key: Mapped[str] = mapped_column(primary_key=True)
    """Name of the value, for instance ``gpu0_power_w``; ``docs/telemetry.md`` lists them. Units are in the names."""
    value: Mapped[float]
    """Mean over the interval."""


class NodeImbalance(ViewBase):
    """Differences between the nodes of a restart, found in telemetry."""

    __tablename__ = "node_imbalance"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    """Run."""
    attempt: Mapped[int] = mapped_column(primary_key=True)
    """Attempt, from 1."""
    restart: Mapped[int] = mapped_column(primary_key=True)
    """Restart, from 0."""
    finding: Mapped[str] = mapped_column(primary_key=True)
    """The node and its difference, in one sentence."""
    began_at: Mapped[datetime] = mapped_column(primary_key=True)
    """Start."""
    ended_at: Mapped[datetime | None]
    """End; null if it lasted until the end of its restart."""
