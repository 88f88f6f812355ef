"""Hand-made reports of agents, trainers and controllers, in which a test sets only the fields it is about."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from rlhf_core.run_dir.run import run_name
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.checkpoint_files import CheckpointManifest
from rlhf_core.schemas.evaluation import EvaluationReport
from rlhf_core.schemas.failures import Action, DecidedBy, Decision, FailureKind, Incident
from rlhf_core.schemas.promotion import ModelProvenance
from rlhf_core.schemas.reports import GroupPlace, Phase, RankStatus
from rlhf_core.schemas.run import RunSpec
from rlhf_core.schemas.stored_spec import StoredSpec


def rank_status(rank: int, **about: Any) -> RankStatus:
    """A trainer rank that sleeps in a step."""
    plain = {
        "role": Role.TRAINER,
        "local_rank": rank,
        "pid": 1000 + rank,
        "sequence": 1,
        "collectives": 1,
        "in_collective": False,
        "step": 1,
        "phase": Phase.TRAIN,
        "age_s": 0.1,
        "process_state": "S",
    }
    return RankStatus.model_validate({"rank": rank, **plain, **about})


def group_place(name: str, members: Sequence[int], entered: int, **about: Any) -> GroupPlace:
    """A rank's position in a group with gloo, waiting in the collective that it has entered last."""
    plain = {"backend": "gloo", "waits_in": entered, "operation": "gloo:all_reduce", "shape": "Float [[4]]"}
    return GroupPlace.model_validate({"name": name, "members": members, "entered": entered, **plain, **about})


def checkpoint_manifest(step: int, **about: Any) -> CheckpointManifest:
    """Content of ``COMPLETE`` of a checkpoint without files."""
    plain = {"loop": "sft", "loop_finished": False, "num_ranks": 1, "spec_hash": "", "files": {}, "time": utc_now()}
    return CheckpointManifest.model_validate({"step": step, **plain, **about})


def evaluation_report(when: str, name: str, value: float, **about: Any) -> EvaluationReport:
    """An evaluation without a table of samples."""
    plain = {
        "metric": "exact_match",
        "ci_low": value - 0.1,
        "ci_high": value + 0.1,
        "num_prompts": 8,
        "num_samples": 8,
        "checkpoint_step": 2 if when == "before" else 10,
        "seconds": 1.0,
        "time": utc_now(),
        "samples": (),
    }
    return EvaluationReport.model_validate({"when": when, "name": name, "value": value, **plain, **about})


def incident_of(failure_kind: FailureKind, attempt: int = 1, restart: int = 0, **about: Any) -> Incident:
    """An incident that was detected just now."""
    plain = {"message": f"it was {failure_kind.value}", "seen_at": utc_now()}
    place = {"attempt": attempt, "restart": restart, "failure_kind": failure_kind}
    return Incident.model_validate({**place, **plain, **about})


def decision_of(action: Action, attempt: int = 1, restart: int = 0, **about: Any) -> Decision:
    """A decision of agent 0."""
    plain = {"reason": "one restart is left", "decided_by": DecidedBy.AGENT, "decided_at": utc_now()}
    return Decision.model_validate({"attempt": attempt, "restart": restart, "action": action, **plain, **about})


def stored_spec(run_id: str, spec: RunSpec, created_at: datetime | None = None, **about: Any) -> StoredSpec:
    """Content of ``spec.json`` of a run."""
    plain = {"owner": "tester", "config_source": "", "package_version": "0", "created_at": created_at or utc_now()}
    return StoredSpec.model_validate({"run_id": run_id, "spec": spec, **plain, **about})


def model_provenance(run_id: str, **about: Any) -> ModelProvenance:
    """Origin of a promoted model."""
    texts = dict.fromkeys(("spec_hash", "base_model", "package_version", "code_revision", "config_source"), "")
    plain = {
        "name": run_name(run_id),
        "owner": "ada",
        "created_at": utc_now(),
        "promoted_at": utc_now(),
        "approved_by": "bea",
        "reason": "better",
        "checkpoint_step": 4,
        "seed": 0,
        "num_attempts": 1,
        "num_restarts": 0,
        "spec": {},
        **dict.fromkeys(("tags", "overrides", "incidents", "evaluations"), ()),
    }
    return ModelProvenance.model_validate({"run_id": run_id, **texts, **plain, **about})
