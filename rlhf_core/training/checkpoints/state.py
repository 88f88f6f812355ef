"""State of a trainer rank in a checkpoint: where training stands, its optimizer share, its random number generators."""

import contextlib
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import AliasChoices, Field

from rlhf_core.run_dir.checkpoint import CheckpointDir
from rlhf_core.schemas.base import Label, Schema
from rlhf_core.schemas.scoring_models import ScoringModelState
from rlhf_core.training.checkpoints.tensor_files import read_content
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.health.state import HealthState


class Progress(Schema):
    """State of training that is the same on every rank."""

    step: int
    """Optimizer steps done, over warm start and main algorithm."""
    loop: Label = Field(validation_alias=AliasChoices("loop", "stage"))
    """Algorithm of the loop that is running. Files of rlhf-flows 0.1 have it under ``stage``, and likewise the next."""
    loop_finished: bool = Field(validation_alias=AliasChoices("loop_finished", "stage_finished"))
    """True if that loop is at its end."""
    position: int
    """Rows taken from the endless sequence of training rows, over the whole run."""
    health: HealthState = HealthState()
    """State of the judge of training."""
    reward_models: dict[str, ScoringModelState] = Field(default_factory=dict)
    """Reward models that score completions, by name: which they are, and what they have scored."""


@dataclass(frozen=True)
class TrainerState:
    """State of a rank, besides the weights, with which it goes on as if nothing had happened."""

    progress: Progress
    engine: Iterable[dict[str, Any]]
    """``Engine.state`` of the ranks that wrote it, that of the same rank first; read from the files one by one."""
    random: dict[str, Any] | None
    """``random_state`` of this rank; None for one that the checkpoint does not know."""
    critic: Iterable[dict[str, Any]] | None = None
    """``Engine.state`` of the value model's engine, likewise, of an algorithm with a critic."""
    in_flight: Iterable[dict[str, Any]] = ()
    """Completions that each of those ranks had made for the next step (``trainers/in_flight.py``), likewise."""


def load_trainer_state(checkpoint: CheckpointDir, ranks: Ranks) -> TrainerState:
    """Read this rank's state; call :func:`verify_checkpoint` before. It runs no code from the files.

    Where another number of ranks wrote it, the optimizer is put together from the shares of all of them, and what was
    observed of single ranks is forgotten.
    """
    manifest = checkpoint.manifest()
    num_saved = manifest.num_ranks if manifest is not None else ranks.num_ranks
    own = min(ranks.rank, num_saved - 1)
    state = _read_state(checkpoint, own)
    progress = Progress.model_validate(state["progress"])
    if num_saved != ranks.num_ranks:
        progress = progress.model_copy(update={"health": progress.health.of_other_ranks()})
    others = [rank for rank in range(num_saved) if rank != own]
    random = state["random"] if ranks.rank < num_saved else None
    critic = _shares(checkpoint, state, others, "critic") if "critic" in state else None
    in_flight = _shares(checkpoint, state, others, "in_flight") if "in_flight" in state else ()
    return TrainerState(progress, _shares(checkpoint, state, others, "engine"), random, critic, in_flight)


def _shares(
    checkpoint: CheckpointDir, own: dict[str, Any], others: Sequence[int], part: str
) -> Iterator[dict[str, Any]]:
    """Shares of the ranks in one part of the state: this rank's first, then each other when its turn comes."""
    yield own[part]
    for rank in others:
        yield _read_state(checkpoint, rank)[part]


def state_file(checkpoint: CheckpointDir, rank: int) -> Path:
    """File with the state of one rank."""
    return checkpoint.trainer_state / f"rank-{rank:05d}.safetensors"


def _read_state(checkpoint: CheckpointDir, rank: int) -> dict[str, Any]:
    """State of one rank; its tensors stay in the file until they are read."""
    path = state_file(checkpoint, rank)
    earlier = path.with_suffix(".pt")  # of rlhf-flows 0.1, and of what came before this form
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
    """Leave the global random number generators after the block as they were before it, whatever it draws from them."""
    state = random_state(device)
    yield
    restore_random_state(state, device)


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put the global random number generators where :func:`random_state` found them."""
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    saved = state["numpy"]
    np.random.set_state(
        ("MT19937", saved["key"].cpu().numpy().astype(np.uint32), saved["position"], saved["has_gauss"], saved["gauss"])
    )
