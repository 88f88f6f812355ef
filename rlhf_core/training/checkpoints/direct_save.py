"""Synchronous saving, while the step waits: each rank writes its files in turn, and all agree after each kind.

For snapshots that do not fit into main memory, and for weights whose form on disk differs from that in memory.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from transformers import PreTrainedTokenizerBase
from transformers.utils import SAFE_WEIGHTS_NAME

from rlhf_core.files.whole import comes_from_full_disk, remove_tree
from rlhf_core.run_dir.checkpoint import CheckpointDir
from rlhf_core.schemas.checkpoint_files import CheckpointManifest, FileChecksum
from rlhf_core.survival import Survived
from rlhf_core.training.checkpoints.saving import CheckpointPart, CheckpointPublication
from rlhf_core.training.checkpoints.soundness import settings_file
from rlhf_core.training.checkpoints.state import state_file
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.models.adapters import has_adapter, save_adapter
from rlhf_core.training.models.gathering import is_split, save_model, save_weights
from rlhf_core.training.models.tensor_files import flattened, write_tensors

Result = TypeVar("Result")


class DirectSave:
    """Writes checkpoints synchronously, with all ranks."""

    def __init__(
        self,
        ranks: Ranks,
        tokenizer: PreTrainedTokenizerBase,
        publication: CheckpointPublication,
        beat: Callable[[], None],
        base: Path,
    ) -> None:
        """Create a writer.

        Args:
            beat: called on progress.
            base: folder of the base model, if an adapter is trained.
        """
        self._base = base
        self._ranks = ranks
        self._tokenizer = tokenizer
        self._publication = publication
        self._beat = beat

    def write(self, part: CheckpointPart) -> None:
        """Write one complete checkpoint. Collective.

        Raises:
            DiskFull, WorkerError: a rank could not write; raised by every rank.
        """
        written = self._together(part, lambda: self._write_state(part))
        # No rank starts gathering weights before it knows that all of them will.
        written += self._together(part, lambda: self._write_model(part))
        if part.critic is not None:
            written += self._together(part, lambda: self._write_critic(part))
        checksums = self._together(part, lambda: part.checkpoint.partial.checksums(written, self._beat))
        parts = self._ranks.gather({name: found.model_dump() for name, found in checksums.items()})
        files = {name: FileChecksum.model_validate(found) for one in parts for name, found in one.items()}
        manifest = self._publication.manifest(part.progress, files)
        self._together(part, lambda: self._publish(part, manifest))

    def _publish(self, part: CheckpointPart, manifest: CheckpointManifest) -> None:
        if self._ranks.is_first:
            self._publication.publish(part.checkpoint, manifest)

    def _write_state(self, part: CheckpointPart) -> list[Path]:
        path = state_file(part.checkpoint.partial, self._ranks.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(path, *flattened(part.state), self._beat)
        return [path]

    def _write_model(self, part: CheckpointPart) -> list[Path]:
        model, folder = part.model, part.checkpoint.partial.model
        if has_adapter(model):
            with self._ranks.collective():
                save_adapter(model, folder, self._base, self._ranks.is_first, self._beat)
        elif is_split(model):
            with self._ranks.collective():
                save_model(model, folder, self._ranks.is_first, self._beat)
        elif self._ranks.is_first:
            save_model(model, folder, is_first=True, beat=self._beat)
        if not self._ranks.is_first:
            return []
        self._beat()
        settings = settings_file(part.checkpoint.partial)
        settings.write_bytes(self._publication.settings())
        self._tokenizer.save_pretrained(folder)
        return [settings, *(path for path in sorted(folder.rglob("*")) if path.is_file())]

    def _write_critic(self, part: CheckpointPart) -> list[Path]:
        assert part.critic is not None
        path = part.checkpoint.partial.critic / SAFE_WEIGHTS_NAME
        with self._ranks.collective():
            save_weights(part.critic, path, self._ranks.is_first, self._beat)
        return [path] if self._ranks.is_first else []

    def _together(self, part: CheckpointPart, work: Callable[[], Result]) -> Result:
        return together(self._ranks, self._publication, part.checkpoint, work)


def together(
    ranks: Ranks, publication: CheckpointPublication, checkpoint: CheckpointDir, work: Callable[[], Result]
) -> Result:
    """Do this rank's share of the work and agree with the others on the outcome. Collective.

    Raises:
        DiskFull, WorkerError: a rank failed; raised by every rank, and the partial checkpoint is removed.
    """
    with Survived() as outcome:  # any error must reach the other ranks before it is raised
        result = work()
    failed, full = ranks.sum([float(outcome.error is not None), float(comes_from_full_disk(outcome.error))])
    if not failed:
        return result
    reports = ranks.gather(outcome.problem)
    if ranks.is_first:
        remove_tree(checkpoint.partial.root)
    problems = "; ".join(f"rank {rank}: {report}" for rank, report in enumerate(reports) if report)
    raise publication.failure(checkpoint.step, problems, disk_full=bool(full)) from outcome.error
