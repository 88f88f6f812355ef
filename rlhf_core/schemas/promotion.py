"""Provenance of a promoted model: its approval and its sources."""

from typing import Literal

from pydantic import JsonValue

from rlhf_core.schemas.base import Int32, Int64, Label, Message, Moment, Schema
from rlhf_core.schemas.checkpoint_files import FileChecksum, FileName
from rlhf_core.schemas.reports import EvaluationReport


class PromotionAnswer(Schema):
    """The answer to the question whether a model may be promoted (``promotion.json``). The first one counts."""

    verdict: Literal["approved", "refused", "expired"]
    """``expired``: no answer in time."""
    by: Label = ""
    """Name of the person who answered, with the operating system's user in brackets (``rlhf_core.machine.accounts``);
    empty for ``expired``."""
    reason: Message = ""
    """Reason, in a sentence."""
    time: Moment
    """Time of the answer (UTC)."""


class ModelProvenance(Schema):
    """Provenance of a promoted model (``rlhf.json`` in its folder)."""

    schema_version: Literal[1] = 1
    """Of this file."""
    run_id: Label
    """Run that made it."""
    name: Label
    """Name of that run."""
    owner: Label
    """Name of the person who asked for the run, as was said."""
    owner_account: Label = ""
    """The operating system's user that said so."""
    tags: tuple[Label, ...]
    """Tags of the run."""
    created_at: Moment
    """Time at which the run was requested (UTC)."""
    promoted_at: Moment
    """Time at which this folder was written (UTC)."""
    approved_by: Label
    """Name of the person who allowed it, with the operating system's user in brackets."""
    reason: Message
    """Reason, in a sentence."""
    checkpoint_step: Int32
    """Optimizer steps that the weights have seen."""
    spec_hash: Label
    """Hash of the part of the spec that training depends on, as the checkpoint has it."""
    base_model: Message
    """Model that training started from; empty when it was built from a configuration."""
    seed: Int64
    """Seed of the run."""
    package_version: Label
    """Version of rlhf-flows that made the run."""
    code_revision: Label
    """Git revision of the folder that the run was started from; empty outside a repository."""
    config_source: Message
    """The config file, as given."""
    overrides: tuple[Message, ...]
    """Settings changed on the command line."""
    num_attempts: Int32
    """Attempts that the run took."""
    num_restarts: Int32
    """Restarts in place within them."""
    incidents: tuple[Message, ...]
    """Incidents of the run: kind, attempt and message of each."""
    evaluations: tuple[EvaluationReport, ...]
    """Evaluations of the base and of these weights, without their samples."""
    spec: dict[str, JsonValue]
    """Requested spec, without what is only about the machines."""
    files: dict[FileName, FileChecksum] = {}
    """Every other file of the folder."""
