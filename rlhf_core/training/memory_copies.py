"""Copy of the newest checkpoint in the main memory of the nodes, from which a restart in place goes on.

    <folder>/trainer_state/rank-00000.safetensors   files as in the checkpoint: those of the ranks of this node
    <folder>/model/ ...                             those of rank 0, on its node
    <folder>/parts/rank-00000.json                  checksums of what each rank has there, written last (`MemoryPart`)
    <folder>/COMPLETE                               written by a restart that goes on from it

The files are the memory of the snapshot itself, in a file system in memory: they cost nothing beyond it, and outlive
the ranks, until the agent of the node ends. A copy that a kill has left half overwritten
has no part, and does not count.
"""

import functools
import hmac
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import Field

from rlhf_core.checkpoint_dir import CheckpointDir, checksum
from rlhf_core.private_files import FILE_MODE, make_folder
from rlhf_core.schemas.base import Int32, Label, Schema, utc_now
from rlhf_core.schemas.checkpoint_files import CheckpointManifest, FileChecksum, FileName
from rlhf_core.training.background_save import Content
from rlhf_core.training.distributed import Ranks
from rlhf_core.whole_files import read_model, write_model

CHUNK_BYTES = 64 << 20
"""Bytes of a file that are sent to the other nodes at a time."""


class MemoryPart(Schema):
    """Files of one rank in memory."""

    save: Label
    """Identity of the save: its parts have the same."""
    step: Int32
    """Optimizer steps done."""
    loop: Label
    """Algorithm of the loop that wrote it."""
    loop_finished: bool
    """True if that loop was at its end."""
    rank: Int32
    """Rank that wrote it."""
    num_ranks: Int32
    """Ranks that wrote with it."""
    spec_hash: Label
    """Hash of the settings that training depends on."""
    files: dict[FileName, FileChecksum] = Field(default_factory=dict)
    """Its files, by their path."""


