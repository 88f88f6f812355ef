"""Tables of the attempts of a run, their restarts and their nodes."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, ForeignKeyConstraint, Index, text
from sqlalchemy.orm import Mapped, mapped_column

from rlhf_core.history.tables.base import Base, run_key


class Attempt(Base):
    """One submission of a run to the scheduler. From the journal, ``placement.json`` and ``outcome.json``."""

    __tablename__ = "attempts"

    run_id: Mapped[str] = run_key()
    """Run."""
    number: Mapped[int] = mapped_column(primary_key=True)
    """Number, from 1; column ``attempt`` of other tables refers to it."""
    state: Mapped[str]
    """``planned``, ``submitted``, ``running``, ``completed``, ``failed``, ``cancelled``, ``preempted`` (saved and ended
    early) or ``lost`` (its job is gone without an outcome)."""
    message: Mapped[str]
    """Cause of the last change of state."""
    failure_kind: Mapped[str | None]
    """Kind of failure, determined by the controller; null if it did not fail."""
    scheduler: Mapped[str]
    """``slurm`` or ``local``; empty before submission."""
    scheduler_job_id: Mapped[str | None]
    """Job id of the scheduler; null before submission."""
    submission: Mapped[dict[str, Any] | None]
    """Content of ``submission.json``; null before submission."""
    placement: Mapped[dict[str, Any] | None]
    """Content of ``placement.json``: nodes, roles, GPUs; null if its journal line was torn."""
    num_nodes: Mapped[int]
    """Nodes requested."""
    resume_checkpoint: Mapped[str]
    """Checkpoint it started from; empty for a start from the beginning."""
    resumed_from_step: Mapped[int]
    """Step of that checkpoint; 0 for a start from the beginning."""
    planned_at: Mapped[datetime | None]
    """Time at which it was planned."""
    submitted_at: Mapped[datetime | None]
    """Time of submission."""
    started_at: Mapped[datetime | None]
    """Time at which a controller noticed the start of its job, which may be long after it (view ``attempt_times``);
    null before it, and if none saw it run."""
    ended_at: Mapped[datetime | None]
    """Time at which a controller noticed its end, which may be long after it (view ``attempt_times``); null before
    it."""
    outcome_state: Mapped[str | None]
    """State in ``outcome.json``; null if the attempt left none."""
    outcome_failure_kind: Mapped[str | None]
    """Kind of failure in ``outcome.json``."""
    outcome_message: Mapped[str | None]
    """Message in ``outcome.json``."""
    num_restarts: Mapped[int | None]
    """Restarts in place; null without an ``outcome.json``."""
    last_step: Mapped[int | None]
    """Last optimizer step with metrics; null without an ``outcome.json``."""
    outcome_at: Mapped[datetime | None]
    """Time of ``outcome.json``."""

    __table_args__ = (Index(None, "scheduler_job_id"), Index(None, "failure_kind"))


class Restart(Base):
    """One start of the workers inside an attempt. From its metrics and events."""

    __tablename__ = "restarts"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    """Run."""
    attempt: Mapped[int] = mapped_column(primary_key=True)
    """Attempt, from 1."""
    restart: Mapped[int] = mapped_column(primary_key=True)
    """Number, from 0."""
    role: Mapped[str | None]
    """Role of the workers; the count continues when the evaluator starts after the trainer."""
    started_at: Mapped[datetime | None]
    """Earliest time in its files."""
    ended_at: Mapped[datetime | None]
    """Latest time in its files so far."""
    first_step: Mapped[int | None]
    """Lowest optimizer step it made; null before the first. It started from the step before it, so steps of earlier
    restarts from here on no longer count (view ``run_curve``)."""
    last_step: Mapped[int | None]
    """Highest optimizer step it made; null before the first."""
    last_valid_step: Mapped[int | None]
    """Highest of its steps that counts, because no later restart began at it or before it; below ``first_step`` if none
    counts, null before the first."""

    __table_args__ = (
        ForeignKeyConstraint(["run_id", "attempt"], ["attempts.run_id", "attempts.number"], ondelete="CASCADE"),
    )


class AttemptNode(Base):
    """One node of an attempt, with the newest status of its agent. From ``agents/<node>.json``."""

    __tablename__ = "attempt_nodes"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    """Run."""
    attempt: Mapped[int] = mapped_column(primary_key=True)
    """Attempt, from 1."""
    node: Mapped[str] = mapped_column(primary_key=True)
    """Node."""
    node_index: Mapped[int]
    """Index in the attempt, from 0; the agent of node 0 leads."""
    restart: Mapped[int]
    """Newest restart that the node took part in, from 0."""
    role: Mapped[str]
    """Role of its workers."""
    sequence: Mapped[int] = mapped_column(BigInteger)
    """Increasing number of the status."""
    ranks: Mapped[list[Any]]
    """Its workers, as in ``RankStatus``."""
    telemetry: Mapped[dict[str, Any]]
    """Newest telemetry values, by name; units are in the names."""
    longest_gaps_s: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    """Longest gaps between heartbeats that ended well: ``role/phase`` to seconds. Node 0 has those of all nodes."""

    __table_args__ = (
        ForeignKeyConstraint(["run_id", "attempt"], ["attempts.run_id", "attempts.number"], ondelete="CASCADE"),
        Index(None, "node"),
    )


class NodeSpeed(Base):
    """Measurements of one node in the probe of an attempt. From ``probe-report.json``."""

    __tablename__ = "node_speeds"

    run_id: Mapped[str] = run_key()
    """Run."""
    attempt: Mapped[int] = mapped_column(primary_key=True)
    """Attempt, from 1."""
    node: Mapped[str] = mapped_column(primary_key=True)
    """Node."""
    device: Mapped[str]
    """Kind of its devices, for instance ``cpu x 2 threads`` or the name of a GPU."""
    matmul_tflops: Mapped[float]
    """Speed of matrix products on its slowest device."""
    core_share: Mapped[float]
    """Share of its processor cores that it got."""
    bandwidth_gb_s: Mapped[float]
    """Bandwidth to its fastest neighbour; 0 without a neighbour."""
    latency_ms: Mapped[float]
    """Latency to its nearest neighbour; 0 without a neighbour."""
    measured_at: Mapped[datetime]
    """Time of the probe."""

    __table_args__ = (Index(None, "node", "measured_at"),)


class NodeTelemetry(Base):
    """One telemetry reading of a node: means over some seconds. From ``telemetry-<node>.jsonl``. One row per reading,
    because rows per value would take several times the space; view ``node_figures`` has those. ``rlhf db prune``
    removes the rows of runs that ended long ago."""

    __tablename__ = "node_telemetry"

    run_id: Mapped[str] = run_key()
    """Run."""
    attempt: Mapped[int] = mapped_column(primary_key=True)
    """Attempt, from 1."""
    restart: Mapped[int] = mapped_column(primary_key=True)
    """Restart, from 0."""
    node: Mapped[str] = mapped_column(primary_key=True)
    """Node."""
    position: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    """Byte offset of its line."""
    time: Mapped[datetime]
    """End of the interval, by the clock of the node."""
    seconds: Mapped[float]
    """Length of the interval."""
    figures: Mapped[dict[str, Any]]
    """Mean of each finite value, by name; units are in the names."""

    __table_args__ = (Index(None, "node", "time"),)
