"""Tables of incidents, the decisions about them, and the strikes against nodes."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, ForeignKeyConstraint, Index, text
from sqlalchemy.orm import Mapped, mapped_column

from rlhf_core.history.tables.base import Base, run_key


class Incident(Base):
    """One failure. From ``incidents/<n>.json`` (agents) or the journal (controller)."""

    __tablename__ = "incidents"

    run_id: Mapped[str] = run_key()
    """Run."""
    incident_id: Mapped[str] = mapped_column(primary_key=True)
    """``<attempt>.<restart>.<number>`` for those of agents (``<attempt>.<restart>`` in version 0.1),
    ``control-<position>`` for those in the journal."""
    attempt: Mapped[int]
    """Attempt, from 1."""
    restart: Mapped[int]
    """Restart, from 0."""
    found_by: Mapped[str]
    """``agent`` or ``controller``."""
    failure_kind: Mapped[str]
    """Kind of failure; ``docs/failures.md`` lists them."""
    phase: Mapped[str]
    """Phase of the suspect workers, for instance ``rollout``."""
    step: Mapped[int | None]
    """Last optimizer step of these workers; null before the first."""
    suspect_ranks: Mapped[list[Any]]
    """Suspected ranks; empty if none is known."""
    suspect_nodes: Mapped[list[Any]]
    """Suspected nodes; empty if none is known."""
    detected_after_s: Mapped[float | None]
    """Time from the last heartbeat to the detection; null if not applicable."""
    seen_at: Mapped[datetime]
    """Time of the detection."""
    fingerprint: Mapped[str]
    """Hash of the error without its numbers, equal for equal causes; empty without an error."""
    evidence_dir: Mapped[str]
    """Folder of stacks, logs and dumps, relative to the run directory."""
    message: Mapped[str]
    """Description in one sentence."""
    collective: Mapped[str] = mapped_column(server_default=text("''"))
    """Collective in which ranks hung or disagreed; empty if none is known."""
    collective_sequence: Mapped[int | None] = mapped_column(BigInteger)
    """Number of that collective in its process group; null if none is known."""
    number: Mapped[int] = mapped_column(server_default=text("0"))
    """Number among the attempt's incidents, from 1; 0 if the controller found it, and in version 0.1."""
    role: Mapped[str | None]
    """Role of the affected group of workers; null if it concerns a node or the whole attempt."""

    __table_args__ = (Index(None, "failure_kind", "seen_at"), Index(None, "fingerprint"))


class Decision(Base):
    """The reaction to one incident. From ``incidents/<n>.decision.json`` (agents) or the journal (controller)."""

    __tablename__ = "decisions"

    run_id: Mapped[str] = run_key()
    """Run."""
    decision_id: Mapped[str] = mapped_column(primary_key=True)
    """Of agents: ``incidents.incident_id`` of the incident. Of the controller: the position of its journal line; it
    decides once about each failed attempt."""
    attempt: Mapped[int]
    """Attempt, from 1."""
    restart: Mapped[int]
    """Restart, from 0."""
    action: Mapped[str]
    """``continue``, ``restart_workers``, ``restart_in_place``, ``new_attempt`` or ``stop``."""
    reason: Mapped[str]
    """Reason for the action."""
    decided_by: Mapped[str]
    """``agent`` or ``controller``."""
    decided_at: Mapped[datetime]
    """Time of the decision."""
    delay_s: Mapped[float]
    """Wait before the action."""
    excluded_nodes: Mapped[list[Any]]
    """Nodes excluded from the next attempt."""
    config_diff: Mapped[dict[str, Any]]
    """Settings changed for the next attempt."""
    resume_checkpoint: Mapped[str]
    """Checkpoint to start from; empty for the newest."""
    number: Mapped[int] = mapped_column(server_default=text("0"))
    """Number of the incident; 0 for an incident without one."""

    __table_args__ = (Index(None, "decided_at"),)


class NodeStrike(Base):
    """A node that an incident counts against. From the incident's suspect nodes; ``node_health`` leaves out those of
    ``duplicate_incidents``."""

    __tablename__ = "node_strikes"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    """Run."""
    incident_id: Mapped[str] = mapped_column(primary_key=True)
    """Incident."""
    node: Mapped[str] = mapped_column(primary_key=True)
    """Node."""
    attempt: Mapped[int]
    """Attempt, from 1."""
    failure_kind: Mapped[str]
    """Kind of failure."""
    struck_at: Mapped[datetime]
    """Time of the incident."""

    __table_args__ = (
        ForeignKeyConstraint(
            ["run_id", "incident_id"], ["incidents.run_id", "incidents.incident_id"], ondelete="CASCADE"
        ),
        Index(None, "node", "struck_at"),
    )
