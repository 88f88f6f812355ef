"""Models of a few thousand weights that TRL's side and ours build identically, in float64.

The model is an OPT, because it rounds nothing to float32 on the way (others do in their norms, rotary embeddings or
softmax) and counts its positions over real tokens, so that left padding, as in TRL, changes nothing. The weights follow
from their names: numpy guarantees that the stream of ``RandomState`` never changes (NEP 19).
"""

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import OPTConfig

VOCABULARY = ("<pad>", "<eos>", *"abcdefghijklmn")
"""Token of each number."""
PAD, EOS = 0, 1

DISTANCES: Mapping[str, float] = {"policy": 0.0, "old": 0.05, "reference": 0.1, "sampler": 0.08}
"""Name of a model to the size of the noise by which its weights differ from those of the policy."""


def config(**changes: Any) -> OPTConfig:
    """Configuration of all models."""
    return OPTConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=8,
        word_embed_proj_dim=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=16,
        max_position_embeddings=40,
        activation_function="gelu",
        dropout=0.0,
        attention_dropout=0.0,
        pad_token_id=PAD,
        bos_token_id=EOS,
        eos_token_id=EOS,
        **changes,
    )


@torch.no_grad()
def fill(model: nn.Module, name: str) -> None:
    """Give a model the weights of one of :data:`DISTANCES`, in float64.

    Args:
        model: a causal language model, or a model with a head of one output, built from :func:`config`.
    """
    model.double()
    for parameter_name, parameter in model.named_parameters():
        parameter.copy_(_weights(parameter_name, tuple(parameter.shape), name))


def flat_gradient(model: nn.Module) -> Tensor:
    """Gradients of all parameters ``[N]`` in the order of their names; 0 for parameters without a gradient."""
    named = sorted(model.named_parameters())
    parts = [torch.zeros_like(weights) if weights.grad is None else weights.grad for _, weights in named]
    return torch.cat([part.flatten() for part in parts]).double()


def _weights(parameter: str, shape: tuple[int, ...], name: str) -> Tensor:
    centre = 1.0 if "norm.weight" in parameter else 0.0
    own = centre + 0.4 * _noise(f"policy {parameter}", shape)
    return torch.from_numpy(own + DISTANCES[name] * _noise(f"{name} {parameter}", shape))


def _noise(key: str, shape: tuple[int, ...]) -> "np.ndarray[Any, np.dtype[np.float64]]":
    return np.random.RandomState(zlib.crc32(key.encode())).standard_normal(shape)
