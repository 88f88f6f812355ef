"""Saved states of training: written whole or not at all, checked before they are used.

    checkpoints/step-000040/
        model/                      weights, configuration and tokenizer, as Hugging Face expects them (rank 0)
        trainer_state/rank-00000.pt where training stood, optimizer share and random number generators of one rank
        trainer_state/settings.json what it was trained with, to name what differs when a run is resumed (rank 0)
        COMPLETE                    checksums of all of the above, written last

A checkpoint is written under another name, and renamed when every rank has written its part and ``COMPLETE`` is there.
Whatever goes wrong before, the checkpoints before it are untouched.
"""

import contextlib
import json
import math
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import AliasChoices, Field
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.diagnosis.retention import kept_steps
from rlhf_core.errors import CheckpointCorrupt, DiskFull, WorkerError
from rlhf_core.files import bring_to_disk
from rlhf_core.run_dir import CheckpointDir, RunDir, checksum, is_disk_full, remove_tree, write_model
from rlhf_core.schemas.base import Label, Schema, utc_now
from rlhf_core.schemas.reports import CheckpointManifest, FileChecksum
from rlhf_core.schemas.run import RunSpec
from rlhf_core.training.checkpoint_soundness import settings_file, spec_hash, training_part
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.health_state import HealthState
from rlhf_core.training.types import WorkerContext

Result = TypeVar("Result")

_SMALL_FILES_BYTES = 1 << 20
"""Room for configuration, manifest and a small tokenizer."""
_SHARD_SIZE = "4GB"
_NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded|os error (28|122)\b")


class Progress(Schema):
    """Where training stands."""

    step: int
    """Optimizer steps done, over warm start and main algorithm."""
    loop: Label = Field(validation_alias=AliasChoices("loop", "stage"))
    """Algorithm of the loop that is running. Files of rlhf-flows 0.1 have it under ``stage``, and likewise the next."""
    loop_finished: bool = Field(validation_alias=AliasChoices("loop_finished", "stage_finished"))
    """Whether that loop is at its end."""
    position: int
    """Rows taken from the endless sequence of training rows, over the whole run."""
    health: HealthState = HealthState()
    """State of the judge of training."""


@dataclass(frozen=True)
class TrainerState:
    """What a rank needs besides the weights to go on as if nothing had happened."""

    progress: Progress
    engine: dict[str, Any]
    """``Engine.state`` of this rank."""
    random: dict[str, Any]
    """``random_state`` of this rank."""


def resume_point(context: WorkerContext) -> CheckpointDir | None:
    """The checkpoint that this start of the workers goes on from; None from the beginning.

    The first start of an attempt takes the one that the placement names, a restart in place the newest. One that this
    attempt has found damaged is passed over.

    Raises:
        CheckpointCorrupt: the one to take, or a newer one, has no readable manifest, or is gone. Names it.
    """
    named = context.placement.resume_checkpoint
    saved = _not_known_as_damaged(context)
    chosen = saved[-1] if saved and context.restart > 0 else None
    if context.restart == 0 and named:
        chosen = next((checkpoint for checkpoint in saved if checkpoint.root.name == named), None)
        if chosen is None:
            raise CheckpointCorrupt(
                f"attempt {context.attempt} is to go on from checkpoint {named}, which is not in "
                f"{context.run_dir.checkpoints_dir} any more; there are: {[one.root.name for one in saved]}",
                named,
            )
    newer = [checkpoint for checkpoint in saved if chosen is None or checkpoint.step >= chosen.step]
    for checkpoint in reversed(newer):
        _require_manifest(checkpoint)
    return chosen


def newest_checkpoint(context: WorkerContext) -> CheckpointDir | None:
    """The newest checkpoint, to be evaluated; None where there is none.

    Raises:
        CheckpointCorrupt: it has no readable manifest. Names it.
    """
    saved = _not_known_as_damaged(context)
    if not saved:
        return None
    _require_manifest(saved[-1])
    return saved[-1]


def _not_known_as_damaged(context: WorkerContext) -> list[CheckpointDir]:
    return [one for one in context.run_dir.saved_checkpoints() if one.root.name not in context.damaged]


def _require_manifest(checkpoint: CheckpointDir) -> None:
    if checkpoint.manifest() is None:
        checkpoint.verify()


