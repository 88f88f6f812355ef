"""Loading of models from folders that hold all of their weights."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from rlhf_core.errors import BadConfig
from rlhf_core.text.formatting import listed


def load_whole(
    kind: type[AutoModelForCausalLM | AutoModelForSequenceClassification],
    folder: Path,
    config: PreTrainedConfig,
    dtype: str,
    *,
    new: tuple[str, ...] = (),
    setting: str = "",
) -> PreTrainedModel:
    """Load a model, and refuse a folder that lacks weights of it, which transformers fills with random numbers.

    Args:
        dtype: ``float32`` or ``bfloat16``.
        new: beginnings of the names of weights that need not be there.
        setting: beginning of the message, to name the setting of the folder.

    Raises:
        BadConfig: a weight is missing or has another shape.
        OSError, ValueError: transformers cannot load the model.
    """
    model: PreTrainedModel
    model, about = kind.from_pretrained(
        str(folder),
        config=config,
        dtype=getattr(torch, dtype),
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    missing = [f"no {name}" for name in sorted(about["missing_keys"]) if not name.startswith(new)]
    for name, found, expected in sorted(about["mismatched_keys"]):
        missing.append(f"{name} of shape {list(found)} instead of {list(expected)}")
    if missing:
        raise BadConfig(
            f"{setting}{folder} does not hold all weights of {type(model).__name__}, the model of its config.json: "
            f"found {listed(missing, 3)}. Expected the folder of a whole model with the names of transformers "
            "(save_pretrained)"
        )
    return model
