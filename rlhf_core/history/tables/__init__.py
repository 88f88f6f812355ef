"""The tables of the history, and nothing else.

Conventions: ids are text; times are UTC and aware (:class:`UtcDateTime`); units are in names. ``attempt`` counts from
1, ``restart`` from 0. Every key comes from the run directory (a step, a position in a file, the number of an attempt)
and never from a counter of the database, so that reading the same file twice cannot make two rows.
``metric_keys.key_id`` is the one exception: names of metrics are stored once.

Views (made by the migrations): ``run_curve``, ``run_goodput``, ``run_lost_time``, ``run_step_time``,
``run_recoveries``, ``all_goodput``, ``incident_lost_time``, ``node_health``, ``node_figures``, ``node_imbalance``.
"""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    Text,
    TypeDecorator,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeEngine

from rlhf_core.schemas.base import storable_text

SCHEMA_REVISION = "0008"
"""The newest migration: the schema that this program reads and writes."""

VIEWS = (
    *("run_curve", "run_lost_time", "run_goodput", "run_step_time", "run_recoveries", "all_goodput"),
    *("incident_lost_time", "node_health", "node_figures", "node_imbalance"),
)
"""Names of the views."""


class UtcDateTime(TypeDecorator[datetime]):
    """An aware UTC time. SQLite has no time zones: there it is stored without one and read back with UTC."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """To the database; a naive time is an error, because nobody knows which moment it means."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"found the time {value} without a time zone; give an aware time")
        moment = value.astimezone(UTC)
        return moment.replace(tzinfo=None) if dialect.name == "sqlite" else moment

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """From the database, always aware."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class CleanText(TypeDecorator[str]):
    """Text, whoever has written it. What a database or a reader of UTF-8 cannot hold (NUL, lone surrogates) is replaced
    on the way in, on both databases alike."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """To the database."""
        return None if value is None else storable_text(value)


class CleanJson(TypeDecorator[Any]):
    """JSON; in PostgreSQL as ``jsonb``. Texts in it are replaced as in :class:`CleanText`."""

    impl = JSON
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """The type of each database."""
        if dialect.name == "postgresql":
            return dialect.type_descriptor(JSONB(none_as_null=True))
        return dialect.type_descriptor(JSON(none_as_null=True))

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        """To the database."""
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
    """Common to all tables: how types and constraints are called."""

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


def _run_id() -> Mapped[str]:
    return mapped_column(ForeignKey("runs.run_id", ondelete="CASCADE"), primary_key=True)


class Run(Base):
    """What a user asked for. From ``spec.json`` and the journal."""

    __tablename__ = "runs"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    state: Mapped[str]
    message: Mapped[str]
    """Cause of the last change of state."""
    owner: Mapped[str]
    """Name of the person who asked for it, as was said."""
    owner_account: Mapped[str] = mapped_column(server_default=text("''"))
    """The operating system's user that said so; see ``rlhf_core.accounts``."""
    seed: Mapped[int] = mapped_column(BigInteger)
    algorithm: Mapped[str]
    total_steps: Mapped[int]
    """Optimizer steps asked for, warm start included."""
    config_source: Mapped[str]
    overrides: Mapped[list[Any]]
    spec: Mapped[dict[str, Any]]
    """The resolved ``RunSpec``."""
    shape: Mapped[str] = mapped_column(server_default=text("''"))
    """Runs of one shape take about as long in every phase: see ``shape_key``."""
    trial_of: Mapped[str] = mapped_column(server_default=text("''"))
    """Run that this one tries out first; empty for a run of its own. Not a reference: either may be removed alone."""
    tags: Mapped[list[Any]] = mapped_column(server_default=text("'[]'"))
    """Words to find it by; searched by in ``run_tags``."""
    package_version: Mapped[str]
    code_revision: Mapped[str]
    run_dir: Mapped[str]
    created_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    """First change of state."""
    ended_at: Mapped[datetime | None]
    """When it reached an end; null while it is at work, also after it was resumed."""
    progress_at: Mapped[datetime]
    """Newest time that any ingested line of it carries."""
    journal_token: Mapped[int] = mapped_column(BigInteger)
    """Highest fencing token ingested: later journal lines of lower tokens do not count."""
    ingest_stamp: Mapped[int] = mapped_column(BigInteger)
    """Changes with every ingested batch: a batch made from an older state of affairs is refused."""

    __table_args__ = (
        Index(None, "created_at"),
        Index(None, "name", "created_at"),
        Index(None, "owner", "created_at"),
        Index(None, "shape", "created_at"),
        Index(None, "state", "created_at"),
    )