# ---------------------------------------------------------------------------------------------------------------------
# Saving


class CheckpointWriter:
    """Saves checkpoints of one run. All ranks call :meth:`save` at the same step."""

    def __init__(
        self,
        run_dir: RunDir,
        spec: RunSpec,
        tokenizer: PreTrainedTokenizerBase,
        ranks: Ranks,
        beat: Callable[[], None],
        is_superseded: Callable[[], bool] = lambda: False,
    ) -> None:
        """Make a writer.

        Args:
            beat: called for every file written.
            is_superseded: whether a newer attempt of the run has begun, which writes checkpoints of its own.
        """
        self._is_superseded = is_superseded
        self._run_dir = run_dir
        self._spec = spec
        self._tokenizer = tokenizer
        self._ranks = ranks
        self._beat = beat

    def save(self, progress: Progress, model: PreTrainedModel, engine_state: dict[str, Any]) -> CheckpointDir:
        """Write one checkpoint, then remove those that need not be kept.

        Args:
            progress: where training stands.
            model: the weights; rank 0's are written.
            engine_state: ``Engine.state`` of this rank.

        Raises:
            DiskFull: there is no room, by the estimate before writing or while writing. Raised by every rank; the
                partial checkpoint is removed, older ones are untouched.
            WorkerError: a rank could not write for another reason, or the run has gone on without this attempt. Raised
                by every rank.
        """
        final = self._run_dir.checkpoint(progress.step)
        partial = CheckpointDir(final.root.with_name(f".{final.root.name}.partial"), progress.step)
        state = {"progress": progress.model_dump(), "engine": engine_state, "random": random_state(self._ranks.device)}
        needed = _tensor_bytes(state) + _SMALL_FILES_BYTES
        if self._ranks.is_first:
            self._clear_away()
            needed += _tensor_bytes([*model.parameters(), *model.buffers()]) + _SMALL_FILES_BYTES
        self._check_room(progress.step, needed)
        self._together(partial, lambda: self._begin(partial))
        checksums = self._together(partial, lambda: self._write_part(partial, model, state))
        told = {name: found.model_dump() for name, found in checksums.items()}
        parts = self._ranks.gather(told)
        files = {name: FileChecksum.model_validate(found) for part in parts for name, found in part.items()}
        self._together(partial, lambda: self._finish(partial, final, progress, files))
        return final

    def _clear_away(self) -> None:
        """Remove what interrupted saves and removals have left; nobody else writes here."""
        for leftover in self._run_dir.checkpoints_dir.glob(".step-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _check_room(self, step: int, needed: int) -> None:
        free = _free_bytes(self._run_dir.root) if self._ranks.is_first else 0
        needed_by_all, free_for_all = self._ranks.sum([needed, free])
        if needed_by_all > free_for_all:
            raise DiskFull(
                f"no room for the checkpoint of step {step}: it needs about {_readable(needed_by_all)}, "
                f"{self._run_dir.root} has {_readable(free_for_all)} free. Older checkpoints are untouched; make room, "
                f"then resume the run"
            )

    def _begin(self, partial: CheckpointDir) -> None:
        if self._ranks.is_first:
            partial.trainer_state.mkdir(parents=True)

    def _write_part(
        self, partial: CheckpointDir, model: PreTrainedModel, state: dict[str, Any]
    ) -> dict[str, FileChecksum]:
        written = [_rank_file(partial, self._ranks.rank)]
        with written[0].open("wb") as file:
            torch.save(state, file)
        self._beat()
        if self._ranks.is_first:
            settings = settings_file(partial)
            settings.write_text(json.dumps(training_part(self._spec), indent=2) + "\n", encoding="utf-8")
            model.save_pretrained(partial.model, max_shard_size=_SHARD_SIZE)
            self._beat()
            self._tokenizer.save_pretrained(partial.model)
            written += [settings, *(path for path in sorted(partial.model.rglob("*")) if path.is_file())]
        checksums = {}
        for path in written:
            bring_to_disk(path)
            checksums[path.relative_to(partial.root).as_posix()] = checksum(path)
            self._beat()
        return checksums

    def _finish(
        self, partial: CheckpointDir, final: CheckpointDir, progress: Progress, files: dict[str, FileChecksum]
    ) -> None:
        if not self._ranks.is_first:
            return
        if self._is_superseded():
            # This node was frozen and has woken up: a checkpoint of the same step may be there, and is the one to keep.
            raise WorkerError(f"a newer attempt has begun: checkpoint {progress.step} of this one is not published")
        manifest = CheckpointManifest(
            step=progress.step,
            loop=progress.loop,
            loop_finished=progress.loop_finished,
            num_ranks=self._ranks.num_ranks,
            spec_hash=spec_hash(self._spec),
            files=dict(sorted(files.items())),
            time=utc_now(),
        )
        for folder in (partial.trainer_state, partial.model):
            bring_to_disk(folder)
        write_model(partial.complete, manifest)
        bring_to_disk(partial.root)
        remove_tree(final.root)  # an older one of the same step, when training went back
        partial.root.rename(final.root)
        bring_to_disk(self._run_dir.checkpoints_dir)
        self._remove_old(progress.step)

    def _together(self, partial: CheckpointDir, work: Callable[[], Result]) -> Result:
        """Do this rank's share of the work and agree with the others on how it went."""
        try:
            result, failure = work(), None
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it before it goes on up
            failure = error
        failed, full = self._ranks.sum([float(failure is not None), float(_is_disk_full(failure))])
        if not failed:
            return result
        reports = self._ranks.gather("" if failure is None else f"{type(failure).__name__}: {failure}")
        if self._ranks.is_first:
            remove_tree(partial.root)
        told = "; ".join(f"rank {rank}: {report}" for rank, report in enumerate(reports) if report)
        if full:
            raise DiskFull(
                f"the disk became full while checkpoint {partial.step} was written to {self._run_dir.checkpoints_dir} "
                f"({told}). Older checkpoints are untouched; make room, then resume the run"
            ) from failure
        raise WorkerError(f"checkpoint {partial.step} could not be written: {told}") from failure

    def _remove_old(self, newest_step: int) -> None:
        """Only ever called when the checkpoint of ``newest_step`` is complete."""
        complete = self._run_dir.checkpoints()
        kept = kept_steps([checkpoint.step for checkpoint in complete], newest_step, self._spec)
        for checkpoint in complete:
            if checkpoint.step not in kept:
                remove_tree(checkpoint.root)


# ---------------------------------------------------------------------------------------------------------------------
# Loading


def load_trainer_state(checkpoint: CheckpointDir, ranks: Ranks) -> TrainerState:
    """This rank's state; call :func:`verify_checkpoint` before. Reading it runs no code from the file."""
    state = torch.load(_rank_file(checkpoint, ranks.rank), map_location=ranks.device, weights_only=True)
    return TrainerState(Progress.model_validate(state["progress"]), state["engine"], state["random"])


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
    """Whatever the block draws from the global random number generators, they go on as if it had not been there."""
    state = random_state(device)
    yield
    restore_random_state(state, device)


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put the global random number generators where :func:`random_state` found them."""
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
    random.setstate(state["python"])
    saved = state["numpy"]
    np.random.set_state(
        ("MT19937", saved["key"].cpu().numpy().astype(np.uint32), saved["position"], saved["has_gauss"], saved["gauss"])
    )


# ---------------------------------------------------------------------------------------------------------------------


def _rank_file(checkpoint: CheckpointDir, rank: int) -> Path:
    return checkpoint.trainer_state / f"rank-{rank:05d}.pt"


def _tensor_bytes(content: Any) -> int:
    if isinstance(content, torch.Tensor):
        return content.numel() * content.element_size()
    if isinstance(content, dict):
        return sum(_tensor_bytes(value) for value in content.values())
    if isinstance(content, list | tuple):
        return sum(_tensor_bytes(value) for value in content)
    return 0


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _is_disk_full(error: BaseException | None) -> bool:
    """Whether an error comes from a full disk: torch and safetensors hide the system's error inside their own."""
    while error is not None:
        if isinstance(error, OSError) and is_disk_full(error):
            return True
        if _NO_SPACE.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _readable(num_bytes: float) -> str:
    """Bytes with a unit of about a thousand: ``1.5 MB``."""
    if num_bytes < 1000:
        return f"{int(num_bytes)} B"
    exponent = min(4, int(math.log(num_bytes, 1000)))
    return f"{num_bytes / 1000**exponent:.1f} {' kMGT'[exponent]}B"
