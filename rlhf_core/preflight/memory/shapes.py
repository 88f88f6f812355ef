"""Dimensions that determine the size of a model and of its trained part."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_core.schemas.model import ALL_LINEAR, LoraSpec

_LEAN_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Types of models whose norms and feed-forward layers are replaced in training; others may be as well."""

_WINDOWED_FAMILIES = frozenset({"mistral", "mixtral", "phi3"})
"""Types of models in which all layers have the sliding window, if there is one."""

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts in the configs of different families."""


@dataclass(frozen=True)
class Shape:
    """Dimensions that determine the size of a decoder."""

    parameters: int
    hidden: int
    layers: int
    query: int
    """Attention heads x size of a head."""
    keys: int
    """Key-value heads x size of a head."""
    feed_forward: int
    """Width of the feed-forward layer that a token passes through: in a mixture of experts, of all its experts."""
    vocabulary: int
    is_lean: bool = False
    """True if training replaces its norms and feed-forward layers (``training/models/lean_layers.py``)."""
    idle: int = 0
    """Parameters of the experts that a token does not pass through."""
    latent: int = 0
    """Elements that multi-head latent attention caches per token and layer; 0 if keys and values are cached."""
    window: int = 0
    """Tokens that a layer with a sliding window attends to."""
    windowed: int = 0
    """Number of layers with a sliding window."""
    reference: "Shape | None" = None
    """The largest reference model with a folder of its own; others have the shape of the policy."""

    @property
    def cached(self) -> int:
        """Elements in the KV cache of one layer per token."""
        return self.latent or 2 * self.keys

    @property
    def active(self) -> int:
        """Parameters that a token passes through."""
        return max(0, self.parameters - self.idle)

    @property
    def linear_layers(self) -> Mapping[str, int]:
        """Sum of inputs and outputs of each linear layer of a decoder layer, by its usual name."""
        hidden, wide = self.hidden, self.feed_forward
        return {
            "q_proj": hidden + self.query,
            "k_proj": hidden + self.keys,
            "v_proj": hidden + self.keys,
            "o_proj": self.query + hidden,
            "gate_proj": hidden + wide,
            "up_proj": hidden + wide,
            "down_proj": wide + hidden,
        }


def shape_of(config: Mapping[str, Any], parameters: int | None, vocabulary: int) -> Shape | None:
    """Read the shape of a decoder from its ``config.json``; return None if it lacks the dimensions, or has several of
    one, such as a list by layer.

    Args:
        vocabulary: used if the config has none, because the tokenizer is built.
    """
    try:
        hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
        heads, feed_forward = int(config["num_attention_heads"]), _feed_forward(config)
        idle = _idle_parameters(config, hidden, layers)
        latent, latent_head = _latent_attention(config)
        head_dim = latent_head or int(config.get("head_dim") or hidden // max(heads, 1))
        kv_heads = int(config.get("num_key_value_heads") or heads)
        size = int(config.get("vocab_size") or vocabulary)
        window, windowed = _sliding_window(config, layers)
    except (KeyError, TypeError, ValueError):
        return None
    if parameters is None or heads < 1:
        return None
    is_lean = str(config.get("model_type")) in _LEAN_FAMILIES and config.get("hidden_act", "silu") == "silu"
    return Shape(
        parameters,
        hidden,
        layers,
        heads * head_dim,
        kv_heads * head_dim,
        feed_forward,
        size,
        is_lean,
        idle,
        latent,
        window,
        windowed,
    )


def _latent_attention(config: Mapping[str, Any]) -> tuple[int, int]:
    """Elements that multi-head latent attention caches per token and layer (DeepSeek-V2, arXiv 2405.04434, sec. 2.1),
    and the size of a head of its queries and keys; 0 and 0 for other attention."""
    rank, rotated = int(config.get("kv_lora_rank") or 0), int(config.get("qk_rope_head_dim") or 0)
    return (rank + rotated, int(config.get("qk_nope_head_dim") or 0) + rotated) if rank else (0, 0)


def _sliding_window(config: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """Tokens of a sliding window, and the number of layers that have it; 0 and 0 unless the config tells both."""
    window, kinds = int(config.get("sliding_window") or 0), config.get("layer_types")
    if not window or config.get("use_sliding_window") is False:
        return 0, 0
    if isinstance(kinds, Sequence):
        windowed = sum(kind == "sliding_attention" for kind in kinds)
    elif pattern := int(config.get("sliding_window_pattern") or 0):
        windowed = layers - layers // pattern
    else:
        windowed = layers if config.get("model_type") in _WINDOWED_FAMILIES else 0
    return (window, windowed) if windowed else (0, 0)


def _feed_forward(config: Mapping[str, Any]) -> int:
    experts, width = int(config.get("num_experts_per_tok") or 0), int(config["intermediate_size"])
    if not experts:
        return width
    width = _expert_width(config)
    shared = config.get("shared_expert_intermediate_size") or width * int(config.get("n_shared_experts") or 0)
    return experts * width + int(shared)


def _expert_width(config: Mapping[str, Any]) -> int:
    return int(config.get("moe_intermediate_size") or config["intermediate_size"])


def _idle_parameters(config: Mapping[str, Any], hidden: int, layers: int) -> int:
    """Parameters of the gated experts that a token does not pass through; 0 without experts, or if their number is
    unknown."""
    used = int(config.get("num_experts_per_tok") or 0)
    number = next((int(config[name]) for name in _NUM_EXPERTS if config.get(name)), 0)
    if not used or number <= used:
        return 0
    # Some families have dense layers: the first ones, named ones, or all but every n-th.
    with_experts = layers - int(config.get("first_k_dense_replace") or 0) - len(config.get("mlp_only_layers") or ())
    with_experts //= int(config.get("decoder_sparse_step") or 1)
    return max(0, with_experts) * (number - used) * 3 * hidden * _expert_width(config)


def trained_shape(shape: Shape, lora: LoraSpec | None) -> Shape:
    """The shape with the number of trained parameters: all of them, or those of an adapter.

    An adapter has ``rank * (inputs + outputs)`` beside each layer (Hu et al. 2021, arXiv 2106.09685, sec. 4.1). A layer
    with an unusual name counts as one of the widest.
    """
    if lora is None:
        return shape
    sizes = shape.linear_layers
    widths = sum(sizes.get(name, max(sizes.values())) for name in targets_of(shape, lora))
    return replace(shape, parameters=shape.layers * lora.rank * widths)


def part_of(shape: Shape, width: int) -> Shape:
    """The share of one of ``width`` GPUs if the model is split by heads and columns (tensor parallel).

    If there are fewer key-value heads than GPUs, they are copied.
    """
    if width == 1:
        return shape
    return replace(
        shape,
        parameters=shape.parameters // width,
        idle=shape.idle // width,
        query=shape.query // width,
        keys=-(-shape.keys // width),
        feed_forward=shape.feed_forward // width,
    )


def targets_of(shape: Shape, lora: LoraSpec) -> frozenset[str]:
    """Names of the layers that get an adapter."""
    return frozenset(shape.linear_layers if lora.target_modules == (ALL_LINEAR,) else lora.target_modules)
