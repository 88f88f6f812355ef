"""Types of the rows that ``rlhf show --json`` has: plain data, as :mod:`rlhf_core.history.queries.plain` makes it.

The columns are explained in :mod:`rlhf_core.history.tables`, from whose tables and views the rows come, without their
``run_id``. Only what a query adds or renames is explained here.
"""

from typing import Any, TypedDict

from rlhf_core.schemas.regression import Regression


class RunRow(TypedDict):
    """A row of ``runs``, without its columns for ingestion."""

    run_id: str
    name: str
    state: str
    message: str
    owner: str
    owner_account: str
    seed: int
    algorithm: str
    total_steps: int
    config_source: str
    overrides: list[str]
    spec: dict[str, Any]
    shape: str
    trial_of: str
    tags: list[str]
    package_version: str
    code_revision: str
    run_dir: str
    created_at: str
    started_at: str | None
    ended_at: str | None
    progress_at: str
    num_attempts: int
    missing_steps: str
    """Steps without metrics of an ended run, in words; empty if none is missing."""
    seconds: float
    """Time from the request to the end of the run, or until now, without ``undriven_s``."""
    undriven_s: float
    """Time in which nothing drove the run."""
    metrics_pruned: bool
    """True if metrics by step were removed with ``rlhf db prune``."""
    no_nodes_since: str | None
    """Time since when no attempt of a queued run has got its nodes; None if the last one had them."""


class ListedRun(TypedDict):
    """A run in a list of runs: columns of ``runs``, and those of :class:`RunRow` that a query adds."""

    run_id: str
    name: str
    state: str
    created_at: str
    num_attempts: int
    owner: str
    tags: list[str]
    ended_at: str | None
    last_step: int | None
    """Step of the newest metric; None without any."""
    total_steps: int
    message: str
    trial_of: str
    undriven_s: float
    no_nodes_since: str | None
    missing_steps: str
    seconds: float
    regressed: tuple[Regression, ...]
    """Held-out scores that became worse."""


class StageRow(TypedDict):
    """A row of ``stages``."""

    stage_index: int
    name: str
    state: str
    attempt: int
    started_at: str
    ended_at: str | None
    seconds: float
    """Duration; of a stage that has not ended, until the end of the run."""
    message: str


class CheckResultRow(TypedDict):
    """A row of ``checks``."""

    id: str
    """``check_id``."""
    status: str
    found: str
    expected: str
    advice: str
    node: str
    seconds: float
    made_at: str
    attempt: int


class AttemptRow(TypedDict):
    """A row of ``attempts``."""

    number: int
    state: str
    message: str
    failure_kind: str | None
    scheduler: str
    scheduler_job_id: str | None
    submission: dict[str, Any] | None
    placement: dict[str, Any] | None
    num_nodes: int
    resume_checkpoint: str
    resumed_from_step: int
    planned_at: str | None
    submitted_at: str | None
    started_at: str | None
    ended_at: str | None
    outcome_state: str | None
    outcome_failure_kind: str | None
    outcome_message: str | None
    num_restarts: int | None
    last_step: int | None
    outcome_at: str | None
    nodes: list[str]
    """Nodes whose agents have reported, by index."""
    outcome: str | None
    """``outcome_state``; of a lost attempt, the state that its controller found."""


class RestartRow(TypedDict):
    """A row of ``restarts``."""

    attempt: int
    restart: int
    role: str | None
    started_at: str | None
    ended_at: str | None
    first_step: int | None
    last_step: int | None
    last_valid_step: int | None
    first_step_at: str | None
    """End of the first step; of a trainer that reports no step times, the time of the first metric."""


class RunControllerRow(TypedDict):
    """A row of ``controllers``."""

    position: int
    controller: str
    flow_run_id: str
    flow_run_url: str
    started_at: str


class PromotionRow(TypedDict):
    """A row of ``promotions``."""

    state: str
    checkpoint_step: int
    decided_by: str
    reason: str
    path: str
    requested_at: str
    state_changed_at: str


class IncidentRow(TypedDict):
    """A row of ``incidents``."""

    incident_id: str
    attempt: int
    restart: int
    found_by: str
    failure_kind: str
    phase: str
    step: int | None
    suspect_ranks: list[int]
    suspect_nodes: list[str]
    detected_after_s: float | None
    seen_at: str
    fingerprint: str
    evidence_dir: str
    message: str
    collective: str
    collective_sequence: int | None
    number: int
    role: str | None


class DecisionRow(TypedDict):
    """A row of ``decisions``."""

    decision_id: str
    attempt: int
    restart: int
    action: str
    reason: str
    decided_by: str
    decided_at: str
    delay_s: float
    excluded_nodes: list[str]
    config_diff: dict[str, Any]
    resume_checkpoint: str
    number: int


class CheckpointRow(TypedDict):
    """A row of ``checkpoints``."""

    step: int
    path: str
    loop: str
    loop_finished: bool
    num_ranks: int
    spec_hash: str
    num_files: int
    bytes: int
    completed_at: str
    removed_at: str | None


class EvaluationRow(TypedDict):
    """A row of ``evaluations``."""

    name: str
    when: str
    """``when_made``."""
    metric: str
    value: float | None
    ci_low: float | None
    ci_high: float | None
    num_prompts: int
    num_samples: int
    checkpoint_step: int
    seconds: float
    made_at: str


class MetricValue(TypedDict):
    """The newest value of a metric."""

    value: float | str
    """``NaN``, ``Infinity`` or ``-Infinity`` if it is not finite."""
    step: int
    attempt: int
    restart: int
    time: str


class GoodputRow(TypedDict):
    """A row of view ``run_goodput``."""

    wall_s: float
    queue_s: float
    productive_s: float
    repeated_s: float
    lost_s: float
    ettr: float | None


class LostTimeRow(TypedDict):
    """A row of view ``run_lost_time``."""

    failure_kind: str
    num_incidents: int
    downtime_s: float
    repeated_s: float
    lost_s: float


class UnacknowledgedSync(TypedDict):
    """A weight sync that not all engines have acknowledged: columns of ``weight_syncs``."""

    attempt: int
    restart: int
    version: int
    engines: int
    acknowledged: int


class WeightSyncs(TypedDict):
    """Summary of ``weight_syncs``, with medians over the completed syncs; null if none was completed."""

    num_syncs: int
    num_versions: int
    """Distinct versions."""
    engines: int
    """Engines of the newest sync."""
    transports: list[str]
    seconds: float | None
    wire_s: float | None
    apply_s: float | None
    gb_per_s: float | None
    bytes: float | None
    unacknowledged: list[UnacknowledgedSync]
