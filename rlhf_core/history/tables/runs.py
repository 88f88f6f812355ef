"""Tables of a run: its request, stages, controllers, checks, promotion and events."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, Index, text
from sqlalchemy.orm import Mapped, mapped_column

from rlhf_core.history.tables.base import Base, run_key


class Run(Base):
    """One run: the request of a user. From ``spec.json`` and the journal."""

    __tablename__ = "runs"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    """Id: name, time of the request (of a scheduled run, the time it was due) and six random characters."""
    name: Mapped[str]
    """Name from the config."""
    state: Mapped[str]
    """``pending``, ``preflight``, ``queued``, ``training``, ``evaluating``, ``completed``, ``failed`` or
    ``cancelled``."""
    message: Mapped[str]
    """Cause of the last change of state."""
    owner: Mapped[str]
    """User who requested the run, as given."""
    owner_account: Mapped[str] = mapped_column(server_default=text("''"))
    """Account of the operating system that requested it; see ``rlhf_core.machine.accounts``."""
    seed: Mapped[int] = mapped_column(BigInteger)
    """Seed from the config."""
    algorithm: Mapped[str]
    """Main algorithm."""
    total_steps: Mapped[int]
    """Optimizer steps requested, including the warm start."""
    config_source: Mapped[str]
    """Config file or preset."""
    overrides: Mapped[list[Any]]
    """Settings given with ``--set``."""
    spec: Mapped[dict[str, Any]]
    """Resolved ``RunSpec``: every setting, including defaults."""
    shape: Mapped[str] = mapped_column(server_default=text("''"))
    """Key shared by runs with about equal durations in every phase; see ``shape_key``."""
    trial_of: Mapped[str] = mapped_column(server_default=text("''"))
    """Run that this one is a trial of; empty for any other run. Not a foreign key: either may be removed alone."""
    tags: Mapped[list[Any]] = mapped_column(server_default=text("'[]'"))
    """Tags; table ``run_tags`` has them for searches."""
    package_version: Mapped[str]
    """Version of rlhf-flows."""
    code_revision: Mapped[str]
    """Git revision of the folder in which the run was started, with ``-dirty`` if it had changes; empty without a
    repository."""
    run_dir: Mapped[str]
    """Run directory, absolute."""
    created_at: Mapped[datetime]
    """Time at which the run was made: for a request in Prefect, once a worker has started it."""
    started_at: Mapped[datetime | None]
    """First change of state."""
    ended_at: Mapped[datetime | None]
    """End; null while the run is active, including after a resume."""
    progress_at: Mapped[datetime]
    """Newest time in any ingested line of the run."""
    journal_token: Mapped[int] = mapped_column(BigInteger)
    """Highest fencing token ingested; later journal lines with lower tokens are ignored."""
    ingest_stamp: Mapped[int] = mapped_column(BigInteger)
    """Random number that changes with every ingested batch; a batch built from an older state is rejected."""

    __table_args__ = (
        Index(None, "created_at"),
        Index(None, "name", "created_at"),
        Index(None, "owner", "created_at"),
        Index(None, "shape", "created_at"),
        Index(None, "state", "created_at"),
    )


class RunTag(Base):
    """One tag of a run, for searches. From ``spec.json``."""

    __tablename__ = "run_tags"

    run_id: Mapped[str] = run_key()
    """Run."""
    tag: Mapped[str] = mapped_column(primary_key=True)
    """Tag."""

    __table_args__ = (Index(None, "tag"),)


class GoodputCache(Base):
    """``run_goodput`` of a run that has ended, as of its newest batch. View ``all_goodput`` uses a row only if its
    ``ingest_stamp`` equals the run's, and ``run_goodput`` otherwise: a row may be missing, but is never out of date."""

    __tablename__ = "goodput_cache"

    run_id: Mapped[str] = run_key()
    """Run."""
    ingest_stamp: Mapped[int] = mapped_column(BigInteger)
    """``runs.ingest_stamp`` at the time of computation."""
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


class RunLease(Base):
    """The lease of a run: its only controller, and the expiry. The only table that is not built from files; it
    references no run, and ``rlhf db rebuild`` keeps it."""

    __tablename__ = "leases"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    """Run."""
    holder: Mapped[str]
    """Controller that holds the lease: user, machine, process; empty if it is free."""
    token: Mapped[int] = mapped_column(BigInteger)
    """Fencing token: increases with every new holder, never decreases."""
    expires_at: Mapped[datetime]
    """End of the lease unless it is renewed."""


class IngestOffset(Base):
    """Progress of ingestion in one file of a run directory."""

    __tablename__ = "ingest_offsets"

    run_id: Mapped[str] = run_key()
    """Run."""
    path: Mapped[str] = mapped_column(primary_key=True)
    """File, relative to the run directory."""
    position: Mapped[int] = mapped_column(BigInteger)
    """Bytes read, for appended files; fingerprint of the version read, for whole files."""


