"""The configuration of the model that a run begins with, and whether several ranks can share its sequences."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_core.files.whole import read_object
from rlhf_core.schemas.model import ModelSpec
from rlhf_core.schemas.run import RunSpec
from rlhf_core.schemas.trainers import MOVING_ROPES

_RECURRENT = ("mamba", "ssm_", "linear_conv", "linear_num", "conv_", "rwkv", "lru_")
"""Beginnings of the names that settings of recurrent and convolutional layers have in configs."""


def model_config(model: ModelSpec) -> Mapping[str, Any]:
    """The model's configuration, from the spec or its folder; empty when it cannot be read.

    A model that also reads images has the dimensions of its language model in a table of their own; they are added.
    """
    config = read_object(Path(model.path) / "config.json") if model.path else model.config
    of_text = config.get("text_config")
    return {**of_text, **config} if isinstance(of_text, Mapping) else config


def num_heads(config: Mapping[str, Any]) -> int | None:
    """Number of attention heads; None if the configuration does not tell."""
    heads = config.get("num_attention_heads")
    return heads if isinstance(heads, int) and heads > 0 else None


def unshareable_part(config: Mapping[str, Any]) -> str:
    """Part of a model that mixes or places tokens so that ranks cannot share a sequence; empty if none is known.

    The trainer finds the others during its setup.
    """
    kinds = sorted({str(kind) for kind in config.get("layer_types") or ()} - {"full_attention"})
    if kinds:
        return f"layers of the kind {', '.join(kinds)}"
    if config.get("sliding_window") and config.get("use_sliding_window") is not False:
        return "a sliding window"
    if recurrent := next((name for name in config if name.startswith(_RECURRENT)), ""):
        return f"recurrent or convolutional layers ({recurrent})"
    kind, _ = moving_rope(config)
    return f"rotary embeddings of type {kind}" if kind else ""


def moving_rope(config: Mapping[str, Any]) -> tuple[str, int]:
    """Type of rotary embeddings whose frequencies depend on the longest sequence of a pass, and the number of tokens up
    to which they do not; empty and 0 for other types."""
    ropes = (config.get("rope_parameters"), config.get("rope_scaling"))
    for settings in (one for one in ropes if isinstance(one, Mapping)):
        kind = settings.get("rope_type") or settings.get("type")
        if kind in MOVING_ROPES:
            name = "original_max_position_embeddings"
            return str(kind), settings.get(name) or config.get(name) or config.get("max_position_embeddings") or 0
    return "", 0


def might_share_more(spec: RunSpec, config: Mapping[str, Any]) -> bool:
    """True if more ranks, also of several nodes, might share each sequence, as far as the configuration tells."""
    if unshareable_part(config):
        return False
    return math.gcd(spec.num_ranks, num_heads(config) or spec.num_ranks) > spec.ranks_per_row


def larger_shares(spec: RunSpec, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Larger numbers of ranks of a node that can share each sequence (``trainer.sequence_parallel``), ascending.

    They are multiples of the present number, so that the rows of a step are still divided evenly. Without the number of
    heads, or with a part that cannot be shared, there are none.
    """
    heads, now = num_heads(config), spec.ranks_per_row
    if heads is None or unshareable_part(config):
        return ()
    common = math.gcd(spec.resources.ranks_per_node, heads)
    return tuple(number for number in range(2 * now, common + 1, now) if common % number == 0)
