"""State of a trainer rank in a checkpoint: progress of training, optimizer share, random number generators."""

import contextlib
import copy
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import AliasChoices, Field

from rlhf_core.diagnosis.health.state import HealthState
from rlhf_core.run_dir.checkpoint import CheckpointDir
from rlhf_core.schemas.base import Label, Schema
from rlhf_core.schemas.checkpoint_files import BestCheckpoint
from rlhf_core.schemas.scoring_models import ScoringModelState
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.models.tensor_files import read_content


class Progress(Schema):
    """State of training that is the same on every rank."""

    step: int
    """Number of optimizer steps done, over warm start and main algorithm."""
    loop: Label = Field(validation_alias=AliasChoices("loop", "stage"))
    """Algorithm of the loop that is running. Files of rlhf-flows 0.1 say ``stage`` instead of ``loop``, here and in the
    next field."""
    loop_finished: bool = Field(validation_alias=AliasChoices("loop_finished", "stage_finished"))
    """True if that loop has finished."""
    position: int
    """Number of rows taken from the endless sequence of training rows, over the whole run."""
    rows: Label = ""
    """Digest of the training rows; empty in checkpoints of earlier versions."""
    reference: Label = ""
    """Fingerprints of the weights outside of the run's checkpoints that loops read as references; empty without any."""
    health: HealthState = HealthState()
    """State of the health judge."""
    reward_models: dict[str, ScoringModelState] = Field(default_factory=dict)
    """Reward models that score completions, by name: their identity and their scores so far."""
    best: BestCheckpoint | None = None
    """With ``checkpoint.keep_best``, the best checkpoint so far; None before the first evaluation."""


@dataclass(frozen=True)
class TrainerState:
    """State of a rank, other than the weights, needed to resume as if training had not been interrupted."""

    progress: Progress
    engine: Iterable[dict[str, Any]]
    """``Engine.state`` of the ranks that wrote the checkpoint, the same rank's first; read lazily from the files."""
    random: dict[str, Any] | None
    """``random_state`` of this rank; None if the checkpoint has no such rank."""
    critic: Iterable[dict[str, Any]] | None = None
    """``Engine.state`` of the value model's engine in the same order, for an algorithm with a critic."""
    in_flight: Iterable[dict[str, Any]] = ()
    """Completions for the next steps (``trainers/in_flight.py``) of the ranks that had sampled them for the prompts of
    this one."""


def load_trainer_state(checkpoint: CheckpointDir, ranks: Ranks) -> TrainerState:
    """Read this rank's state; call :func:`verify_checkpoint` first. Executes no code from the files.

    If a different number of ranks wrote it, the optimizer is assembled from the shares of all of them, and observations
    of individual ranks are dropped.
    """
    manifest = checkpoint.manifest()
    num_saved = manifest.num_ranks if manifest is not None else ranks.num_ranks
    own = min(ranks.rank, num_saved - 1)
    state = _read_state(checkpoint, own)
    progress = Progress.model_validate(state["progress"])
    if num_saved != ranks.num_ranks:
        progress = progress.model_copy(update={"health": progress.health.of_other_ranks()})
    order = [own, *(rank for rank in range(num_saved) if rank != own)]
    # Copied: any tensor of a file keeps all of it mapped, which takes its disk or memory until the process ends.
    random = copy.deepcopy(state["random"]) if ranks.rank < num_saved else None
    critic = _shares(checkpoint, order, "critic") if "critic" in state else None
    # With as many ranks, each has its own prompts again, and in memory there may be no other rank's file.
    makers = [own] if num_saved == ranks.num_ranks else order
    in_flight = chain.from_iterable(_shares(checkpoint, makers, "in_flight")) if "in_flight" in state else ()
    return TrainerState(progress, _shares(checkpoint, order, "engine"), random, critic, in_flight)


def _shares(checkpoint: CheckpointDir, ranks: Sequence[int], part: str) -> Iterator[Any]:
    """Yield the shares of ranks of one part of the state; each is read only when needed, and not kept here."""
    for rank in ranks:
        yield _read_state(checkpoint, rank)[part]


def state_file(checkpoint: CheckpointDir, rank: int) -> Path:
    """File with the state of one rank."""
    return checkpoint.trainer_state / f"rank-{rank:05d}.safetensors"


def _read_state(checkpoint: CheckpointDir, rank: int) -> dict[str, Any]:
    """Read the state of one rank; tensors are loaded from the file only on use."""
    path = state_file(checkpoint, rank)
    earlier = path.with_suffix(".pt")  # from rlhf-flows 0.1 and other versions before this format
    if earlier.exists() and not path.exists():
        return dict(torch.load(earlier, map_location="cpu", weights_only=True, mmap=True))
    return dict(read_content(path))


def random_state(device: torch.device) -> dict[str, Any]:
    """State of the global random number generators, as tensors, numbers and containers."""
    numpy_state: dict[str, Any] = np.random.get_state(legacy=False)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": {
            "key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            "position": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
    }


@contextlib.contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """Restore the global random number generators after the block, whatever it draws from them."""
    state = random_state(device)
    yield
    restore_random_state(state, device)


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore the global random number generators to a :func:`random_state`."""
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    saved = state["numpy"]
    np.random.set_state(
        ("MT19937", saved["key"].cpu().numpy().astype(np.uint32), saved["position"], saved["has_gauss"], saved["gauss"])
    )
