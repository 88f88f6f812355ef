"""Shape of a run: the settings that determine the durations of its phases."""

import hashlib
import json
from typing import Any

from rlhf_core.schemas.run import RunSpec

_SHAPING = {
    *("kind", "micro_batch_size", "micro_batch_tokens", "gradient_checkpointing", "deterministic", "zero_stage"),
    *("offload", "sequence_parallel", "framework", "argv"),
}
"""Settings of trainers that determine the parts of a step."""


def shape_key(spec: RunSpec) -> str:
    """Hash of the settings that determine the silences of a run in each phase: model, lengths, generation, parts and
    passes of a batch, nodes.

    Runs of the same shape share their learned limits of silence, and predict each other's steps.
    """
    part: dict[str, Any] = spec.model_dump(
        mode="json",
        include={
            "model": True,
            "rollout": True,
            "reward": {"functions", "weights"},
            "trainer": _SHAPING,
            "data": {"max_prompt_tokens", "max_completion_tokens"},
            "resources": {"num_nodes", "ranks_per_node", "gpus_per_node"},
            "slurm": {"gpu_type"},
        },
        warnings=False,  # before 2.13, pydantic takes a trainer whose settings are left out for one of another kind
    )
    part["algorithm"] = [spec.algorithm]
    if spec.loops.main is not None:
        algorithm = spec.loops.main.algorithm
        part["algorithm"] += [algorithm.rows_per_step, algorithm.group, *algorithm.passes, algorithm.sampling_rounds]
        part["algorithm"] += [algorithm.reference, algorithm.scores_first]
        part["algorithm"] += [spec.loops.main.reference] if spec.loops.main.reference else []
    return hashlib.blake2b(json.dumps(part, sort_keys=True).encode(), digest_size=8).hexdigest()
