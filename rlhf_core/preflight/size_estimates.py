"""Size estimates from the model's config only, accurate to about ten per cent."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhf_core.preflight.facts import Facts, ModelFolder
from rlhf_core.preflight.launch_arguments import arguments_of, copies_in_optimizer, trains_all_weights
from rlhf_core.preflight.memory.formulas import BYTES
from rlhf_core.preflight.memory.shapes import Shape, shape_of, trained_shape
from rlhf_core.schemas.run import RunSpec

_SHARD_BYTES = 4e9
"""Largest file of weights that the trainer writes."""
_FILES_BESIDES = 12
"""COMPLETE, settings, configuration, index, tokenizer, and the folders."""
_FILES_PER_RANK = 3
"""Log, stack, flight record."""
_FILES_PER_NODE = 12
"""State, events and telemetry of the agent, and its evidence."""
_TIED_FAMILIES = ("gemma", "cohere")
"""Types of models whose output layer is the embedding unless the config says otherwise."""
_SMALL_VOCABULARIES = {"char": 128, "byte": 260}


def checkpoint_bytes(facts: Facts) -> int | None:
    """Size of one checkpoint: the weights of each trained model, and AdamW's fp32 master copy and two moments. None if
    unknown.

    For an external trainer of all weights, a lower bound: the weights, and in their format the moments that its
    arguments keep. None if they select an adapter.
    """
    if facts.spec.trainer.kind == "command":
        weights = facts.model_folder.weight_bytes if facts.model_folder is not None else 0
        arguments = arguments_of(facts)
        if not weights or not trains_all_weights(arguments):
            return None
        return weights * (1 if arguments.is_on("save_only_model") else 1 + copies_in_optimizer(arguments))
    parameters = num_parameters(facts)
    if parameters is None:
        return None
    if facts.spec.model.lora is not None:
        shape = shape_of_model(facts)
        if shape is None:
            return None
        parameters = trained_shape(shape, facts.spec.model.lora).parameters
    return parameters * (BYTES[facts.spec.model.dtype] + 3 * 4) * trained_models(facts.spec)


def trained_models(spec: RunSpec) -> int:
    """Number of models that a checkpoint holds: the policy, and the value model of an algorithm with a critic, which is
    as large."""
    return 2 if any(loop.algorithm.critic for loop in spec.loops.named.values()) else 1


def merged_bytes(facts: Facts) -> int:
    """Size of the merged model that the promotion of an adapter writes; 0 if there is none."""
    spec = facts.spec
    if spec.trainer.kind != "native" or spec.model.lora is None or spec.promote.when == "never":
        return 0
    return (num_parameters(facts) or 0) * BYTES[spec.model.dtype]


def checkpoint_files(facts: Facts) -> int:
    """Files and folders of one checkpoint: a state per rank, the shards of the weights, and metadata."""
    weights = (num_parameters(facts) or 0) * BYTES[facts.spec.model.dtype]
    shards = max(1, math.ceil(weights / _SHARD_BYTES))
    return facts.spec.num_ranks + shards * trained_models(facts.spec) + _FILES_BESIDES


def checkpoints_kept(spec: RunSpec) -> int:
    """Maximum number of checkpoints on the disk at once: the newest, the end of the warm start, the last one, the best,
    two from before and within the window that training is judged by."""
    return min(
        spec.checkpoint.keep_last + spec.checkpoint.keep_best + 4,
        spec.total_steps // spec.checkpoint.every_num_steps + 2,
    )


def run_files(spec: RunSpec) -> int:
    """Number of files of a run without its checkpoints, if every attempt and restart is used: logs, states,
    evidence."""
    starts = spec.supervise.max_attempts * (spec.supervise.max_restarts + 1)
    return starts * (_FILES_PER_RANK * spec.num_ranks + _FILES_PER_NODE * spec.resources.num_nodes)


def num_positions(config: Mapping[str, Any]) -> int | None:
    """Longest sequence that a model can read, rotary positions stretched as its config says; None if unknown."""
    stored = config.get("max_position_embeddings", config.get("n_positions"))  # the second in GPT-2 and its relatives
    if not isinstance(stored, int):
        return None
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping):
        return stored
    # Since transformers 5, a model with several types of layers has settings for each.
    of_layers = [scaling, *(one for one in scaling.values() if isinstance(one, Mapping))]
    return max(stored, *(_stretched(one, stored) for one in of_layers))


_STRETCHING = frozenset({"yarn", "dynamic", "linear"})
"""Kinds of scaling whose config may keep the length before scaling in ``max_position_embeddings``."""


def _stretched(scaling: Mapping[str, Any], stored: int) -> int:
    """Positions after scaling; 0 if it is of another kind."""
    factor = scaling.get("factor")
    if (scaling.get("rope_type") or scaling.get("type")) not in _STRETCHING or not isinstance(factor, int | float):
        return 0
    return int(factor * (scaling.get("original_max_position_embeddings") or stored))


def num_parameters(facts: Facts) -> int | None:
    """Number of parameters of the model, from the size of its weights if there are any, otherwise from its config; None
    if unknown."""
    folder, config = facts.model_folder, facts.model_config
    if folder is not None and folder.weight_bytes:
        stored = stored_parameters(config, folder.weight_bytes)
        vocabulary, hidden = config.get("vocab_size"), config.get("hidden_size")
        if stored and isinstance(vocabulary, int) and isinstance(hidden, int) and _is_tied(config):
            # Some files, such as those of Qwen3-0.6B, have a copy of the embedding as output layer.
            stored -= vocabulary * hidden * ("lm_head" in folder.matrices)
        return stored
    return decoder_parameters({"vocab_size": _vocabulary_size(facts.spec), **config})


def shape_of_model(facts: Facts) -> Shape | None:
    """Shape of the model, with that of its largest reference; None if its config lacks the dimensions."""
    shape = shape_of(facts.model_config, num_parameters(facts), _vocabulary_size(facts.spec))
    references = known_shapes(facts.references).values()
    if shape is None or not references:
        return shape
    return replace(shape, reference=max(references, key=lambda one: one.parameters))


def known_shapes(folders: Mapping[str, ModelFolder]) -> dict[str, Shape]:
    """Shapes of models with folders, as far as their configs define them."""
    shapes = {
        name: shape_of(one.config, stored_parameters(one.config, one.weight_bytes), 0) for name, one in folders.items()
    }
    return {name: shape for name, shape in shapes.items() if shape is not None}


def stored_parameters(config: Mapping[str, Any], weight_bytes: int) -> int | None:
    """Number of parameters of a model on the disk; None without weights."""
    stored = str(config.get("torch_dtype") or config.get("dtype") or "float32")
    return weight_bytes // BYTES.get(stored, 4) if weight_bytes else None


def _vocabulary_size(spec: RunSpec) -> int:
    """Vocabulary size of a built tokenizer."""
    return _SMALL_VOCABULARIES.get(spec.model.tokenizer, spec.model.tokenizer_vocab_size)


def decoder_parameters(config: Mapping[str, Any]) -> int | None:
    """Parameters of a decoder with gated feed-forward layers (Llama, Qwen and similar), from its config; None without
    its dimensions, and for a mixture of experts, whose configs name them differently."""
    shape = None if any("experts" in name for name in config) else shape_of(config, 0, 0)
    if shape is None or not shape.vocabulary:
        return None
    per_layer = 2 * (shape.query + shape.keys) + 3 * shape.feed_forward + 2
    embeddings = shape.vocabulary * (1 if _is_tied(config) else 2)
    return shape.hidden * (shape.layers * per_layer + embeddings + 1)


def _is_tied(config: Mapping[str, Any]) -> bool:
    """True if the output layer is the embedding."""
    return bool(config.get("tie_word_embeddings", str(config.get("model_type", "")).startswith(_TIED_FAMILIES)))
