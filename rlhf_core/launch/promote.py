"""Promotion: the evaluated checkpoint, the single answer that counts, and the model directory, complete or absent.

    <folder>/<run_id>/
        model weights, configuration, tokenizer     as in the checkpoint, byte for byte
        README.md                                   the model card
        rlhf.json                                   its provenance, and the sha256 of every other file

The folder is written under another name and renamed once everything is on disk, so that under its final name it always
holds a complete model, even after a kill or a power cut.
"""

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.errors import CheckpointCorrupt, PromotionFailed, RunDirError
from rlhf_core.files.reading import bring_to_disk, open_regular
from rlhf_core.files.whole import create_once, is_disk_full, read_all, read_model, write_text
from rlhf_core.run_dir.checkpoint import (
    ADAPTER_OF_MERGED,
    ADAPTER_WEIGHTS,
    BASE_RECORD,
    CheckpointDir,
    checksum,
    fault_of,
)
from rlhf_core.run_dir.run import RunDir, promoted_models, run_name
from rlhf_core.schemas.checkpoint_files import CheckpointManifest, FileChecksum
from rlhf_core.schemas.evaluation import EvaluationReport, PromoteSpec, gain
from rlhf_core.schemas.promotion import ModelProvenance, PromotionAnswer

CARD = "README.md"
PROVENANCE = "rlhf.json"
_MODEL_FILES = "model/"
"""Prefix of the model's files in a checkpoint's manifest."""
_BLOCK_BYTES = 8 << 20


# ---------------------------------------------------------------------------------------------------------------------
# Choice of the checkpoint


@dataclass(frozen=True)
class PromotionChoice:
    """Checkpoint to promote, or the reason why there is none."""

    reason: str
    """Argument for or against promotion, in a sentence."""
    checkpoint: CheckpointDir | None = None


def choose(run_dir: RunDir, wanted: PromoteSpec) -> PromotionChoice:
    """Choose the complete checkpoint with the best evaluation after training, if it improves enough on the start.

    The evaluator measures the last checkpoint, or with ``checkpoint.keep_best`` the best of training, so there is
    usually one candidate. Several evaluations of the same name are still compared; the latest wins a tie.
    """
    reports = [one for one in read_all(run_dir.evaluations(), EvaluationReport) if one.name == wanted.metric]
    complete = {checkpoint.step: checkpoint for checkpoint in run_dir.checkpoints()}
    measured = [report for report in reports if report.when == "after" and report.checkpoint_step in complete]
    if not measured:
        return PromotionChoice(f"found no complete checkpoint with a {wanted.metric} evaluation after training")
    best = max(measured, key=lambda report: (gain(report.name, 0, report.value), report.checkpoint_step))
    start = min(
        (report for report in reports if report.when == "before"),
        key=lambda report: report.checkpoint_step,
        default=None,
    )
    if start is None:
        return PromotionChoice(f"found no {wanted.metric} evaluation before training to compare with")
    gained = gain(best.name, start.value, best.value)
    comparison = f"{best.metric} ({best.name}) {start.value:.3f} -> {best.value:.3f}, gain {gained:+.3f}"
    if not gained >= wanted.min_gain:  # negated, so that NaN fails as well
        return PromotionChoice(f"{comparison}; promote.min_gain is {wanted.min_gain:g}")
    return PromotionChoice(comparison, complete[best.checkpoint_step])


def promoted_folder(run_dir: RunDir, wanted: PromoteSpec) -> Path:
    """Return the folder of a run's promoted model, by default under ``promoted``, next to the folder of the run
    directories."""
    folder = Path(wanted.folder) if wanted.folder else promoted_models(run_dir.root.parent)
    return folder / run_dir.run_id


def newest_promoted(folder: Path, name: str) -> Path | None:
    """Folder of the newest promoted model among the runs of one name; None if there is none.

    Args:
        folder: folder of the promoted models.
        name: name of the runs, or the id of one run.
    """
    present = folder.iterdir() if folder.is_dir() else ()
    named = [path for path in present if name in (path.name, run_name(path.name))]
    promoted = [
        (found.promoted_at, path) for path in named if (found := read_model(path / PROVENANCE, ModelProvenance))
    ]
    # The id of a scheduled run holds the time at which it was planned, which several may share.
    newest = max(promoted, default=None)
    return newest[1] if newest else None


# ---------------------------------------------------------------------------------------------------------------------
# The answer


