"""Copy of the newest checkpoint in the nodes' main memory, from which a restart resumes.

    <folder>/trainer_state/rank-00000.safetensors   files as in the checkpoint: those of the ranks of this node
    <folder>/model/ ...                             those of rank 0, on its node
    <folder>/parts/rank-00000.json                  checksums of each rank's files there, written last (`MemoryPart`)
    <folder>/COMPLETE                               written by a restart that resumes from it
    <folder>/peer/ ...                              the same for ranks of the previous node, with `memory = "peer"`

The files are the memory of the snapshot itself, in an in-memory file system: they take no extra memory, and outlive the
ranks until the node's agent ends. A copy that a kill left half overwritten has no part file and is ignored.
"""

import functools
import hmac
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.files.private import FILE_MODE, make_folder
from rlhf_core.files.whole import read_all, write_model
from rlhf_core.schemas.base import Int32, Label, Schema
from rlhf_core.schemas.checkpoint_files import CheckpointManifest
from rlhf_core.training.checkpoints.background_save import Content

PEER = "peer"
"""Folder of the parts that a node keeps for the previous node."""
PLACES = ("", PEER)
"""Folders that may hold a part."""


class MemoryPart(Schema):
    """Files of one rank in memory."""

    save: Label
    """Identity of the save, shared by all of its parts."""
    attempt: Int32
    """Attempt of the run that wrote it."""
    rank: Int32
    """Rank that wrote it."""
    manifest: CheckpointManifest
    """Manifest of the checkpoint, with the files of this rank only."""


class MemoryCopy:
    """In-memory copy of one rank's part, on its node."""

    def __init__(self, folder: Path, rank: int, kept: Mapping[str, Collection[int]] | None = None) -> None:
        """Write nothing yet.

        Args:
            kept: ranks whose parts this node keeps, by folder, if this rank is to remove those of others.
        """
        self.folder = folder
        self._part = _part_file(folder, rank)
        self._kept = kept or {}

    def invalidate(self) -> None:
        """Invalidate the copy before its files change.

        The first time, remove what other ranks had here before a restart, and weights that it brought: all ranks have
        loaded theirs, and the checkpoint that they resumed from is on disk.
        """
        self._part.unlink(missing_ok=True)
        (self.folder / "COMPLETE").unlink(missing_ok=True)
        for place, ranks in self._kept.items():
            _remove_others(self.folder / place, ranks)
        self._kept = {}

    def keep(self, part: MemoryPart, content: Content) -> None:
        """Complete and publish the copy, whose large files are already in place.

        Raises:
            OSError: there is no room for the small files.
        """
        for name, data in content.items():
            if isinstance(data, bytes):
                path = self.folder / name
                make_folder(path.parent)
                path.unlink(missing_ok=True)
                path.touch(FILE_MODE)
                path.write_bytes(data)
        self.publish(part)

    def publish(self, part: MemoryPart) -> None:
        """Publish the copy, whose files are all in place."""
        make_folder(self._part.parent)
        write_model(self._part, part, FILE_MODE)


def _remove_others(folder: Path, ranks: Collection[int]) -> None:
    names = {f"rank-{rank:05d}" for rank in ranks}
    for path in (*folder.glob("parts/rank-*"), *folder.glob("trainer_state/rank-*")):
        if path.stem not in names:
            path.unlink(missing_ok=True)
    if 0 not in ranks:  # which has the weights
        for name in ("model", "critic"):
            shutil.rmtree(folder / name, ignore_errors=True)


def _part_file(folder: Path, rank: int) -> Path:
    return folder / "parts" / f"rank-{rank:05d}.json"


# ---------------------------------------------------------------------------------------------------------------------
# Resuming


@dataclass(frozen=True)
class MemoryCheckpoint:
    """A checkpoint held in the memory of the nodes together."""

    parts: Sequence[MemoryPart]
    """Parts of all ranks, in rank order."""

    @property
    def attempt(self) -> int:
        """Attempt that wrote it."""
        return self.parts[0].attempt

    @functools.cached_property
    def manifest(self) -> CheckpointManifest:
        """Manifest that its ``COMPLETE`` would hold."""
        files = {name: found for part in self.parts for name, found in part.manifest.files.items()}
        return self.parts[0].manifest.model_copy(update={"files": dict(sorted(files.items()))})

    def needed(self, ranks: Sequence[int], *, every_state: bool = False) -> list[str]:
        """Files that a node needs: the states of its ranks, or of all ranks, and the shared files."""
        own = {name for rank in ranks for name in self.parts[rank].manifest.files}
        all_files = self.manifest.files
        return [name for name in all_files if name in own or every_state or not name.startswith("trainer_state/rank-")]


def parts_here(folder: Path) -> list[MemoryPart]:
    """Parts in this node's memory, its own and those kept for another node."""
    paths = [path for place in PLACES for path in sorted((folder / place / "parts").glob("rank-*.json"))]
    return read_all(paths, MemoryPart)


def newest_in_memory(parts: Iterable[MemoryPart], num_ranks: int, hash_of_spec: str) -> MemoryCheckpoint | None:
    """Find the newest checkpoint of which every rank's part is in some node's memory.

    Args:
        parts: parts found on the nodes.
        num_ranks: number of ranks that resume.
        hash_of_spec: hash of the settings of this run.
    """
    by_save: dict[str, dict[int, MemoryPart]] = {}
    for part in parts:
        if part.manifest.num_ranks == num_ranks and hmac.compare_digest(part.manifest.spec_hash, hash_of_spec):
            by_save.setdefault(part.save, {})[part.rank] = part
    whole = [found for found in by_save.values() if found.keys() == set(range(num_ranks))]
    if not whole:
        return None
    newest = max(whole, key=lambda found: found[0].manifest.step)
    return MemoryCheckpoint([newest[rank] for rank in range(num_ranks)])
