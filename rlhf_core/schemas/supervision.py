"""Settings of supervision: silence, retries and caps."""

from typing import Annotated

from pydantic import Field

from rlhf_core.schemas.base import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Schema


class SuperviseSpec(Schema):
    """Limits by which failures are found, and number of their retries."""

    max_restarts: NonNegative = 3
    """Restarts in place without checkpoint progress before the allocation is given up."""
    max_attempts: Positive = 3
    """Attempts in a row without checkpoint progress before the run is stopped; a new checkpoint sets the count back."""
    max_total_attempts: NonNegative = 0
    """Attempts in all, whatever progress they make, since a person last started or resumed the run; 0 for no cap."""
    max_gpu_hours: NonNegativeFloat = 0.0
    """GPU-hours of all attempts together, counted likewise; 0 for no cap. The time limit of an attempt is at most what
    is left, so that it saves and ends in time; on Slurm, which counts in minutes, it may be up to a minute longer."""
    max_node_hours: NonNegativeFloat = 0.0
    """The same in node-hours, for runs on processors."""
    backoff_s: NonNegativeFloat = 30.0
    """Wait before the second attempt; doubles with each further one, up to `supervise.max_backoff_s`."""
    max_backoff_s: NonNegativeFloat = 600.0
    """Longest wait before a new attempt."""
    gap_factor: Annotated[float, Field(ge=1)] = 5.0
    """A worker hangs when it has not beaten for this many times the longest gap seen in the same phase, or for the
    floor, whichever is longer."""
    suspect_s: PositiveFloat = 10.0
    """Silence after which a worker that has been through its phase before is looked at, in seconds; what provably
    stands still is ended then, all else has until its floor."""
    floor_s: PositiveFloat = 120.0
    """Silence that is never taken for a hang in any phase without a floor of its own, in seconds."""
    rollout_floor_s: PositiveFloat = 180.0
    """The same while completions are generated."""
    reward_floor_s: PositiveFloat = 180.0
    """The same while reward functions run."""
    weight_sync_floor_s: PositiveFloat = 120.0
    """The same while weights go to rollout engines."""
    checkpoint_floor_s: PositiveFloat = 600.0
    """The same while a checkpoint is written."""
    evaluate_floor_s: PositiveFloat = 180.0
    """The same while the model is evaluated."""
    setup_floor_s: PositiveFloat = 900.0
    """The same while a worker imports, compiles and loads."""
    evidence_s: PositiveFloat = 10.0
    """Longest time for collecting evidence on all nodes before the workers of a hung job are ended, in seconds."""
    agent_floor_s: PositiveFloat = 20.0
    """Silence of a node's agent on the network after which the attempt is given up, in seconds."""
    max_excluded_nodes: NonNegative = 4
    """Most nodes that suspicion may keep out of a new attempt; never so many that it could not be placed."""
    warm_workers: bool = True
    """Import torch, transformers and DeepSpeed once on every node, in a process that the workers of every start are
    forked from, also those of a restart in place. Off: each worker imports them itself."""
    learn_from_history: bool = True
    """Begin with the longest gaps of earlier runs of the same shape, instead of learning them anew."""
    oom_remediation: bool = True
    """After CUDA ran out of memory, go on with half the micro-batch and the same global batch, then with activation
    checkpointing, and so on; each change is recorded with the decision."""
    rollback_on_non_finite: bool = True
    """After a NaN or infinite loss, or training that no longer learns, go on once from an older checkpoint than the
    newest."""
