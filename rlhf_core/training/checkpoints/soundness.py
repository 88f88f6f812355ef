"""Soundness of a checkpoint before it is used: every byte of it, and the settings that it was made with."""

import json
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlhf_core.errors import CheckpointCorrupt, ResumeMismatch
from rlhf_core.run_dir.checkpoint import CheckpointDir
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.checkpoint_files import CheckpointManifest
from rlhf_core.schemas.command_trainer import CommandTrainer
from rlhf_core.schemas.migration import current_settings
from rlhf_core.schemas.run import RunSpec
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.models.adapters import is_adapter, require_base
from rlhf_core.training.types import WorkerContext


def training_part(spec: RunSpec) -> dict[str, Any]:
    """The part of the spec that decides what is learned at each step.

    Left out is what may change between attempts: how long to train, how a batch is cut up, how to evaluate, where
    and how often to save, on what machines and how many ranks, under what supervision.
    """
    part = spec.model_dump(mode="json", include={"seed", "model", "data", "loops", "rollout", "reward", "trainer"})
    return _what_decides(part)


def _what_decides(part: dict[str, Any]) -> dict[str, Any]:
    """The settings without those that may change between attempts."""
    part["loops"]["main"].pop("num_steps", None)
    for loop in filter(None, part["loops"].values()):
        loop["algorithm"].pop("measure_kl", None)
    for name in (
        "zero_stage",
        "offload",
        "micro_batch_size",
        "micro_batch_tokens",
        "gradient_checkpointing",
        "log_samples_every",
    ):
        part["trainer"].pop(name, None)
    part["rollout"].pop("batch_size", None)
    for name in ("timeout_s", "on_failure", "max_failed_share"):
        part["reward"].pop(name, None)
    if not part["reward"].get("models"):
        part["reward"].pop("models", None)  # as there were none before there could be any
    for model in part["reward"].get("models", {}).values():
        for name in ("batch_size", "device"):
            model.pop(name, None)
    return part


def spec_hash(spec: RunSpec) -> str:
    """Hash of :func:`training_part`."""
    return hash_of_settings(training_part(spec))


def hash_of_settings(settings: dict[str, Any]) -> str:
    """Hash of settings, whatever their order."""
    return blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16).hexdigest()


def verify_checkpoint(checkpoint: CheckpointDir, spec: RunSpec, ranks: Ranks, base: Path | None = None) -> None:
    """Check a checkpoint before it is used: every byte of it, and that it fits this run.

    Rank 0 looks, for all: what it finds is raised by every rank, so that none goes on alone.

    Args:
        base: folder of the base model, where the checkpoint may hold an adapter.

    Raises:
        CheckpointCorrupt: it is damaged.
        ResumeMismatch: written under another spec, or on another base model.
    """
    agree(ranks, lambda: _require_sound(checkpoint, spec, base))


def initial_folder(spec: RunSpec, run_dir: RunDir) -> Path:
    """Folder of the model that a run of the native trainer begins with: the base model of its adapters."""
    return Path(spec.model.path) if spec.model.path else run_dir.initial_model


def reference_folder(context: WorkerContext, ranks: Ranks, steps_before: int, initial: Path) -> Path:
    """Folder of the model that a loop measures its policy against: the one that it began with.

    Args:
        steps_before: optimizer steps before the loop.
        initial: folder of the model that the run began with.

    Raises:
        CheckpointCorrupt: the checkpoint of that step is damaged.
    """
    if not steps_before:
        return initial
    checkpoint = context.run_dir.checkpoint(steps_before)
    try:
        verify_checkpoint(checkpoint, context.spec, ranks, initial)
    except CheckpointCorrupt as error:
        raise CheckpointCorrupt(
            f"{error}. It is the reference that the divergence of this run is measured against, so none before it "
            f"can take its place: bring its files back from a copy and resume, or start a new run"
        ) from None
    return checkpoint.model


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


def _require_sound(checkpoint: CheckpointDir, spec: RunSpec, base: Path | None) -> CheckpointDir:
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
    if base is not None and is_adapter(checkpoint.model):
        require_base(checkpoint.model, base)
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
    """The settings that a checkpoint was made with, in the form of this version: renamed ones translated, and those
    that there were none of then at their defaults."""
    saved = current_settings(json.loads(settings_file(checkpoint).read_bytes()))
    main = {"num_steps": 1, **saved["loops"]["main"]}
    try:
        return training_part(
            RunSpec.model_validate({"name": "saved", **saved, "loops": {**saved["loops"], "main": main}})
        )
    except ValidationError:
        return _what_decides(saved)  # of a version that knows more than this one: shown as they are


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