class RunTag(Base):
    """A tag of a run, to search by. From ``spec.json``."""

    __tablename__ = "run_tags"

    run_id: Mapped[str] = _run_id()
    tag: Mapped[str] = mapped_column(primary_key=True)

    __table_args__ = (Index(None, "tag"),)


class KeptGoodput(Base):
    """``run_goodput`` of a run that is over, as it was when its newest batch was ingested. View ``all_goodput`` takes
    it while ``ingest_stamp`` is the run's, and asks ``run_goodput`` otherwise: it can be missing, but not out of date.
    """

    __tablename__ = "kept_goodput"

    run_id: Mapped[str] = _run_id()
    ingest_stamp: Mapped[int] = mapped_column(BigInteger)
    wall_s: Mapped[float]
    queue_s: Mapped[float]
    productive_s: Mapped[float]
    repeated_s: Mapped[float]
    lost_s: Mapped[float]
    ettr: Mapped[float | None]


class Lease(Base):
    """Which controller drives a run, and until when. The only table that is not made from files; so it refers to no
    run, and ``rlhf db rebuild`` leaves it alone."""

    __tablename__ = "leases"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    """Text that names the controller; empty when the lease is free."""
    token: Mapped[int] = mapped_column(BigInteger)
    """Fencing token: grows with every change of hands and never goes back."""
    expires_at: Mapped[datetime]


class IngestOffset(Base):
    """How far each file of a run directory was read."""

    __tablename__ = "ingest_offsets"

    run_id: Mapped[str] = _run_id()
    path: Mapped[str] = mapped_column(primary_key=True)
    """Relative to the run directory."""
    position: Mapped[int] = mapped_column(BigInteger)
    """Appended files: bytes read. Whole files: a fingerprint of the version read."""


class Stage(Base):
    """A step of a run: preflight, allocate, train, evaluate. From the journal."""

    __tablename__ = "stages"

    run_id: Mapped[str] = _run_id()
    stage_index: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    state: Mapped[str]
    attempt: Mapped[int]
    """0 for preflight."""
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    seconds: Mapped[float | None]
    message: Mapped[str]


class Controller(Base):
    """A controller that took the run. From the journal."""

    __tablename__ = "controllers"

    run_id: Mapped[str] = _run_id()
    position: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    """Position of the journal line that brought it."""
    controller: Mapped[str]
    """User, machine, process."""
    flow_run_id: Mapped[str]
    """Prefect flow run that it is; empty without Prefect."""
    flow_run_url: Mapped[str]
    started_at: Mapped[datetime]

    __table_args__ = (Index(None, "flow_run_id"),)


class Promotion(Base):
    """Where the promotion of a run's model stands. From the journal."""

    __tablename__ = "promotions"

    run_id: Mapped[str] = _run_id()
    state: Mapped[str]
    checkpoint_step: Mapped[int]
    decided_by: Mapped[str]
    """Who decided; empty while nobody has."""
    reason: Mapped[str]
    path: Mapped[str]
    """Folder of the model, once it is there."""
    asked_at: Mapped[datetime]
    moved_at: Mapped[datetime]
    """Last change of state."""


class Check(Base):
    """One finding: of preflight, from the journal; or of the probe of an attempt, from its ``probe-report.json``."""

    __tablename__ = "checks"

    run_id: Mapped[str] = _run_id()
    round: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    """Position of the journal line that brought it: a resumed run is checked again. Of a probe, minus its attempt."""
    position: Mapped[int] = mapped_column(primary_key=True)
    check_id: Mapped[str]
    status: Mapped[str]
    found: Mapped[str]
    expected: Mapped[str]
    advice: Mapped[str]
    node: Mapped[str]
    seconds: Mapped[float]
    made_at: Mapped[datetime]
    attempt: Mapped[int] = mapped_column(server_default=text("0"))
    """The attempt whose nodes were probed; 0 for preflight."""