class MemoryCopy:
    """Copy of one rank, on its node."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self._part = _part_file(folder, rank)

    def invalidate(self) -> None:
        """Have it count no more: its files are about to change."""
        self._part.unlink(missing_ok=True)
        (self.folder / "COMPLETE").unlink(missing_ok=True)

    def keep(self, part: MemoryPart, content: Content) -> None:
        """Have it count: its large files are there already.

        Raises:
            OSError: there is no room for the small ones.
        """
        for name, data in content.items():
            if isinstance(data, bytes):
                path = self.folder / name
                make_folder(path.parent)
                path.unlink(missing_ok=True)
                path.touch(FILE_MODE)
                path.write_bytes(data)
        make_folder(self._part.parent)
        write_model(self._part, part, FILE_MODE)


def _part_file(folder: Path, rank: int) -> Path:
    return folder / "parts" / f"rank-{rank:05d}.json"


# ---------------------------------------------------------------------------------------------------------------------
# Going on from it


@dataclass(frozen=True)
class MemoryCheckpoint:
    """A checkpoint that the nodes have in memory, together."""

    parts: Sequence[MemoryPart]
    """Of all ranks, in their order."""
    owners: Mapping[str, Sequence[int]]
    """First ranks of the nodes that have a file, by its path."""

    @functools.cached_property
    def manifest(self) -> CheckpointManifest:
        """As its ``COMPLETE`` would be."""
        first = self.parts[0]
        files = {name: found for part in self.parts for name, found in part.files.items()}
        return CheckpointManifest(
            step=first.step,
            loop=first.loop,
            loop_finished=first.loop_finished,
            num_ranks=first.num_ranks,
            spec_hash=first.spec_hash,
            files=dict(sorted(files.items())),
            time=utc_now(),
        )

    def needed(self, ranks: Sequence[int]) -> list[str]:
        """Files that a node needs: the states of its ranks, and what belongs to all."""
        own = {name for rank in ranks for name in self.parts[rank].files}
        states = {name for part in self.parts for name in part.files if name.startswith("trainer_state/rank-")}
        return [name for name in self.manifest.files if name in own or name not in states]


def parts_here(folder: Path) -> list[MemoryPart]:
    """Parts in the memory of this node, its own and those of others."""
    found = (read_model(path, MemoryPart) for path in sorted((folder / "parts").glob("rank-*.json")))
    return [part for part in found if part is not None]


def newest_in_memory(
    parts_of: Mapping[int, Sequence[MemoryPart]], num_ranks: int, hash_of_spec: str
) -> MemoryCheckpoint | None:
    """The newest checkpoint that all ranks have a part of, somewhere.

    Args:
        parts_of: parts by the first rank of the node that has them.
        num_ranks: ranks that are to go on.
        hash_of_spec: hash of their settings.
    """
    by_save: dict[str, dict[int, MemoryPart]] = {}
    for found in parts_of.values():
        for part in found:
            if part.num_ranks == num_ranks and hmac.compare_digest(part.spec_hash, hash_of_spec):
                by_save.setdefault(part.save, {})[part.rank] = part
    whole = [parts for parts in by_save.values() if parts.keys() == set(range(num_ranks))]
    if not whole:
        return None
    newest = max(whole, key=lambda parts: parts[0].step)
    parts = [newest[rank] for rank in range(num_ranks)]
    owners = {
        name: [
            first
            for first, found in parts_of.items()
            if any(other.save == part.save and other.rank == part.rank for other in found)
        ]
        for part in parts
        for name in part.files
    }
    return MemoryCheckpoint(parts, owners)


class NodeMemory:
    """Memory of this node, as its ranks use it when they start again. All ranks call its methods together."""

    def __init__(self, folder: Path, node: str, ranks: Ranks, beat: Callable[[], None]) -> None:
        self._folder = folder
        self._ranks = ranks
        self._beat = beat
        nodes = ranks.gather(node)
        self._here = [rank for rank, found in enumerate(nodes) if found == node]
        self._firsts = sorted({nodes.index(found) for found in nodes})

    @property
    def _is_first_here(self) -> bool:
        return self._ranks.rank == self._here[0]

    def find(self, hash_of_spec: str) -> MemoryCheckpoint | None:
        """The newest checkpoint in the memory of all nodes; the same on every rank. Collective."""
        own = parts_here(self._folder) if self._is_first_here else []
        told = self._ranks.gather([part.model_dump(mode="json") for part in own])
        parts_of = {first: [MemoryPart.model_validate(part) for part in told[first]] for first in self._firsts}
        return newest_in_memory(parts_of, self._ranks.num_ranks, hash_of_spec)

    def bring(self, found: MemoryCheckpoint) -> tuple[CheckpointDir | None, str]:
        """Have all files that the ranks of each node need in its memory, checked. Collective.

        Returns:
            The checkpoint; None, and why, where a file is damaged on any node.
        """
        self._exchange(found)
        damage = self._damage(found) if self._is_first_here else ""
        problems = [problem for problem in self._ranks.gather(damage) if problem]
        if problems:
            return None, "; ".join(problems)
        if self._is_first_here:
            write_model(self._folder / "COMPLETE", found.manifest, FILE_MODE)
        self._ranks.barrier()
        return CheckpointDir(self._folder, found.manifest.step), ""

    def _damage(self, found: MemoryCheckpoint) -> str:
        expected = found.manifest.files
        for name in found.needed(self._here):
            self._beat()
            try:
                is_right = checksum(self._folder / name) == expected[name]
            except OSError as error:
                return f"{name}: {error.strerror}"
            if not is_right:
                return f"{name} does not match its checksum"
        return ""

    def _exchange(self, found: MemoryCheckpoint) -> None:
        """Send the files that a node needs and does not have, by the group of all ranks."""
        first = self._here[0]
        own = [name for name in found.needed(self._here) if first not in found.owners[name]]
        wanted = {name for missing in self._ranks.gather(own) for name in missing}
        for name in sorted(wanted):
            self._send(name, found.manifest.files[name].bytes, found.owners[name][0], receives=name in own)

    def _send(self, name: str, num_bytes: int, owner: int, *, receives: bool) -> None:
        path = self._folder / name
        source = path.open("rb") if self._ranks.rank == owner else None
        target = None
        if receives and self._is_first_here:
            make_folder(path.parent)
            path.unlink(missing_ok=True)
            path.touch(FILE_MODE)
            target = path.open("r+b")
        for begin in range(0, num_bytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, num_bytes - begin)
            data = torch.zeros(size, dtype=torch.uint8)
            if source is not None:
                read = source.read(size)  # a file that is too short shows by its checksum
                data[: len(read)] = torch.frombuffer(bytearray(read), dtype=torch.uint8) if read else data[:0]
            data = data.to(self._ranks.device)
            with self._ranks.reporter.collective():
                dist.broadcast(data, src=owner)
            if target is not None:
                target.write(data.cpu().numpy().data)
            self._beat()
        for file in (source, target):
            if file is not None:
                file.close()
