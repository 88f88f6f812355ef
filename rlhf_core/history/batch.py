"""Data of one round of ingestion: plain data from the files of a run directory, without a database."""

from dataclasses import dataclass, field
from datetime import datetime

from rlhf_core.schemas.checkpoint_files import CheckpointManifest
from rlhf_core.schemas.evaluation import EvaluationReport
from rlhf_core.schemas.failures import Decision, Incident
from rlhf_core.schemas.journal import JournalLine
from rlhf_core.schemas.probe import ProbeReport
from rlhf_core.schemas.reports import AgentEvent, AgentStatus, AttemptOutcome, MetricsLine, ReconcileNote, TelemetryLine
from rlhf_core.schemas.stored_spec import StoredSpec
from rlhf_core.schemas.weight_sync import WeightSyncLine


@dataclass(frozen=True)
class IngestState:
    """Progress of the history with a run. A batch is valid only for the state that it was built from."""

    stamp: int = 0
    """Changes with every batch; 0 for a run that is not in the history."""
    offsets: dict[str, int] = field(default_factory=dict)
    """File, relative to the run directory -> bytes read, or fingerprint of the version read."""
    journal_token: int = 0
    """Highest fencing token seen in the journal."""
    has_ended: bool = False
    """True if the history has the run in a state in which no part of it is running."""


@dataclass(frozen=True)
class JournalEntry:
    """A journal line and its position."""

    position: int
    line: JournalLine


@dataclass(frozen=True)
class MetricsEntry:
    """A metrics line and the restart that wrote it."""

    attempt: int
    restart: int
    line: MetricsLine


@dataclass(frozen=True)
class WeightSyncEntry:
    """A line of the weight ledger and the restart that wrote it."""

    attempt: int
    restart: int
    line: WeightSyncLine


@dataclass(frozen=True)
class EventEntry:
    """An agent's event line and its position."""

    source: str
    position: int
    attempt: int
    restart: int
    event: AgentEvent


@dataclass(frozen=True)
class TelemetryEntry:
    """A line of a node's telemetry and its position."""

    attempt: int
    restart: int
    node: str
    position: int
    line: TelemetryLine


@dataclass(frozen=True)
class SetAside:
    """Part of a file that cannot be read or stored and has no row."""

    source: str
    position: int
    """Byte offset of its first line."""
    found_at: datetime
    message: str


@dataclass
class IngestBatch:
    """Rows to write, and the file offsets after them. Applied completely or not at all."""

    base: IngestState
    """State that it was built from."""
    run_dir: str = ""
    """Path of the run directory; set with ``stored``."""
    stored: StoredSpec | None = None
    """Content of ``spec.json`` if it is new."""
    journal_token: int = 0
    """Highest fencing token after this batch."""
    journal: list[JournalEntry] = field(default_factory=list)
    """Valid lines, in file order."""
    notes: list[tuple[int, ReconcileNote]] = field(default_factory=list)
    """Actions of the site daemon, each with the byte offset of its line."""
    attempts: set[int] = field(default_factory=set)
    """Attempts that have a folder."""
    restarts: set[tuple[int, int]] = field(default_factory=set)
    """Restarts that have a folder: (attempt, restart)."""
    metrics: list[MetricsEntry] = field(default_factory=list)
    weight_syncs: list[WeightSyncEntry] = field(default_factory=list)
    """In file order: the last line about a sync counts."""
    events: list[EventEntry] = field(default_factory=list)
    nodes: list[AgentStatus] = field(default_factory=list)
    telemetry: list[TelemetryEntry] = field(default_factory=list)
    set_aside: list[SetAside] = field(default_factory=list)
    probes: list[ProbeReport] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    outcomes: list[AttemptOutcome] = field(default_factory=list)
    checkpoints: list[tuple[str, CheckpointManifest]] = field(default_factory=list)
    """Path relative to the run directory, and content of ``COMPLETE``."""
    removed_checkpoints: dict[int, datetime] = field(default_factory=dict)
    """Step -> time at which it was found missing."""
    evaluations: list[EvaluationReport] = field(default_factory=list)
    offsets: dict[str, int] = field(default_factory=dict)
    """New offsets of the files read."""
    forgotten: set[str] = field(default_factory=set)
    """Deleted files, whose offsets are dropped."""
    is_last: bool = False
    """True if the files were read to the end, so that the history is up to date."""

    def is_empty(self) -> bool:
        """Return True if there is nothing to write."""
        return self.stored is None and not self.offsets and not self.forgotten
