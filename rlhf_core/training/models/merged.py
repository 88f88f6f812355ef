"""Merged models: the loadable result of a run that trained an adapter, written by the evaluator for promotion.

merged/step-000040/
    model/            weights with the adapter merged into them, configuration and tokenizer
    model/adapter/    the adapter itself, as in the checkpoint
    COMPLETE          checksums of all of the above, written last
"""

import shutil
from collections.abc import Callable

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.errors import DiskFull, WorkerError
from rlhf_core.files.reading import bring_to_disk
from rlhf_core.files.whole import comes_from_full_disk, remove_tree
from rlhf_core.run_dir.checkpoint import ADAPTER_OF_MERGED, ADAPTER_WEIGHTS, BASE_RECORD, CheckpointDir
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.checkpoint_files import CheckpointManifest
from rlhf_core.training.models.adapters import ADAPTER_CONFIG
from rlhf_core.training.models.gathering import save_model


def write_merged(
    run_dir: RunDir,
    checkpoint: CheckpointDir,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    beat: Callable[[], None],
) -> CheckpointDir:
    """Write the merged model of a checkpoint; an existing one is replaced, since training may have rolled back.

    Args:
        model: base model with the adapter of ``checkpoint`` merged into it.
        beat: called on progress.

    Raises:
        DiskFull: there is no room for it. No partial files are left.
        WorkerError: it could not be written for another reason; likewise.
    """
    final = run_dir.merged(checkpoint.step)
    partial = final.partial
    remove_tree(partial.root)
    try:
        final.put_in_place(_written(partial, checkpoint, model, tokenizer, beat))
    except Exception as error:  # safetensors and tokenizers have their own
        remove_tree(partial.root)
        if comes_from_full_disk(error):
            raise DiskFull(
                f"no room for the merged model of checkpoint {checkpoint.step} in {final.root.parent}; make room, then "
                f"resume the run: the evaluation is made again, and the model written"
            ) from error
        raise WorkerError(f"the merged model of checkpoint {checkpoint.step} could not be written: {error}") from error
    return final


def _written(
    partial: CheckpointDir,
    checkpoint: CheckpointDir,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    beat: Callable[[], None],
) -> CheckpointManifest:
    """Write the files of a merged model; returns its manifest."""
    manifest = checkpoint.manifest()
    assert manifest is not None  # verified before it was loaded
    adapter = partial.model / ADAPTER_OF_MERGED
    adapter.mkdir(parents=True)
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE_RECORD):
        shutil.copyfile(checkpoint.model / name, adapter / name)
    save_model(model, partial.model, is_first=True, beat=beat)
    tokenizer.save_pretrained(partial.model)
    files = partial.checksums(sorted(path for path in partial.model.rglob("*") if path.is_file()), beat)
    for folder in (adapter, partial.model):
        bring_to_disk(folder)
    return manifest.model_copy(update={"files": files})
