"""Provenance of a promoted model: its approval and its sources."""

from typing import Literal

from pydantic import JsonValue

from rlhf_core.schemas.base import Int32, Int64, Label, Message, Moment, Schema
from rlhf_core.schemas.checkpoint_files import FileChecksum, FileName
from rlhf_core.schemas.evaluation import EvaluationReport


class PromotionAnswer(Schema):
    """Decision on the promotion of a model (``promotion.json``). The first one counts."""

    verdict: Literal["approved", "refused", "expired"]
    """``expired``: no decision in time."""
    by: Label = ""
    """User who decided, with the operating system's user in brackets (``rlhf_core.machine.accounts``); empty for
    ``expired``."""
    reason: Message = ""
    """Reason, in a sentence."""
    time: Moment
    """Time of the decision (UTC)."""


class ModelProvenance(Schema):
    """Provenance of a promoted model (``rlhf.json`` in its folder)."""

    schema_version: Literal[1] = 1
    """Version of this file's format."""
    run_id: Label
    """Run that produced it."""
    name: Label
    """Name of that run."""
    owner: Label
    """User who requested the run, as given."""
    owner_account: Label = ""
    """Operating system's user of the request."""
    tags: tuple[Label, ...]
    """Tags of the run."""
    created_at: Moment
    """Time at which the run was requested (UTC)."""
    promoted_at: Moment
    """Time at which this folder was written (UTC)."""
    approved_by: Label
    """User who approved it, with the operating system's user in brackets."""
    reason: Message
    """Reason, in a sentence."""
    checkpoint_step: Int32
    """Number of optimizer steps of the weights."""
    spec_hash: Label
    """Hash of the part of the spec that affects training, from the checkpoint."""
    base_model: Message
    """Model that training started from; empty if it was built from a configuration."""
    seed: Int64
    """Seed of the run."""
    package_version: Label
    """Version of rlhf-flows that created the run."""
    code_revision: Label
    """Git revision of the folder in which the run was started; empty outside a repository."""
    config_source: Message
    """Config file, as given."""
    overrides: tuple[Message, ...]
    """Settings changed on the command line."""
    num_attempts: Int32
    """Number of attempts of the run."""
    num_restarts: Int32
    """Number of restarts in place."""
    incidents: tuple[Message, ...]
    """Incidents of the run: kind, attempt and message of each."""
    evaluations: tuple[EvaluationReport, ...]
    """Evaluations of the base and of these weights, without their samples."""
    spec: dict[str, JsonValue]
    """Requested spec, without settings of the machines."""
    files: dict[FileName, FileChecksum] = {}
    """All other files of the folder."""
