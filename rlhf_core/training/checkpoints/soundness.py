"""Verification of a checkpoint before use: every byte that is read, and the settings that it was made with."""

import errno
import json
from collections.abc import Callable, Collection, Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlhf_core.errors import CheckpointCorrupt, ResumeMismatch
from rlhf_core.run_dir.checkpoint import CheckpointDir, fault_of
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.checkpoint_files import CheckpointManifest, FileChecksum
from rlhf_core.schemas.command_trainer import CommandTrainer
from rlhf_core.schemas.migration import current_settings
from rlhf_core.schemas.reports import Phase
from rlhf_core.schemas.run import RunSpec
from rlhf_core.text.formatting import listed
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.models.adapters import is_adapter, require_base
from rlhf_core.training.types import WorkerContext


def training_part(spec: RunSpec) -> dict[str, Any]:
    """The part of the spec that determines the result of each training step.

    It leaves out settings that may change between attempts: the length of training, micro-batching, evaluation,
    location and frequency of checkpoints, machines and number of ranks, and supervision.
    """
    part = spec.model_dump(mode="json", include={"seed", "model", "data", "loops", "rollout", "reward", "trainer"})
    return _without_changeable_settings(part)


def _without_changeable_settings(part: dict[str, Any]) -> dict[str, Any]:
    """The settings without those that may change between attempts."""
    part["loops"]["main"].pop("num_steps", None)
    for loop in filter(None, part["loops"].values()):
        loop["algorithm"].pop("measure_kl", None)
    for name in (
        "zero_stage",
        "offload",
        "sequence_parallel",
        "micro_batch_size",
        "micro_batch_tokens",
        "gradient_checkpointing",
        "deterministic",
        "log_samples_every",
    ):
        part["trainer"].pop(name, None)
    part["rollout"].pop("batch_size", None)
    for name in ("timeout_s", "on_failure", "max_failed_share"):
        part["reward"].pop(name, None)
    for model in part["reward"].get("models", {}).values():
        for name in ("batch_size", "device"):
            model.pop(name, None)
    return part


def spec_hash(spec: RunSpec) -> str:
    """Hash of :func:`training_part`."""
    return hash_of_settings(training_part(spec))


def hash_of_settings(settings: dict[str, Any]) -> str:
    """Hash of settings, independent of their order."""
    return blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16).hexdigest()


def verify_checkpoint(
    checkpoint: CheckpointDir, spec: RunSpec, ranks: Ranks, base: Path | None = None, *, only_model: bool = False
) -> None:
    """Verify a checkpoint before use: every byte of its files, and that it fits this run. Collective.

    The ranks share the reading. Rank 0 decides, and every rank raises its error, so that none continues alone. Only a
    rank that reads wrongly, twice, what rank 0 reads correctly raises an error of its own, which names its node.

    Args:
        base: folder of the base model, if the checkpoint may hold an adapter.
        only_model: the caller reads ``model/`` alone, so that damage elsewhere does not matter. The settings are
            verified too.

    Raises:
        CheckpointCorrupt: the checkpoint is damaged.
        ResumeMismatch: it was written with another spec or base model.
        OSError: this node does not read what the checkpoint holds.
    """

    def beat() -> None:
        # The state of a large model is a terabyte: reading it takes longer than a silence that counts as a hang.
        ranks.reporter.beat(Phase.SETUP, checkpoint.step)

    # The names come from rank 0: another node may see an older listing of the directory.
    listed_files = ranks.on_first(lambda: _files_to_verify(checkpoint, only_model))
    files = {name: FileChecksum.model_validate(expected) for name, expected in listed_files.items()}

    def misread(names: Iterable[str]) -> list[str]:
        """The files whose content, as this rank reads it, does not match their checksums."""
        return [name for name in names if fault_of(checkpoint.root, name, files[name], beat)]

    # Dealt by size: every rank reads about as many bytes.
    found = ranks.gather(misread(sorted(files, key=lambda name: -files[name].bytes)[ranks.rank :: ranks.num_ranks]))
    suspects = [name for names in found for name in names]
    ranks.on_first(
        lambda: _require_sound(checkpoint, spec, base, beat, suspects if files else None),
        (CheckpointCorrupt, ResumeMismatch),
    )
    for rank, names in enumerate(found):
        if names:
            ranks.log(
                f"warning: only rank {rank} could not read {listed(names, 5)} of {checkpoint.root.name} correctly"
            )
    # It would load its weights through the same cache.
    if not ranks.is_first and (faulty := misread(found[ranks.rank])):
        problem = "this node reads it wrongly and rank 0 correctly; its file system cache or its memory may be damaged"
        raise OSError(errno.EIO, problem, str(checkpoint.root / faulty[0]))


def _files_to_verify(checkpoint: CheckpointDir, only_model: bool) -> dict[str, dict[str, Any]]:
    """The checksums of the files by name; empty without a readable manifest."""
    manifest = checkpoint.manifest()
    if manifest is None:
        return {}
    read = (f"{checkpoint.model.name}/", settings_file(checkpoint).relative_to(checkpoint.root).as_posix())
    return {
        name: expected.model_dump()
        for name, expected in manifest.files.items()
        if not only_model or name.startswith(read)
    }


