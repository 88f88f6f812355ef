"""What makes a promoted model traceable: who allowed it, and what it was made from."""

from datetime import datetime
from typing import Literal

from pydantic import JsonValue

from rlhf_core.schemas.base import Schema
from rlhf_core.schemas.reports import EvaluationReport, FileChecksum


class PromotionAnswer(Schema):
    """The answer to the question whether a model may be promoted (``promotion.json``). The first one counts."""

    verdict: Literal["approved", "refused", "expired"]
    """``expired``: nobody answered in time."""
    by: str = ""
    """Who answered, with the operating system's user in brackets (``rlhf_core.accounts``); empty for ``expired``."""
    reason: str = ""
    """Why, in a sentence for a person."""
    time: datetime
    """When (UTC)."""


class ModelProvenance(Schema):
    """Where a promoted model comes from (``rlhf.json`` in its folder)."""

    schema_version: Literal[1] = 1
    """Of this file."""
    run_id: str
    """Run that made it."""
    name: str
    """Name of that run."""
    owner: str
    """Who asked for the run, as was said."""
    owner_account: str = ""
    """The operating system's user that said so."""
    tags: tuple[str, ...]
    """Tags of the run."""
    created_at: datetime
    """When the run was asked for (UTC)."""
    promoted_at: datetime
    """When this folder was written (UTC)."""
    approved_by: str
    """Who allowed it, with the operating system's user in brackets."""
    reason: str
    """Why, in a sentence for a person."""
    checkpoint_step: int
    """Optimizer steps that the weights have seen."""
    spec_hash: str
    """Hash of the part of the spec that training depends on, as the checkpoint has it."""
    base_model: str
    """Model that training started from; empty when it was built from a configuration."""
    seed: int
    """Seed of the run."""
    package_version: str
    """Version of rlhf-flows that made the run."""
    code_revision: str
    """Git revision of the folder that the run was started from; empty outside a repository."""
    config_source: str
    """The config file, as given."""
    overrides: tuple[str, ...]
    """What was changed of it."""
    num_attempts: int
    """Attempts that the run took."""
    num_restarts: int
    """Restarts in place within them."""
    incidents: tuple[str, ...]
    """What went wrong on the way: kind, attempt and message of each."""
    evaluations: tuple[EvaluationReport, ...]
    """Evaluations of the base and of these weights, without their samples."""
    spec: dict[str, JsonValue]
    """What was asked for, without what is only about the machines."""
    files: dict[str, FileChecksum] = {}
    """Every other file of the folder."""
