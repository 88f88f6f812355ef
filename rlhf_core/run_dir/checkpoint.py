"""Folder of one checkpoint: paths, manifest and checksums."""

import hashlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.errors import CheckpointCorrupt
from rlhf_core.files.reading import bring_to_disk, open_regular, read_document
from rlhf_core.files.whole import read_model, remove_tree, write_model
from rlhf_core.schemas.checkpoint_files import CheckpointManifest, FileChecksum

ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""File of an adapter's weights in the folder of a model, as peft names it."""
BASE_RECORD = "base_model.json"
"""File next to an adapter of the native trainer, with the checksums of the base model that it was trained on."""
ADAPTER_OF_MERGED = "adapter"
"""Folder of the adapter, within the folder of the model that it was merged into."""
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class CheckpointDir:
    """``checkpoints/step-<n>/``: one saved state of training."""

    root: Path
    step: int

    @property
    def complete(self) -> Path:
        """Checksums of all other files; written last. Without it the checkpoint does not count."""
        return self.root / "COMPLETE"

    @property
    def model(self) -> Path:
        """The weights and tokenizer as a Hugging Face model folder."""
        return self.root / "model"

    @property
    def critic(self) -> Path:
        """The weights of the value model, for algorithms that train one beside the policy."""
        return self.root / "critic"

    @property
    def trainer_state(self) -> Path:
        """State of the optimizer, the random number generators and the data position, per rank."""
        return self.root / "trainer_state"

    @property
    def partial(self) -> "CheckpointDir":
        """The same checkpoint while it is written, under a hidden name."""
        return CheckpointDir(self.root.with_name(f".{self.root.name}.partial"), self.step)

    def manifest(self) -> CheckpointManifest | None:
        """Read ``COMPLETE``; None if the checkpoint does not count."""
        try:
            return read_model(self.complete, CheckpointManifest)
        except OSError:
            return None  # not resumable; the previous checkpoint may be

    def put_in_place(self, manifest: CheckpointManifest) -> None:
        """Make the files of :attr:`partial` count, which are on disk; ``COMPLETE`` is written last.

        Raises:
            OSError: the file system refuses it.
        """
        write_model(self.partial.complete, manifest)
        bring_to_disk(self.partial.root)
        remove_tree(self.root)  # an older one of the same step, if training was rolled back
        self.partial.root.rename(self.root)
        bring_to_disk(self.root.parent)

    def checksums(self, paths: Iterable[Path], beat: Callable[[], None]) -> dict[str, FileChecksum]:
        """Bring files of this checkpoint to disk, and return their checksums by name.

        Args:
            beat: called after every piece.

        Raises:
            OSError: a file cannot be synced or read.
        """
        found = {}
        for path in paths:
            bring_to_disk(path)
            found[path.relative_to(self.root).as_posix()] = checksum(path, beat)
        return found

    def damage(self, beat: Callable[[], None] = lambda: None, names: Collection[str] | None = None) -> list[str]:
        """Problems of the files, by size and hash; empty for an intact checkpoint. Reads every byte of these files.

        Args:
            beat: called after every piece.
            names: the files to verify, by their names in ``COMPLETE``; None for all.
        """
        manifest = self.manifest()
        if manifest is None:
            return [f"{self.complete.name} is {self._fault_of_manifest()}"]
        problems = [] if manifest.step == self.step else [f"{self.complete.name} is of step {manifest.step}"]
        for name, expected in manifest.files.items():
            if names is not None and name not in names:
                continue
            fault = fault_of(self.root, name, expected, beat)
            # Read once more before giving up a checkpoint: the failure of a disk or a network may be temporary.
            if fault and (fault := fault_of(self.root, name, expected, beat)):
                problems.append(fault)
        return problems

    def verify(self, beat: Callable[[], None] = lambda: None, names: Collection[str] | None = None) -> None:
        """Raise :class:`CheckpointCorrupt` unless the files match ``COMPLETE``.

        Args:
            beat: called after every piece.
            names: the files to verify, by their names in ``COMPLETE``; None for all.
        """
        problems = self.damage(beat, names)
        if problems:
            raise CheckpointCorrupt(f"checkpoint {self.root} is damaged: {'; '.join(problems)}", self.root.name)

    def _fault_of_manifest(self) -> str:
        try:
            size = len(read_document(self.complete))
        except FileNotFoundError:
            return "missing"
        except OSError as error:
            return f"unreadable: {error.strerror}"
        return f"not a valid manifest ({size} bytes)"


def checksum(path: Path, beat: Callable[[], None] = lambda: None) -> FileChecksum:
    """Size and SHA-256 of a regular file.

    Args:
        beat: called after every piece.
    """
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            beat()
        return FileChecksum(bytes=file.tell(), sha256=digest.hexdigest())


def fault_of(folder: Path, name: str, expected: FileChecksum, beat: Callable[[], None] = lambda: None) -> str:
    """Problem of one file; empty if it matches its checksum.

    Args:
        name: its path in the folder.
        beat: called after every piece.
    """
    try:
        found = checksum(folder / name, beat)
    except OSError as error:
        return f"{name}: {error.strerror}"
    if found == expected:
        return ""
    return (
        f"{name}: found {found.bytes} bytes with sha256 {found.sha256[:12]}, "
        f"expected {expected.bytes} bytes with {expected.sha256[:12]}"
    )
