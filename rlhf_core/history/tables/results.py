"""Tables of the results of a run: checkpoints, weights and evaluations."""

from datetime import datetime

from sqlalchemy import BigInteger, ForeignKeyConstraint
from sqlalchemy.orm import Mapped, mapped_column

from rlhf_core.history.tables.base import Base, run_key


class Checkpoint(Base):
    """One complete checkpoint. From its ``COMPLETE``. The row remains when retention removes the checkpoint."""

    __tablename__ = "checkpoints"

    run_id: Mapped[str] = run_key()
    """Run."""
    step: Mapped[int] = mapped_column(primary_key=True)
    """Optimizer steps done."""
    path: Mapped[str]
    """Folder, relative to the run directory."""
    loop: Mapped[str]
    """Training loop that wrote it, for instance ``sft`` or ``grpo``."""
    loop_finished: Mapped[bool]
    """True at the end of that loop."""
    num_ranks: Mapped[int]
    """Ranks that wrote it."""
    spec_hash: Mapped[str]
    """Hash of the settings that affect training."""
    num_files: Mapped[int]
    """Files."""
    bytes: Mapped[int] = mapped_column(BigInteger)
    """Size of all files."""
    completed_at: Mapped[datetime]
    """Time of its completion."""
    removed_at: Mapped[datetime | None]
    """Time at which it was first found missing; null while it exists."""


class WeightVersion(Base):
    """The weights of one complete checkpoint, by their hash."""

    __tablename__ = "weight_versions"

    run_id: Mapped[str] = run_key()
    """Run."""
    version: Mapped[int] = mapped_column(primary_key=True)
    """Version: the step of the checkpoint."""
    sha256: Mapped[str]
    """Hash of the weight file; with several files, of the lines ``<sha256>  <path>`` in path order."""
    num_files: Mapped[int]
    """Weight files."""
    checkpoint_step: Mapped[int]
    """Step of the checkpoint."""
    made_at: Mapped[datetime]
    """Time of the checkpoint's completion."""


class WeightSync(Base):
    """One sync of a version of the weights to the rollout engines. From ``weight-syncs.jsonl``."""

    __tablename__ = "weight_syncs"

    run_id: Mapped[str] = run_key()
    """Run."""
    attempt: Mapped[int] = mapped_column(primary_key=True)
    """Attempt, from 1."""
    restart: Mapped[int] = mapped_column(primary_key=True)
    """Restart, from 0."""
    number: Mapped[int] = mapped_column(primary_key=True)
    """Number in its restart, from 0."""
    version: Mapped[int]
    """Number of optimizer steps of the weights."""
    transport: Mapped[str]
    """Transport, for instance ``in_process``; empty if the sync did not complete."""
    bytes: Mapped[int] = mapped_column(BigInteger)
    """Bytes sent, over all senders."""
    seconds: Mapped[float | None]
    """Time from the request to the last acknowledgement; null if the sync did not complete."""
    wire_s: Mapped[float]
    """Part of it on the wire; 0 if the weights stay in the process."""
    apply_s: Mapped[float]
    """Part of it in which engines loaded the weights."""
    gb_per_s: Mapped[float | None]
    """Rate, as bytes over all seconds; null if the sync did not complete."""
    engines: Mapped[int]
    """Engines to update."""
    acknowledged: Mapped[int]
    """Engines that have acknowledged the version. The others of a group were lost or skipped; in the processes of
    trainers, nothing is sampled before all have."""
    time: Mapped[datetime]
    """Time of the acknowledgements, or of the request without any."""


class Evaluation(Base):
    """One evaluation. From ``evaluations/*.json``."""

    __tablename__ = "evaluations"

    run_id: Mapped[str] = run_key()
    """Run."""
    when_made: Mapped[str] = mapped_column(primary_key=True)
    """``before`` the main algorithm (after the warm start), or ``after`` training."""
    name: Mapped[str] = mapped_column(primary_key=True)
    """``greedy``, ``sampled``, ``preference``, ``loss``, or ``pass@k`` with a number for k."""
    metric: Mapped[str]
    """Name of the score or loss."""
    value: Mapped[float | None]
    """Mean score or loss; null if it is not finite."""
    ci_low: Mapped[float | None]
    """Lower end of the confidence interval; ``evaluate.confidence`` sets its level."""
    ci_high: Mapped[float | None]
    """Upper end of the confidence interval."""
    num_prompts: Mapped[int]
    """Prompts."""
    num_samples: Mapped[int]
    """Completions scored."""
    checkpoint_step: Mapped[int]
    """Step of the weights."""
    seconds: Mapped[float]
    """Duration."""
    made_at: Mapped[datetime]
    """Time of the evaluation."""


class EvaluationSample(Base):
    """One scored completion of an evaluation."""

    __tablename__ = "evaluation_samples"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    """Run."""
    when_made: Mapped[str] = mapped_column(primary_key=True)
    """As in ``evaluations``."""
    name: Mapped[str] = mapped_column(primary_key=True)
    """As in ``evaluations``."""
    row_index: Mapped[int] = mapped_column(primary_key=True)
    """Order in the evaluation, from 0."""
    prompt_uid: Mapped[str]
    """Id of the prompt: a hash of its content."""
    sample_index: Mapped[int]
    """Number among the completions of that prompt, from 0."""
    prompt: Mapped[str]
    """Text of the prompt."""
    completion: Mapped[str]
    """Text of the completion."""
    answer: Mapped[str]
    """Reference answer."""
    score: Mapped[float | None]
    """Score; null if it is not finite."""

    __table_args__ = (
        ForeignKeyConstraint(
            ["run_id", "when_made", "name"],
            ["evaluations.run_id", "evaluations.when_made", "evaluations.name"],
            ondelete="CASCADE",
        ),
    )
