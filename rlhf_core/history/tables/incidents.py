"""Tables of incidents, of the decisions about them, and of the nodes they count against."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, ForeignKeyConstraint, Index, text
from sqlalchemy.orm import Mapped, mapped_column

from rlhf_core.history.tables.base import Base, run_key


class Incident(Base):
    """One failure. From ``incident.json`` (agents) or the journal (controller)."""

    __tablename__ = "incidents"

    run_id: Mapped[str] = run_key()
    """Run."""
    incident_id: Mapped[str] = mapped_column(primary_key=True)
    """``<attempt>.<restart>`` for the agents' own, ``control-<position>`` for one in the journal."""
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

    __table_args__ = (Index(None, "failure_kind", "seen_at"), Index(None, "fingerprint"))


class Decision(Base):
    """The reaction to one incident. From ``decision.json`` (agents) or the journal (controller)."""

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
    """``restart_in_place``, ``new_attempt`` or ``stop``."""
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
