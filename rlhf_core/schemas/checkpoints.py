"""Settings of checkpoints."""

from typing import Literal

from rlhf_core.schemas.base import Positive, Schema


class CheckpointSpec(Schema):
    """Settings of checkpoints: interval of saves, and places of copies."""

    every_num_steps: Positive = 10
    """Steps between checkpoints; the end of the warm start and the last step are saved as well."""
    keep_last: Positive = 2
    """Number of newest checkpoints to keep. Also kept are the one at the end of the warm start, the last one of
    training, and up to two older ones (to roll back to before the last `health.window_steps` steps)."""
    keep_best: bool = False
    """Also keep the checkpoint of the main loop with the best evaluation during training, and evaluate and promote that
    one instead of the last: by `eval/preference` or `eval/loss` if `promote.metric` is `preference` or `loss`,
    otherwise by `eval/greedy`. `evaluate.every_num_steps` has to be a multiple of `checkpoint.every_num_steps`; the
    last step is evaluated too. Only for `native`."""
    background: bool = True
    """Write from a snapshot in main memory while training continues: the step waits only for the copy. Without room for
    the snapshot, or with weights that are converted for the disk, the step waits until everything is written. Only for
    `native`."""
    memory: Literal["off", "own", "peer"] = "own"
    """Copy of the newest checkpoint in main memory (`/dev/shm`) that survives the workers, so that a restart resumes
    without the file system: none (`off`); of each node on that node (`own`); or also on the next node (`peer`), in case
    a copy is lost or damaged, with twice the memory (on one node like `own`). Only for `native`."""
