"""Number of training rows before a run, for lengths given in epochs. Uses the loader of training."""

import os
from pathlib import Path

from rlhf_core.schemas.content import RowCount
from rlhf_core.schemas.model import BUILT_TOKENIZERS
from rlhf_core.schemas.run import RunSpec
from rlhf_core.survival import Survived, relative_path_advice
from rlhf_core.training.data.loading import encode_prompts, load_rows
from rlhf_core.training.probes.tokenizer import built_tokenizer


def count_rows(spec_path: Path) -> RowCount:
    """Count the training rows of a spec that are neither malformed nor too long.

    Args:
        spec_path: a ``RunSpec`` as JSON, with absolute paths.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the machine may be a login node
    spec = RunSpec.model_validate_json(spec_path.read_bytes())
    with Survived() as failed:  # a generator is user code and may raise anything
        return RowCount(num_rows=_num_rows(spec))
    return RowCount(problem=" ".join(failed.message.split()) + relative_path_advice(failed.error))


def _num_rows(spec: RunSpec) -> int:
    rows = load_rows(spec, "train")
    kind = spec.model.tokenizer
    if kind in BUILT_TOKENIZERS:
        tokenizer = built_tokenizer(spec, rows, rows)
    else:
        from rlhf_core.training.data.tokenizers import load_tokenizer

        tokenizer = load_tokenizer(Path(kind or spec.model.path))
    return len(encode_prompts(rows, tokenizer, spec.data).rows)