class Stage(Base):
    """One stage of a run: preflight, allocate, train, evaluate or promote. From the journal."""

    __tablename__ = "stages"

    run_id: Mapped[str] = run_key()
    """Run."""
    stage_index: Mapped[int] = mapped_column(primary_key=True)
    """Order in the run, from 0; a repeated stage gets a new one."""
    name: Mapped[str]
    """``preflight``, ``allocate``, ``train``, ``evaluate`` or ``promote``."""
    state: Mapped[str]
    """``running``, ``completed``, ``failed`` or ``cancelled``."""
    attempt: Mapped[int]
    """Attempt, from 1; 0 for preflight."""
    started_at: Mapped[datetime]
    """Start."""
    ended_at: Mapped[datetime | None]
    """End; null while it runs."""
    seconds: Mapped[float | None]
    """Duration; null while it runs."""
    message: Mapped[str]
    """Cause of a failure; otherwise empty."""


class RunController(Base):
    """One controller that drove the run. From the journal."""

    __tablename__ = "controllers"

    run_id: Mapped[str] = run_key()
    """Run."""
    position: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    """Byte offset of its journal line."""
    controller: Mapped[str]
    """User, machine, process."""
    flow_run_id: Mapped[str]
    """Prefect flow run; empty without Prefect."""
    flow_run_url: Mapped[str]
    """Page of that flow run; empty without Prefect."""
    started_at: Mapped[datetime]
    """Time at which it acquired the run."""

    __table_args__ = (Index(None, "flow_run_id"),)


class Promotion(Base):
    """State of the promotion of a run's model. From the journal."""

    __tablename__ = "promotions"

    run_id: Mapped[str] = run_key()
    """Run."""
    state: Mapped[str]
    """``waiting``, ``approved``, ``refused``, ``expired``, ``promoted`` or ``failed``."""
    checkpoint_step: Mapped[int]
    """Step of the checkpoint."""
    decided_by: Mapped[str]
    """User who approved or refused; empty before that."""
    reason: Mapped[str]
    """Reason given, or cause of a failure."""
    path: Mapped[str]
    """Directory of the promoted model; empty before it is written."""
    requested_at: Mapped[datetime]
    """Time of the request for approval."""
    state_changed_at: Mapped[datetime]
    """Last change of state."""


class CheckResult(Base):
    """One check result: of preflight, from the journal; or of the probe of an attempt, from ``probe-report.json``."""

    __tablename__ = "checks"

    run_id: Mapped[str] = run_key()
    """Run."""
    round: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    """Byte offset of the journal line of these checks, because a resumed run is checked again. For a probe, minus its
    attempt."""
    check_index: Mapped[int] = mapped_column(primary_key=True)
    """Order in the round, from 0."""
    check_id: Mapped[str]
    """Name of the check, for instance ``batch.prompts_divide_ranks``."""
    status: Mapped[str]
    """``passed``, ``warning``, ``blocked`` or ``skipped``."""
    found: Mapped[str]
    """Value found."""
    expected: Mapped[str]
    """Value expected; empty if the check passed."""
    advice: Mapped[str]
    """Remedy; empty if the check passed."""
    node: Mapped[str]
    """Node of the result; empty for the whole run."""
    seconds: Mapped[float]
    """Duration of the check."""
    made_at: Mapped[datetime]
    """Time of the check."""
    attempt: Mapped[int] = mapped_column(server_default=text("0"))
    """Attempt whose nodes were probed, from 1; 0 for preflight."""


class RunEvent(Base):
    """One event with its time and cause. From the journal, the agents' event files and the notes of the site daemon."""

    __tablename__ = "events"

    run_id: Mapped[str] = run_key()
    """Run."""
    source: Mapped[str] = mapped_column(primary_key=True)
    """Source file, relative to the run directory."""
    position: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    """Byte offset of its line."""
    time: Mapped[datetime]
    """Time of the event."""
    kind: Mapped[str]
    """Kind; ``run_moved`` is a change of state of the run, ``reconcile_...`` an action of the site daemon,
    ``set_aside`` something that could not be stored."""
    attempt: Mapped[int | None]
    """Attempt, from 1; null if it concerns none."""
    restart: Mapped[int | None]
    """Restart, from 0; null if it concerns none."""
    node: Mapped[str]
    """Node; empty if it concerns none."""
    role: Mapped[str | None]
    """Role of the workers; null if it concerns none."""
    state: Mapped[str | None]
    """New state, for changes of state."""
    message: Mapped[str]
    """Description in one sentence."""
    data: Mapped[dict[str, Any]]
    """Further facts, by name."""

    __table_args__ = (Index(None, "run_id", "time"), Index(None, "kind", "time"))