def initial_folder(spec: RunSpec, run_dir: RunDir) -> Path:
    """Folder of the initial model of a native training run, which is the base model of its adapters."""
    return Path(spec.model.path) if spec.model.path else run_dir.initial_model


def reference_folder(context: WorkerContext, ranks: Ranks, steps_before: int, initial: Path) -> Path:
    """Folder of a loop's reference model: the model that the loop began with.

    Args:
        steps_before: number of optimizer steps before the loop.
        initial: folder of the model that the run began with.

    Raises:
        CheckpointCorrupt: the checkpoint of that step is damaged.
    """
    if not steps_before:
        return initial
    checkpoint = context.run_dir.checkpoint(steps_before)
    try:
        verify_checkpoint(checkpoint, context.spec, ranks, initial, only_model=True)
    except CheckpointCorrupt as error:
        raise CheckpointCorrupt(
            f"{error}. It is the reference for the divergence of this run, so no earlier one can replace it: restore "
            "its files from a copy and resume, or start a new run"
        ) from None
    return checkpoint.model


def agree(ranks: Ranks, find: Callable[[], CheckpointDir | None]) -> int | None:
    """Have rank 0 find a checkpoint; every rank returns rank 0's result or raises its error.

    The other ranks may see an older directory listing, and all must resume from the same checkpoint.

    Returns:
        The step of the checkpoint; None if there is none.

    Raises:
        CheckpointCorrupt, ResumeMismatch: raised by ``find`` on rank 0.
    """

    def step() -> int | None:
        found = find()
        return None if found is None else found.step

    return ranks.on_first(step, (CheckpointCorrupt, ResumeMismatch))


def _require_sound(
    checkpoint: CheckpointDir,
    spec: RunSpec,
    base: Path | None,
    beat: Callable[[], None],
    suspects: Collection[str] | None,
) -> None:
    """Rank 0's part of :func:`verify_checkpoint`.

    Args:
        suspects: files that a rank found faulty. They are read again before the checkpoint is given up: the failure of
            a disk or a network may be temporary, or only one node may have it. None for all files.
    """
    checkpoint.verify(beat, suspects)
    manifest = checkpoint.manifest()
    if manifest is None:
        raise CheckpointCorrupt(f"checkpoint {checkpoint.root} disappeared while it was read", checkpoint.root.name)
    if isinstance(spec.trainer, CommandTrainer):
        return  # only its model is needed; its settings and ranks are checked by its own program
    _require_own_settings(checkpoint, manifest)
    if manifest.spec_hash != spec_hash(spec) and _saved_settings(checkpoint) != training_part(spec):
        raise ResumeMismatch(
            f"checkpoint {checkpoint.root} was written with other settings: {_differences(checkpoint, spec)}. Resume "
            "with the same settings, or start a new run"
        )
    if base is not None and is_adapter(checkpoint.model):
        require_base(checkpoint.model, base, beat)


def _require_own_settings(checkpoint: CheckpointDir, manifest: CheckpointManifest) -> None:
    """Cross-check the redundant entries of a manifest, which has no checksum of its own. A damaged manifest must not
    look like one of other settings, since that error is not recoverable."""
    if manifest.spec_hash != hash_of_settings(json.loads(settings_file(checkpoint).read_bytes())):
        raise CheckpointCorrupt(
            f"checkpoint {checkpoint.root} is damaged: COMPLETE does not match the settings beside it",
            checkpoint.root.name,
        )
    saved = [name for name in manifest.files if name.startswith("trainer_state/rank-")]
    if len(saved) != manifest.num_ranks:
        raise CheckpointCorrupt(
            f"checkpoint {checkpoint.root} is damaged: COMPLETE lists {manifest.num_ranks} ranks but the state of "
            f"{len(saved)}",
            checkpoint.root.name,
        )


def settings_file(checkpoint: CheckpointDir) -> Path:
    """File with the settings of a checkpoint."""
    return checkpoint.trainer_state / "settings.json"


def _saved_settings(checkpoint: CheckpointDir) -> dict[str, Any]:
    """Settings of a checkpoint converted to this version: renamed ones are translated, later ones get their
    defaults."""
    saved = current_settings(json.loads(settings_file(checkpoint).read_bytes()))
    main = {"num_steps": 1, **saved["loops"]["main"]}
    resources = {"num_nodes": saved["rollout"].get("nodes", 0) + 1}  # not saved; one node has to train
    evaluate = {"scorer": "not:saved"}  # the default needs answers, which the rows may lack
    content = {"name": "saved", "resources": resources, "evaluate": evaluate, **saved}
    content["loops"] = {**saved["loops"], "main": main}
    try:
        return training_part(RunSpec.model_validate(content))
    except ValidationError:
        return _without_changeable_settings(saved)  # from a newer version: shown unchanged


def _differences(checkpoint: CheckpointDir, spec: RunSpec) -> str:
    before, now = dict(_flat(_saved_settings(checkpoint))), dict(_flat(training_part(spec)))
    changed = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
    return listed([f"{name} was {before.get(name)!r} and is {now.get(name)!r}" for name in changed], 5, "; ")


def _flat(content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
