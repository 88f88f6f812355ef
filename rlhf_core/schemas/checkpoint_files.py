"""Files of a checkpoint: checksums, and the manifest, which is written last."""

from pathlib import PurePosixPath
from typing import Annotated

from pydantic import AfterValidator, AliasChoices, Field

from rlhf_core.schemas.base import LABEL_CHARACTERS, Finite, Int32, Int64, Label, Moment, Schema, storable_text


def _inside_its_folder(name: str) -> str:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or storable_text(name, LABEL_CHARACTERS * 4) != name:
        raise ValueError(f"found the file name {name[:200]!r}, expected a path inside the folder")
    return name


FileName = Annotated[str, AfterValidator(_inside_its_folder)]
"""Path of a file in the listed folder. A path that leads out of it makes the whole list invalid."""


class FileChecksum(Schema):
    """Size and hash of one file."""

    bytes: Int64
    """Size."""
    sha256: Label
    """Hash, hexadecimal."""


class BaseModelRecord(Schema):
    """Content of ``base_model.json``: the base model of the adapter in the same folder."""

    files: dict[FileName, Label]
    """Fingerprints of its configuration and weights; of large files, only samples are hashed."""


class BestCheckpoint(Schema):
    """The checkpoint with the best evaluation during training so far."""

    step: Int32
    """Optimizer steps done."""
    metric: Label
    """Metric that it is the best by."""
    value: Finite
    """Value of that metric; higher is better, except for a loss."""


class CheckpointManifest(Schema):
    """Content of ``COMPLETE``, the file written last into a checkpoint."""

    step: Int32
    """Optimizer steps done."""
    loop: Label = Field(validation_alias=AliasChoices("loop", "stage"))
    """Algorithm of the loop that wrote it. In files of rlhf-flows 0.1, this is ``stage``, and the next field
    ``stage_finished``."""
    loop_finished: bool = Field(validation_alias=AliasChoices("loop_finished", "stage_finished"))
    """True at the end of that loop."""
    num_ranks: Int32
    """Number of ranks that wrote it; the optimizer state is split among them."""
    spec_hash: Label
    """Hash of the part of the spec that affects training."""
    files: dict[FileName, FileChecksum]
    """Files of the checkpoint, by their path in it."""
    time: Moment
    """Time of its completion (UTC)."""
    best: BestCheckpoint | None = None
    """With `checkpoint.keep_best`, the best checkpoint up to this one, or this one itself; null before the first."""
