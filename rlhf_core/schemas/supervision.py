"""Settings of supervision: silence, retries and caps."""

from typing import Annotated

from pydantic import Field

from rlhf_core.schemas.base import (
    LONGEST_S,
    NonNegative,
    NonNegativeFloat,
    NonNegativeSeconds,
    Positive,
    PositiveSeconds,
    Schema,
)
from rlhf_core.schemas.reports import Phase

EVIDENCE_OF_A_HANG_S = 600.0
"""Time in seconds that the agent has to collect evidence before a collective times out by itself."""


class SuperviseSpec(Schema):
    """Thresholds for the detection of failures, and limits of retries."""

    max_restarts: NonNegative = 3
    """Restarts in place without checkpoint progress before the allocation is released."""
    max_attempts: Positive = 3
    """Consecutive attempts without checkpoint progress before the run is stopped; a new checkpoint resets the count."""
    max_total_attempts: NonNegative = 0
    """Total attempts, independent of their progress, since the run was last started or resumed by a user; 0 for no
    cap."""
    max_gpu_hours: NonNegativeFloat = 0.0
    """GPU-hours of all attempts together, counted in the same way; 0 for no cap. The time limit of an attempt is at
    most the remainder, so that it saves and ends in time; on Slurm, which counts in minutes, it may be up to a minute
    longer."""
    max_node_hours: NonNegativeFloat = 0.0
    """The same in node-hours, for runs on CPUs."""
    backoff_s: NonNegativeSeconds = 30.0
    """Wait before the second attempt, in seconds; doubled for each further one, up to `supervise.max_backoff_s`."""
    max_backoff_s: NonNegativeSeconds = 600.0
    """Longest wait before a new attempt, in seconds."""
    gap_factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 5.0
    """Multiple of the longest gap seen in the same phase after which a worker without a heartbeat counts as hung,
    unless the floor is longer."""
    suspect_s: PositiveSeconds = 10.0
    """Silence after which a worker that has completed its phase before is inspected, in seconds. If it provably cannot
    continue, it is ended; otherwise it has until its floor."""
    floor_s: PositiveSeconds = 120.0
    """Silence that never counts as a hang, in any phase without its own floor, in seconds."""
    rollout_floor_s: PositiveSeconds = 180.0
    """The same while completions are generated."""
    reward_floor_s: PositiveSeconds = 180.0
    """The same while reward functions run."""
    weight_sync_floor_s: PositiveSeconds = 120.0
    """The same while weights are sent to rollout engines."""
    checkpoint_floor_s: PositiveSeconds = 600.0
    """The same while a checkpoint is written."""
    evaluate_floor_s: PositiveSeconds = 180.0
    """The same while the model is evaluated."""
    setup_floor_s: PositiveSeconds = 900.0
    """The same while a worker imports, compiles and loads, and for an agent that is stuck in a call."""
    evidence_s: PositiveSeconds = 10.0
    """Time limit of the collection of evidence on all nodes before the workers of a hung job are ended, in seconds."""
    join_s: PositiveSeconds = 600.0
    """Time that the agents of all nodes wait for each other at the start of an attempt, in seconds; after that, the
    attempt ends and blames the missing nodes. Nodes that import containers or read cold file systems start late."""
    save_timeout_s: PositiveSeconds = 3600.0
    """Longest time that `rlhf cancel --save` waits for the workers to finish their step and write a checkpoint, in
    seconds. It does not wait for workers that hang, since their agents end those; a second `rlhf cancel` without
    `--save` ends the wait."""
    agent_floor_s: PositiveSeconds = 20.0
    """Silence of a node's agent on the network after which the attempt is ended, in seconds."""
    max_excluded_nodes: NonNegative = 4
    """Maximum number of nodes excluded from a new attempt as suspects; enough nodes for the attempt always remain."""
    warm_workers: bool = True
    """Import torch, transformers and DeepSpeed once on every node, in a process from which the workers of every start
    are forked, including restarts in place. If off, each worker imports them itself."""
    learn_from_history: bool = True
    """Start with the longest gaps of earlier runs of the same shape instead of learning them again."""
    oom_remediation: bool = True
    """After CUDA runs out of memory, continue with a change that needs less of it and leaves the global batch as it is:
    in training half the micro-batch, then activation checkpointing, and so on. Each change is recorded with the
    decision."""
    rollback_on_non_finite: bool = True
    """After a NaN or infinite loss, or if training no longer learns, resume once from a checkpoint older than the
    newest."""

    def phase_floor_s(self, phase: Phase) -> float:
        """Silence in a phase that never counts as a hang, in seconds: its own floor, or the common one."""
        floor_s: float = getattr(self, f"{phase}_floor_s", self.floor_s)
        return floor_s

    @property
    def collective_timeout_s(self) -> float:
        """Timeout of collectives in seconds: longer than the agent takes to detect and diagnose a hang.

        A collective that timed out first would reset its peers' connections and destroy the evidence.
        """
        longest_floor_s = max(map(self.phase_floor_s, Phase))
        return min(self.gap_factor * longest_floor_s + EVIDENCE_OF_A_HANG_S, LONGEST_S)
