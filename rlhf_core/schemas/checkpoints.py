"""Settings of checkpoints."""

from typing import Literal

from rlhf_core.schemas.base import Positive, Schema


class CheckpointSpec(Schema):
    """Settings of checkpoints: how often to save the training state, and where to keep copies of it."""

    every_num_steps: Positive = 10
    """Steps between checkpoints; the end of the warm start and the last step are saved as well."""
    keep_last: Positive = 2
    """Number of newest checkpoints to keep. Also kept are the one at the end of the warm start, the last one of
    training, and up to two older ones (to go back to before the last `health.window_steps` steps)."""
    background: bool = True
    """Write from a snapshot in main memory while training goes on: the step waits for the copy only. Without room for
    it, or with weights that are converted for the disk, the step waits until all is written. Only for `native`."""
    memory: Literal["off", "own", "peer"] = "own"
    """Copy of the newest checkpoint that outlives the workers in main memory (`/dev/shm`), from which a restart goes on
    without the file system: none; of each node on that node; or also on the next node, for a copy that is lost or
    damaged, at twice the memory (on one node as `own`). Only for `native`."""
