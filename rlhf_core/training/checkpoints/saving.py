"""Common parts of all ways of saving a checkpoint: one rank's content, publication, errors."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from rlhf_core.diagnosis.retention import kept_steps
from rlhf_core.errors import DiskFull, WorkerError
from rlhf_core.files.reading import bring_to_disk
from rlhf_core.run_dir.checkpoint import CheckpointDir
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.checkpoint_files import CheckpointManifest, FileChecksum
from rlhf_core.schemas.run import RunSpec
from rlhf_core.training.checkpoints.soundness import spec_hash, training_part
from rlhf_core.training.checkpoints.state import Progress


@dataclass(frozen=True)
class CheckpointPart:
    """Content that this rank contributes to one checkpoint."""

    progress: Progress
    checkpoint: CheckpointDir
    model: PreTrainedModel
    critic: nn.Module | None
    """Value model that is trained beside the policy."""
    state: dict[str, Any]
    """Of this rank."""

    @property
    def weights(self) -> dict[str, nn.Module]:
        """Models by their folder."""
        critic = {} if self.critic is None else {self.checkpoint.critic.name: self.critic}
        return {self.checkpoint.model.name: self.model, **critic}


class CheckpointPublication:
    """Publishes checkpoints whose files are all on disk, and removes those that need not be kept; on rank 0."""

    def __init__(self, run_dir: RunDir, spec: RunSpec, num_ranks: int, attempt: int) -> None:
        """Create the publication of an attempt.

        Args:
            num_ranks: number of ranks that write.
        """
        self._run_dir = run_dir
        self._spec = spec
        self._num_ranks = num_ranks
        self._attempt = attempt

    def settings(self) -> bytes:
        """Content of the file with the settings of the checkpoint."""
        return (json.dumps(training_part(self._spec), indent=2) + "\n").encode()

    def manifest(self, progress: Progress, files: Mapping[str, FileChecksum]) -> CheckpointManifest:
        """Content of ``COMPLETE``."""
        return CheckpointManifest(
            step=progress.step,
            loop=progress.loop,
            loop_finished=progress.loop_finished,
            num_ranks=self._num_ranks,
            spec_hash=spec_hash(self._spec),
            files=dict(sorted(files.items())),
            time=utc_now(),
            best=progress.best,
        )

    def publish(self, checkpoint: CheckpointDir, manifest: CheckpointManifest) -> None:
        """Publish a checkpoint, on rank 0, once all of its files are on disk.

        Raises:
            WorkerError: a newer attempt of the run has begun.
            OSError: the file system failed.
        """
        if self._run_dir.is_superseded(self._attempt):
            # This node was frozen and has resumed: a checkpoint of the same step may exist, and that one is kept.
            raise WorkerError(f"a newer attempt has begun: checkpoint {manifest.step} of this one is not published")
        partial = checkpoint.partial
        for folder in (partial.trainer_state, partial.model, partial.critic):
            if folder.is_dir():
                bring_to_disk(folder)
        checkpoint.put_in_place(manifest)
        best = {manifest.best.step} if manifest.best is not None else set()
        self._run_dir.keep_checkpoints(lambda steps: kept_steps(steps, manifest.step, self._spec) | best)

    def failure(self, step: int, problem: str, *, disk_full: bool) -> WorkerError:
        """Build the error of a checkpoint that could not be written, the same on every rank.

        Args:
            problem: message of the problem on each rank.
        """
        if disk_full:
            return DiskFull(
                f"the disk became full while checkpoint {step} was written to {self._run_dir.checkpoints_dir} "
                f"({problem}). Older checkpoints are untouched; make room, then resume the run"
            )
        return WorkerError(f"checkpoint {step} could not be written: {problem}")