class NodeSpeed(Base):
    """What a node measured in the probe of an attempt. From ``probe-report.json``."""

    __tablename__ = "node_speeds"

    run_id: Mapped[str] = _run_id()
    attempt: Mapped[int] = mapped_column(primary_key=True)
    node: Mapped[str] = mapped_column(primary_key=True)
    device: Mapped[str]
    matmul_tflops: Mapped[float]
    """Of its slowest device, in TFLOP/s."""
    core_share: Mapped[float]
    """Share of its cores that it got, 0 to 1."""
    bandwidth_gb_s: Mapped[float]
    """To its fastest neighbour, in GB/s; 0 where it had none."""
    latency_ms: Mapped[float]
    """To its nearest neighbour, in milliseconds."""
    measured_at: Mapped[datetime]

    __table_args__ = (Index(None, "node", "measured_at"),)


class Attempt(Base):
    """One submission of a run to the scheduler. From the journal, ``placement.json`` and ``outcome.json``."""

    __tablename__ = "attempts"

    run_id: Mapped[str] = _run_id()
    number: Mapped[int] = mapped_column(primary_key=True)
    """From 1. Other tables call it ``attempt``."""
    state: Mapped[str]
    message: Mapped[str]
    """Cause of the last change of state."""
    failure_kind: Mapped[str | None]
    scheduler: Mapped[str]
    scheduler_job_id: Mapped[str | None]
    submission: Mapped[dict[str, Any] | None]
    placement: Mapped[dict[str, Any] | None]
    num_nodes: Mapped[int]
    resume_checkpoint: Mapped[str]
    """Checkpoint it went on from; empty from the beginning."""
    resumed_from_step: Mapped[int]
    planned_at: Mapped[datetime | None]
    submitted_at: Mapped[datetime | None]
    started_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    outcome_state: Mapped[str | None]
    """What ``outcome.json`` says; null where the attempt left none."""
    outcome_failure_kind: Mapped[str | None]
    outcome_message: Mapped[str | None]
    num_restarts: Mapped[int | None]
    last_step: Mapped[int | None]
    outcome_at: Mapped[datetime | None]

    __table_args__ = (Index(None, "scheduler_job_id"), Index(None, "failure_kind"))


class Restart(Base):
    """One start of the workers inside an attempt. From its metrics and events."""

    __tablename__ = "restarts"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    restart: Mapped[int] = mapped_column(primary_key=True)
    role: Mapped[str | None]
    """Role whose workers were started: numbers go on when the trainer is done and the evaluator starts."""
    started_at: Mapped[datetime | None]
    """Earliest time in its files."""
    ended_at: Mapped[datetime | None]
    """Latest time in its files so far."""
    first_step: Mapped[int | None]
    """Lowest step it made. It began by going back to before this one: what earlier restarts have from here on no longer
    counts (view ``run_curve``)."""
    last_step: Mapped[int | None]

    __table_args__ = (
        ForeignKeyConstraint(["run_id", "attempt"], ["attempts.run_id", "attempts.number"], ondelete="CASCADE"),
    )


class AttemptNode(Base):
    """A node of an attempt and what its agent said last. From ``agents/<node>.json``."""

    __tablename__ = "attempt_nodes"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    node: Mapped[str] = mapped_column(primary_key=True)
    node_index: Mapped[int]
    restart: Mapped[int]
    """Newest restart that the node took part in."""
    role: Mapped[str]
    sequence: Mapped[int] = mapped_column(BigInteger)
    ranks: Mapped[list[Any]]
    """Its workers, as in ``RankStatus``."""
    telemetry: Mapped[dict[str, Any]]
    longest_gaps_s: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    """Longest gaps between beats that ended well: ``role/phase`` to seconds. Agent 0 knows those of all nodes."""

    __table_args__ = (
        ForeignKeyConstraint(["run_id", "attempt"], ["attempts.run_id", "attempts.number"], ondelete="CASCADE"),
        Index(None, "node"),
    )


class NodeTelemetry(Base):
    """Figures of a node: their means over some seconds. From ``telemetry-<node>.jsonl``. One row per reading and not
    per figure, which would take several times the room; view ``node_figures`` has a row per figure."""

    __tablename__ = "node_telemetry"

    run_id: Mapped[str] = _run_id()
    attempt: Mapped[int] = mapped_column(primary_key=True)
    restart: Mapped[int] = mapped_column(primary_key=True)
    node: Mapped[str] = mapped_column(primary_key=True)
    position: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    """Byte at which its line begins."""
    time: Mapped[datetime]
    """End of the seconds, by the clock of the node."""
    seconds: Mapped[float]
    figures: Mapped[dict[str, Any]]
    """Name to mean; only finite ones."""

    __table_args__ = (Index(None, "node", "time"),)


