"""Soundness of a checkpoint before it is used: every byte of it, and the settings that it was made with."""

import json
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from rlhf_core.errors import CheckpointCorrupt, ResumeMismatch
from rlhf_core.run_dir import CheckpointDir
from rlhf_core.schemas.command_trainer import CommandTrainer
from rlhf_core.schemas.migration import current_settings
from rlhf_core.schemas.reports import CheckpointManifest
from rlhf_core.schemas.run import RunSpec
from rlhf_core.training.distributed import Ranks


def training_part(spec: RunSpec) -> dict[str, Any]:
    """The part of the spec that decides what is learned at each step.

    Left out is what may change between attempts: how long to train, how a batch is cut up, how to evaluate, where
    and how often to save, on what machines, under what supervision. The number of ranks is compared by itself.
    """
    part = spec.model_dump(mode="json", include={"seed", "model", "data", "loops", "rollout", "reward", "trainer"})
    return _what_decides(part)


def _what_decides(part: dict[str, Any]) -> dict[str, Any]:
    """The settings without those that may change between attempts."""
    part["loops"]["main"].pop("num_steps", None)
    for loop in filter(None, part["loops"].values()):
        loop["algorithm"].pop("measure_kl", None)
    for name in ("micro_batch_size", "gradient_checkpointing", "log_samples_every"):
        part["trainer"].pop(name, None)
    part["rollout"].pop("batch_size", None)
    return part


def spec_hash(spec: RunSpec) -> str:
    """Hash of :func:`training_part`."""
    return hash_of_settings(training_part(spec))


def hash_of_settings(settings: dict[str, Any]) -> str:
    """Hash of settings, whatever their order."""
    return blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16).hexdigest()


def verify_checkpoint(checkpoint: CheckpointDir, spec: RunSpec, ranks: Ranks, any_ranks: bool = False) -> None:
    """Check a checkpoint before it is used: every byte of it, and that it fits this run.

    Rank 0 looks, for all: what it finds is raised by every rank, so that none goes on alone.

    Args:
        any_ranks: the number of ranks does not matter, because only the model is wanted.

    Raises:
        CheckpointCorrupt: it is damaged.
        ResumeMismatch: written by another number of ranks or under another spec.
    """
    agree(ranks, lambda: _require_sound(checkpoint, spec, None if any_ranks else ranks.num_ranks))


def agree(ranks: Ranks, find: Callable[[], CheckpointDir | None]) -> int | None:
    """Have rank 0 look for a checkpoint, or at one, and tell all ranks: its answer, or its error, is that of each.

    The others may see an older list of files, and two ranks must not go on from two checkpoints.

    Returns:
        The step of the checkpoint; None where there is none.

    Raises:
        CheckpointCorrupt, ResumeMismatch: as ``find`` did on rank 0.
    """
    answer: dict[str, str] = {}
    if ranks.is_first:
        try:
            found = find()
            answer = {"step": str(found.step) if found is not None else ""}
        except CheckpointCorrupt as error:
            answer = {"damage": str(error), "checkpoint": error.checkpoint}
        except ResumeMismatch as error:
            answer = {"mismatch": str(error)}
    answer = json.loads(ranks.from_first(json.dumps(answer)))
    if "damage" in answer:
        raise CheckpointCorrupt(answer["damage"], answer["checkpoint"])
    if "mismatch" in answer:
        raise ResumeMismatch(answer["mismatch"])
    return int(answer["step"]) if answer["step"] else None


def _require_sound(checkpoint: CheckpointDir, spec: RunSpec, num_ranks: int | None) -> CheckpointDir:
    checkpoint.verify()
    manifest = checkpoint.manifest()
    if manifest is None:
        raise CheckpointCorrupt(f"checkpoint {checkpoint.root} went away while it was read", checkpoint.root.name)
    if isinstance(spec.trainer, CommandTrainer):
        return checkpoint  # only its model is wanted; settings and ranks are for its own program to judge
    _require_own_settings(checkpoint, manifest)
    if manifest.spec_hash != spec_hash(spec) and _saved_settings(checkpoint) != training_part(spec):
        raise ResumeMismatch(
            f"checkpoint {checkpoint.root} was made with other settings: {_differences(checkpoint, spec)}. "
            f"Resume with the settings it was made with, or start a new run"
        )
    if num_ranks is not None and manifest.num_ranks != num_ranks:
        raise ResumeMismatch(
            f"checkpoint {checkpoint.root} was written by {manifest.num_ranks} ranks, this run has {num_ranks}; "
            f"the optimizer state is split among the ranks. Set resources.num_nodes and resources.ranks_per_node so "
            f"that there are {manifest.num_ranks} ranks again"
        )
    return checkpoint


def _require_own_settings(checkpoint: CheckpointDir, manifest: CheckpointManifest) -> None:
    """A manifest has no checksum of its own: what it says twice must be the same twice. A damaged one must not be
    taken for one of other settings, which nothing can go back from."""
    if manifest.spec_hash != hash_of_settings(json.loads(settings_file(checkpoint).read_bytes())):
        raise CheckpointCorrupt(
            f"checkpoint {checkpoint.root} is damaged: COMPLETE does not fit the settings beside it",
            checkpoint.root.name,
        )
    saved = [name for name in manifest.files if name.startswith("trainer_state/rank-")]
    if len(saved) != manifest.num_ranks:
        raise CheckpointCorrupt(
            f"checkpoint {checkpoint.root} is damaged: COMPLETE says {manifest.num_ranks} ranks and names the state of "
            f"{len(saved)}",
            checkpoint.root.name,
        )


def settings_file(checkpoint: CheckpointDir) -> Path:
    """File with the settings that a checkpoint was made with."""
    return checkpoint.trainer_state / "settings.json"


def _saved_settings(checkpoint: CheckpointDir) -> dict[str, Any]:
    """The settings that a checkpoint was made with; those of rlhf-flows 0.1 in the form of this version."""
    return _what_decides(current_settings(json.loads(settings_file(checkpoint).read_bytes())))


def _differences(checkpoint: CheckpointDir, spec: RunSpec) -> str:
    before, now = dict(_flat(_saved_settings(checkpoint))), dict(_flat(training_part(spec)))
    changed = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
    shown = [f"{name} was {before.get(name)!r} and is {now.get(name)!r}" for name in changed[:5]]
    return "; ".join(shown) + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")


def _flat(content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
