"""Tiny models with an adapter that changes their answers. Helpers, not fixtures."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from rlhf_core.schemas.model import LoraSpec
from rlhf_core.training.models.adapters import add_adapter
from rlhf_core.training.models.causal_lm import load_causal_lm

LORA = {"rank": 4, "alpha": 12.0}


def adapted(folder: Path, seed: int, size: float = 0.3, dtype: str = "float32") -> PreTrainedModel:
    """The model in a folder with an adapter, in the form in which a trainer holds it.

    Args:
        size: scale of the values of its second matrices; 0 adds nothing.
    """
    model = load_causal_lm(folder, dtype)
    add_adapter(model, LoraSpec.model_validate(LORA), seed)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data = (torch.randn(parameter.shape, generator=generator) * size).to(parameter.dtype)
    return model
