"""The nodes' in-memory checkpoints, as their ranks use them together at a restart."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from rlhf_core.files.private import FILE_MODE
from rlhf_core.files.whole import write_model
from rlhf_core.run_dir.checkpoint import checksum
from rlhf_core.schemas.checkpoint_files import FileChecksum
from rlhf_core.training.checkpoints.memory.copies import (
    PEER,
    PLACES,
    MemoryCheckpoint,
    MemoryPart,
    newest_in_memory,
    parts_here,
)
from rlhf_core.training.checkpoints.memory.peer_transfer import PeerRefused, receive_file
from rlhf_core.training.distributed import Ranks

CHUNK_BYTES = 64 << 20
"""Chunk size for sending a file to the other nodes, in bytes."""


class CopyDamaged(Exception):
    """A file of a checkpoint in memory is damaged or missing on all nodes that had it; raised by every rank."""


class NodeMemory:
    """In-memory checkpoints of this node. All ranks call the methods together."""

    def __init__(
        self, folder: Path, node: str, ranks: Ranks, beat: Callable[[], None], *, every_state: bool = False
    ) -> None:
        """Find the ranks of each node. Collective.

        Args:
            every_state: whether each rank reads the states of all ranks.
        """
        self._folder = folder
        self._ranks = ranks
        self._beat = beat
        self._every_state = every_state
        self._here = [rank for rank, found in enumerate(ranks.gather(node)) if found == node]

    @property
    def _is_first_here(self) -> bool:
        return self._ranks.rank == self._here[0]

    def find(self, hash_of_spec: str) -> MemoryCheckpoint | None:
        """Find the newest checkpoint in the memory of all nodes; the same on every rank. Collective."""
        own = parts_here(self._folder) if self._is_first_here else []
        parts_of_ranks = self._ranks.gather([part.model_dump(mode="json") for part in own])
        parts = [MemoryPart.model_validate(part) for of_node in parts_of_ranks for part in of_node]
        return newest_in_memory(parts, self._ranks.num_ranks, hash_of_spec)

    def bring(self, found: MemoryCheckpoint) -> int:
        """Copy all missing files that each node's ranks need into its memory, and verify them. Collective.

        Returns:
            Number of files that were lost or damaged on their own node and restored from its peer's copy.

        Raises:
            CopyDamaged: a file is damaged or missing.
        """
        expected = found.manifest.files
        lacking = self._missing_files(found) if self._is_first_here else {}
        lacking_of = self._ranks.gather(lacking)
        wanted = {name: reason for of_node in lacking_of for name, reason in of_node.items()}
        offers_of = self._ranks.gather(self._available_files(sorted(wanted), expected) if self._is_first_here else {})
        owners = {name: owner for name in wanted if (owner := _owner(name, offers_of)) is not None}
        without = [f"{name} {reason}" for name, reason in sorted(wanted.items()) if name not in owners]
        if without:
            raise CopyDamaged("; ".join(without))
        problems = [
            self._send(name, expected[name], owners[name], offers_of[owners[name]][name], receives=name in lacking)
            for name in sorted(wanted)
        ]
        damage = "; ".join(problem for problem in self._ranks.gather("; ".join(filter(None, problems))) if problem)
        if damage:
            raise CopyDamaged(damage)
        if self._is_first_here:
            write_model(self._folder / "COMPLETE", found.manifest, FILE_MODE)
        self._ranks.barrier()
        return sum(offers_of[owner][name] == PEER for name, owner in owners.items())

    def _missing_files(self, found: MemoryCheckpoint) -> dict[str, str]:
        """Files that this node's ranks need and that are missing or damaged here, with the reason."""
        needed = found.needed(self._here, every_state=self._every_state)
        problems = {name: self._damage("", name, found.manifest.files) for name in needed}
        return {name: problem for name, problem in problems.items() if problem}

    def _available_files(self, wanted: Sequence[str], expected: Mapping[str, FileChecksum]) -> dict[str, str]:
        """Folders of this node that hold the wanted files."""
        places = {
            name: next((place for place in PLACES if not self._damage(place, name, expected)), None) for name in wanted
        }
        return {name: place for name, place in places.items() if place is not None}

    def _damage(self, place: str, name: str, expected: Mapping[str, FileChecksum]) -> str:
        try:
            is_right = checksum(self._folder / place / name, self._beat) == expected[name]
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        return "" if is_right else "does not match its checksum"

    def _send(self, name: str, expected: FileChecksum, owner: int, place: str, *, receives: bool) -> str:
        """Broadcast a file over the group of all ranks; return the problem with it here."""
        source = self._folder / place / name if self._ranks.rank == owner else None
        pieces = self._broadcast(source, expected.bytes, owner)
        problem = ""
        if receives and self._is_first_here:
            try:
                receive_file(pieces, self._folder / name, expected)
            except (OSError, PeerRefused) as error:
                problem = str(error)
        for _ in pieces:
            pass  # all ranks take part to the end, whatever they do with the file
        return problem

    def _broadcast(self, source: Path | None, num_bytes: int, owner: int) -> Iterator[memoryview]:
        """Yield the chunks of the owner's file on every rank; the caller must consume all of them."""
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(source.open("rb")) if source is not None else None
            for begin in range(0, num_bytes, CHUNK_BYTES):
                size = min(CHUNK_BYTES, num_bytes - begin)
                data = torch.zeros(size, dtype=torch.uint8)
                if file is not None:
                    read = file.read(size)  # the checksum reveals a file that is too short
                    data[: len(read)] = torch.frombuffer(bytearray(read), dtype=torch.uint8) if read else data[:0]
                data = data.to(self._ranks.device)
                with self._ranks.collective():
                    dist.broadcast(data, src=owner)
                self._beat()
                yield data.cpu().numpy().data


def _owner(name: str, offers_of: Sequence[Mapping[str, str]]) -> int | None:
    """First rank of a node that offers a file; the file's own node comes before a peer."""
    own = [rank for rank, offers in enumerate(offers_of) if offers.get(name) == ""]
    return next(iter(own + [rank for rank, offers in enumerate(offers_of) if name in offers]), None)
