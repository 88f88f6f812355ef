"""Files of a checkpoint: their checksums, and the manifest that is written last."""

from pathlib import PurePosixPath
from typing import Annotated

from pydantic import AfterValidator, AliasChoices, Field

from rlhf_core.schemas.base import LABEL_CHARACTERS, Int32, Int64, Label, Moment, Schema, storable_text


def _inside_its_folder(name: str) -> str:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or storable_text(name, LABEL_CHARACTERS * 4) != name:
        raise ValueError(f"found the file name {name[:200]!r}, expected a path inside of the folder")
    return name


FileName = Annotated[str, AfterValidator(_inside_its_folder)]
"""Path of a file in the folder that it is listed for. One that leads out of it is refused, and the list with it."""


class FileChecksum(Schema):
    """Size and hash of one file."""

    bytes: Int64
    """Size."""
    sha256: Label
    """Hash, hexadecimal."""


class BaseModelRecord(Schema):
    """Content of ``base_model.json``: the base model that the adapter beside it was trained on."""

    files: dict[FileName, FileChecksum]
    """Its configuration and weights."""


class CheckpointManifest(Schema):
    """Content of ``COMPLETE``, the file written last into a checkpoint."""

    step: Int32
    """Optimizer steps done."""
    loop: Label = Field(validation_alias=AliasChoices("loop", "stage"))
    """Algorithm of the loop that wrote it. Files of rlhf-flows 0.1 have it under ``stage``, and likewise the next."""
    loop_finished: bool = Field(validation_alias=AliasChoices("loop_finished", "stage_finished"))
    """True if that loop was at its end."""
    num_ranks: Int32
    """Ranks that wrote it; optimizer state is split among them."""
    spec_hash: Label
    """Hash of the part of the spec that training depends on."""
    files: dict[FileName, FileChecksum]
    """Every file of the checkpoint, by its path in it."""
    time: Moment
    """Time at which it was complete (UTC)."""
