"""Choice of the checkpoint that a start of the workers resumes from."""

from rlhf_core.errors import CheckpointCorrupt
from rlhf_core.run_dir.checkpoint import CheckpointDir
from rlhf_core.training.types import WorkerContext


def resume_point(context: WorkerContext) -> CheckpointDir | None:
    """Find the checkpoint that this start of the workers resumes from; None for a fresh start.

    The first start of an attempt takes the checkpoint that the placement names, a restart in place the newest.
    Checkpoints that this attempt has found damaged are skipped.

    Raises:
        CheckpointCorrupt: the chosen checkpoint or a newer one is missing or has no readable manifest. Names it.
    """
    named = context.placement.resume_checkpoint
    saved = _not_known_as_damaged(context)
    chosen = saved[-1] if saved and context.restart > 0 else None
    if context.restart == 0 and named:
        chosen = next((checkpoint for checkpoint in saved if checkpoint.root.name == named), None)
        if chosen is None:
            raise CheckpointCorrupt(
                f"attempt {context.attempt} was to resume from checkpoint {named}, which is not in "
                f"{context.run_dir.checkpoints_dir}; it contains {[one.root.name for one in saved]}",
                named,
            )
    newer = [checkpoint for checkpoint in saved if chosen is None or checkpoint.step >= chosen.step]
    for checkpoint in reversed(newer):
        _require_manifest(checkpoint)
    return chosen


def newest_checkpoint(context: WorkerContext) -> CheckpointDir | None:
    """Find the newest checkpoint, for evaluation; None if there is none.

    Raises:
        CheckpointCorrupt: it has no readable manifest. Names it.
    """
    saved = _not_known_as_damaged(context)
    if not saved:
        return None
    _require_manifest(saved[-1])
    return saved[-1]


def best_checkpoint(context: WorkerContext) -> CheckpointDir | None:
    """Find the checkpoint that the newest one names as the best; None if it is gone or ``checkpoint.keep_best`` is
    off."""
    saved = _not_known_as_damaged(context)
    manifest = saved[-1].manifest() if saved and context.spec.checkpoint.keep_best else None
    if manifest is None or manifest.best is None:
        return None
    step = manifest.best.step
    return next((one for one in saved if one.step == step), None)


def _not_known_as_damaged(context: WorkerContext) -> list[CheckpointDir]:
    return [one for one in context.run_dir.saved_checkpoints() if one.root.name not in context.damaged]


def _require_manifest(checkpoint: CheckpointDir) -> None:
    if checkpoint.manifest() is None:
        checkpoint.verify()
