"""Tables of incidents, of the decisions about them, and of the nodes they count against."""

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
    """``<attempt>.<restart>.<number>`` for the agents' own (``<attempt>.<restart>`` for those of version 0.1),
    ``control-<position>`` for one in the journal."""
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
    """Optimizer step they had reached; null before the first."""
    suspect_ranks: Mapped[list[Any]]
    """Ranks to blame; empty where none is known."""
    suspect_nodes: Mapped[list[Any]]
    """Nodes to blame; empty where none is known."""
    detected_after_s: Mapped[float | None]
    """Time from the last sign of life to the detection; null where it does not apply."""
    seen_at: Mapped[datetime]
    """Time of the detection."""
    fingerprint: Mapped[str]
    """Hash of the error without its numbers: equal for equal causes; empty without an error."""
    evidence_dir: Mapped[str]
    """Folder of stacks, logs and dumps, relative to the run directory."""
    message: Mapped[str]
    """One sentence."""
    collective: Mapped[str] = mapped_column(server_default=text("''"))
    """Collective operation that it hung in or disagreed about; empty when none is known."""
    collective_sequence: Mapped[int | None] = mapped_column(BigInteger)
    """Number of that operation in its process group; null when none is known."""
    number: Mapped[int] = mapped_column(server_default=text("0"))
    """Number among the attempt's incidents, from 1; 0 where the controller found it, and in those of version 0.1."""
    role: Mapped[str | None]
    """Role of the group of workers it happened in; null where it is about a node or the whole attempt."""

    __table_args__ = (Index(None, "failure_kind", "seen_at"), Index(None, "fingerprint"))


class Decision(Base):
    """The reaction to one incident. From ``incidents/<n>.decision.json`` (agents) or the journal (controller)."""

    __tablename__ = "decisions"

    run_id: Mapped[str] = run_key()
    """Run."""
    decision_id: Mapped[str] = mapped_column(primary_key=True)
    """``incidents.incident_id`` that it is about."""
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
    """Nodes that the next attempt does without."""
    config_diff: Mapped[dict[str, Any]]
    """Settings that the next attempt changes."""
    resume_checkpoint: Mapped[str]
    """Checkpoint to start from; empty for the newest."""
    number: Mapped[int] = mapped_column(server_default=text("0"))
    """Number of the incident it is about; 0 for one without."""

    __table_args__ = (Index(None, "decided_at"),)


class NodeStrike(Base):
    """A node that an incident counts against. From the incident's suspect nodes."""

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
