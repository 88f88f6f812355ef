"""Check that a folder holds all weights of the model that transformers loads from it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from rlhf_core.errors import BadConfig
from rlhf_core.text.formatting import listed

REPORTED_LOADING = {"local_files_only": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
"""Arguments with which transformers loads a local model and reports which weights it lacks; see
:func:`require_weights`."""


def require_weights(folder: Path, model: PreTrainedModel, about: Mapping[str, Any], new: str = "") -> None:
    """Refuse a folder that lacks weights of its model, which transformers fills with random numbers.

    Args:
        about: transformers' report on the loading of ``model``.
        new: beginning of the names of weights that need not be there.

    Raises:
        BadConfig: a weight is missing or has another shape.
    """
    missing = [f"no {name}" for name in sorted(about["missing_keys"]) if not (new and name.startswith(new))]
    for name, found, expected in sorted(about["mismatched_keys"]):
        missing.append(f"{name} of shape {list(found)} instead of {list(expected)}")
    if missing:
        raise BadConfig(
            f"{folder} does not hold all weights of {type(model).__name__}, the model of its config.json: found "
            f"{listed(missing, 3)}. Expected the folder of a whole model with the names of transformers "
            "(save_pretrained)"
        )