class MetricKey(Base):
    """Names of metrics, each once."""

    __tablename__ = "metric_keys"

    key_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    name: Mapped[str] = mapped_column(unique=True)


class Metric(Base):
    """One number of one optimizer step. Append-only: a step made again after a rewind is another row, told apart by
    attempt and restart; view ``run_curve`` picks those that count.

    A value that is not finite has ``value`` null and says which in ``non_finite``: SQLite cannot hold NaN at all, and
    in sums and means it would make everything NaN.

    Without foreign keys, whose check was half of the cost of a row: the transaction that writes it has claimed the row
    of its run and has written the names of metrics, none of which is ever removed. The trigger ``metrics_follow_runs``
    removes the metrics of a run that is removed; a migration that makes the table ``runs`` again must make it too.
    """

    __tablename__ = "metrics"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    key_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Of ``metric_keys``."""
    step: Mapped[int] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    restart: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[float | None]
    non_finite: Mapped[str | None]
    """``NaN``, ``Infinity`` or ``-Infinity``; null for a finite value."""
    time: Mapped[datetime]
    """When the step ended."""

    __table_args__ = (
        CheckConstraint("(value IS NULL) <> (non_finite IS NULL)", name="value_or_non_finite"),
        {"sqlite_with_rowid": False},
    )


class LatestMetric(Base):
    """The newest value of each metric of a run: highest attempt, restart, step."""

    __tablename__ = "latest_metrics"

    run_id: Mapped[str] = _run_id()
    key_id: Mapped[int] = mapped_column(ForeignKey("metric_keys.key_id"), primary_key=True)
    step: Mapped[int]
    attempt: Mapped[int]
    restart: Mapped[int]
    value: Mapped[float | None]
    non_finite: Mapped[str | None]
    time: Mapped[datetime]

    __table_args__ = (CheckConstraint("(value IS NULL) <> (non_finite IS NULL)", name="value_or_non_finite"),)


class Incident(Base):
    """One thing that went wrong. From ``incidents/<n>.json`` (agents) or the journal (controller)."""

    __tablename__ = "incidents"

    run_id: Mapped[str] = _run_id()
    incident_id: Mapped[str] = mapped_column(primary_key=True)
    """``<attempt>.<restart>.<number>`` for the agents' own (``<attempt>.<restart>`` for those of version 0.1),
    ``control-<position>`` for one in the journal."""
    attempt: Mapped[int]
    restart: Mapped[int]
    number: Mapped[int] = mapped_column(server_default=text("0"))
    """Which of the attempt's incidents, from 1; 0 where the controller found it, and in those of version 0.1."""
    role: Mapped[str | None]
    """Role of the group of workers it happened in; null where it is about a node or the whole attempt."""
    found_by: Mapped[str]
    """``agent`` or ``controller``."""
    failure_kind: Mapped[str]
    phase: Mapped[str]
    step: Mapped[int | None]
    suspect_ranks: Mapped[list[Any]]
    suspect_nodes: Mapped[list[Any]]
    detected_after_s: Mapped[float | None]
    seen_at: Mapped[datetime]
    fingerprint: Mapped[str]
    evidence_dir: Mapped[str]
    """Relative to the run directory."""
    message: Mapped[str]
    collective: Mapped[str] = mapped_column(server_default=text("''"))
    """The collective it hung in or disagreed about; empty when none is known."""
    collective_sequence: Mapped[int | None] = mapped_column(BigInteger)

    __table_args__ = (Index(None, "failure_kind", "seen_at"), Index(None, "fingerprint"))