def give_answer(run_dir: RunDir, answer: PromotionAnswer) -> bool:
    """Record an answer; False if another one came first.

    Raises:
        RunDirError: it cannot be written.
    """
    try:
        return create_once(run_dir.promotion_answer, answer.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise RunDirError(f"cannot write {run_dir.promotion_answer}: {error.strerror}") from None


def read_answer(run_dir: RunDir) -> PromotionAnswer | None:
    """Read the recorded answer; None if there is none yet.

    Raises:
        RunDirError: the file is not an answer.
    """
    answer = read_model(run_dir.promotion_answer, PromotionAnswer)
    if answer is None and run_dir.promotion_answer.exists():
        answer = read_model(run_dir.promotion_answer, PromotionAnswer)  # another process may have written it since
        if answer is None:
            raise RunDirError(
                f"{run_dir.promotion_answer} is not a valid answer to a promotion; remove it, then answer again"
            )
    return answer


# ---------------------------------------------------------------------------------------------------------------------
# The model directory


def model_source(run_dir: RunDir, step: int) -> CheckpointDir:
    """Return the folder to publish a checkpoint's model from: its own, or for an adapter the merged model.

    Adapters from an external trainer are published unmerged.

    Raises:
        PromotionFailed: the checkpoint holds an adapter of the native trainer and no merged model of it exists.
    """
    checkpoint = run_dir.checkpoint(step)
    manifest = checkpoint.manifest()
    if manifest is None or f"{_MODEL_FILES}{BASE_RECORD}" not in manifest.files:
        return checkpoint
    merged = run_dir.merged(step)
    found = merged.manifest()
    expected = manifest.files[f"{_MODEL_FILES}{ADAPTER_WEIGHTS}"]
    if found is None or found.files.get(f"{_MODEL_FILES}{ADAPTER_OF_MERGED}/{ADAPTER_WEIGHTS}") != expected:
        raise PromotionFailed(
            f"checkpoint {checkpoint.root} holds an adapter, and {merged.root} does not contain the merged model, "
            f"which the evaluator writes. Resume the run to evaluate again, then `rlhf approve {run_dir.run_id}`"
        )
    return merged


def write_model_directory(
    checkpoint: CheckpointDir, target: Path, card: str, provenance: ModelProvenance, tick: Callable[[], None]
) -> None:
    """Write ``target``, completely or not at all. If it already holds this model, it stays unchanged.

    The caller must hold the run's lease: unfinished files of earlier writers of this target are removed. One of them
    may only be suspended. When it goes on, it has lost the lease and removes only its own files.

    Args:
        checkpoint: folder with the model, from :func:`model_source`.
        card: text of the model card.
        provenance: provenance, without its list of files.
        tick: called before anything is removed, copied or published; may raise to stop.

    Raises:
        PromotionFailed: something else exists there, space or permission is missing, or copied files have disappeared.
        CheckpointCorrupt: a file of the checkpoint does not match its manifest.
    """
    manifest = checkpoint.manifest()
    if manifest is None:
        raise CheckpointCorrupt(f"checkpoint {checkpoint.root} is not complete: {checkpoint.complete} is missing")
    if target.exists():
        _require_same(target, manifest, provenance)
        return
    tick()
    for left in target.parent.glob(f".{target.name}.*partial"):  # rlhf-flows 0.1 wrote all of them to one folder
        shutil.rmtree(left, ignore_errors=True)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.mkdir(parents=True)
        _fill(partial, checkpoint, manifest, card, provenance, tick)
        tick()
        partial.rename(target)
        bring_to_disk(target.parent)
    except OSError as error:
        what = "the disk is full" if is_disk_full(error) else error.strerror or str(error)
        raise PromotionFailed(
            f"cannot write the model of {provenance.run_id} to {target}: {what}. Nothing was left there. Fix the "
            f"cause, then `rlhf approve {provenance.run_id}`"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fill(
    folder: Path,
    checkpoint: CheckpointDir,
    manifest: CheckpointManifest,
    card: str,
    provenance: ModelProvenance,
    tick: Callable[[], None],
) -> None:
    files = {}
    for name, expected in _model_files(manifest).items():
        files[name] = _copy(checkpoint.model / name, folder / name, tick)
        if files[name] != expected:
            raise CheckpointCorrupt(
                f"checkpoint {checkpoint.root} is damaged: model/{name} has {files[name].bytes} bytes with sha256 "
                f"{files[name].sha256[:12]}, expected {expected.bytes} bytes with {expected.sha256[:12]}. Nothing was "
                "promoted"
            )
    if not files.keys() & {"config.json", "adapter_config.json"}:
        raise CheckpointCorrupt(f"checkpoint {checkpoint.root} has no model: its manifest lacks model/config.json")
    write_text(folder / CARD, card)
    files[CARD] = checksum(folder / CARD)
    whole = provenance.model_copy(update={"files": dict(sorted(files.items()))})
    write_text(folder / PROVENANCE, whole.model_dump_json(indent=2) + "\n")
    missing = files.keys() - {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    if missing:
        raise PromotionFailed(
            f"{', '.join(sorted(missing))} disappeared from {folder} while the model was being written. Nothing was "
            f"promoted. Find out what removes files there, then `rlhf approve {provenance.run_id}`"
        )
    for path in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        bring_to_disk(path)


def _model_files(manifest: CheckpointManifest) -> dict[str, FileChecksum]:
    return {
        name.removeprefix(_MODEL_FILES): expected
        for name, expected in manifest.files.items()
        if name.startswith(_MODEL_FILES)
    }


def _require_same(target: Path, manifest: CheckpointManifest, provenance: ModelProvenance) -> None:
    problems = damage(target)
    present = read_model(target / PROVENANCE, ModelProvenance)
    if present is not None and not problems:
        same_files = _model_files(manifest).items() <= present.files.items()
        if same_files and (present.run_id, present.checkpoint_step) == (provenance.run_id, manifest.step):
            return
        problems = [f"it contains step {present.checkpoint_step} of {present.run_id}"]
    raise PromotionFailed(
        f"{target} already exists and is not the model of {provenance.run_id}, step {manifest.step}: "
        f"{'; '.join(problems)}. Move it away, then `rlhf approve {provenance.run_id}`"
    )


def damage(folder: Path) -> Sequence[str]:
    """Check size and hash of every file of a promoted model and describe the damage; empty if it is sound."""
    provenance = read_model(folder / PROVENANCE, ModelProvenance)
    if provenance is None:
        return [f"it has no readable {PROVENANCE}"]
    faults = (fault_of(folder, name, expected) for name, expected in provenance.files.items())
    return [fault for fault in faults if fault]


def _copy(source: Path, target: Path, tick: Callable[[], None]) -> FileChecksum:
    """Copy a file durably and return its checksum; the source is read once."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    with open_regular(source) as reader, target.open("wb") as writer:
        while block := reader.read(_BLOCK_BYTES):
            tick()
            digest.update(block)
            size += len(block)
            writer.write(block)
        writer.flush()
        os.fsync(writer.fileno())
    return FileChecksum(bytes=size, sha256=digest.hexdigest())