class Decision(Base):
    """What was done about an incident. From ``incidents/<n>.decision.json`` (agents) or the journal (controller)."""

    __tablename__ = "decisions"

    run_id: Mapped[str] = _run_id()
    decision_id: Mapped[str] = mapped_column(primary_key=True)
    """As ``incidents.incident_id``."""
    attempt: Mapped[int]
    restart: Mapped[int]
    number: Mapped[int] = mapped_column(server_default=text("0"))
    """Number of the incident it is about; 0 for one without."""
    action: Mapped[str]
    reason: Mapped[str]
    decided_by: Mapped[str]
    decided_at: Mapped[datetime]
    delay_s: Mapped[float]
    excluded_nodes: Mapped[list[Any]]
    config_diff: Mapped[dict[str, Any]]
    resume_checkpoint: Mapped[str]

    __table_args__ = (Index(None, "decided_at"),)


class NodeStrike(Base):
    """A node that an incident counts against. From the incident's suspect nodes."""

    __tablename__ = "node_strikes"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    incident_id: Mapped[str] = mapped_column(primary_key=True)
    node: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int]
    failure_kind: Mapped[str]
    struck_at: Mapped[datetime]

    __table_args__ = (
        ForeignKeyConstraint(
            ["run_id", "incident_id"], ["incidents.run_id", "incidents.incident_id"], ondelete="CASCADE"
        ),
        Index(None, "node", "struck_at"),
    )


class Checkpoint(Base):
    """A complete checkpoint. From its ``COMPLETE``. One that retention has removed keeps its row."""

    __tablename__ = "checkpoints"

    run_id: Mapped[str] = _run_id()
    step: Mapped[int] = mapped_column(primary_key=True)
    path: Mapped[str]
    """Relative to the run directory."""
    stage: Mapped[str]
    stage_finished: Mapped[bool]
    num_ranks: Mapped[int]
    spec_hash: Mapped[str]
    num_files: Mapped[int]
    bytes: Mapped[int] = mapped_column(BigInteger)
    completed_at: Mapped[datetime]
    removed_at: Mapped[datetime | None]
    """When it was first seen to be gone; null while it is there."""


class WeightVersion(Base):
    """Weights that can be named: one per complete checkpoint, the version being its step."""

    __tablename__ = "weight_versions"

    run_id: Mapped[str] = _run_id()
    version: Mapped[int] = mapped_column(primary_key=True)
    sha256: Mapped[str]
    """Hash of the weight file; of the lines ``<sha256>  <path>`` in path order where there are several."""
    num_files: Mapped[int]
    checkpoint_step: Mapped[int]
    made_at: Mapped[datetime]


class Evaluation(Base):
    """One evaluation. From ``evaluations/*.json``."""

    __tablename__ = "evaluations"

    run_id: Mapped[str] = _run_id()
    when_made: Mapped[str] = mapped_column(primary_key=True)
    """``before`` or ``after``."""
    name: Mapped[str] = mapped_column(primary_key=True)
    metric: Mapped[str]
    value: Mapped[float | None]
    """Null where it is not finite."""
    ci_low: Mapped[float | None]
    ci_high: Mapped[float | None]
    num_prompts: Mapped[int]
    num_samples: Mapped[int]
    checkpoint_step: Mapped[int]
    seconds: Mapped[float]
    made_at: Mapped[datetime]


class EvaluationSample(Base):
    """One scored completion of an evaluation."""

    __tablename__ = "evaluation_samples"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    when_made: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True)
    prompt_uid: Mapped[str]
    sample_index: Mapped[int]
    prompt: Mapped[str]
    completion: Mapped[str]
    answer: Mapped[str]
    score: Mapped[float | None]

    __table_args__ = (
        ForeignKeyConstraint(
            ["run_id", "when_made", "name"],
            ["evaluations.run_id", "evaluations.when_made", "evaluations.name"],
            ondelete="CASCADE",
        ),
    )


class Event(Base):
    """Something that happened, with its time and cause. From the journal and the agents' event files."""

    __tablename__ = "events"

    run_id: Mapped[str] = _run_id()
    source: Mapped[str] = mapped_column(primary_key=True)
    """The file it came from, relative to the run directory."""
    position: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    """Byte at which its line begins."""
    time: Mapped[datetime]
    kind: Mapped[str]
    attempt: Mapped[int | None]
    restart: Mapped[int | None]
    node: Mapped[str]
    role: Mapped[str | None]
    state: Mapped[str | None]
    """New state, for changes of state."""
    message: Mapped[str]
    data: Mapped[dict[str, Any]]

    __table_args__ = (Index(None, "run_id", "time"), Index(None, "kind", "time"))


metadata = Base.metadata
"""All tables."""
