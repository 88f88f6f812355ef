"""Memory of each role, estimated from the run's config and the model's config alone. Pure functions; no model library.

What must be there at all times (weights, gradients, optimizer, reference) is exact arithmetic. What comes and goes
(activations, logits, cache) is counted tensor by tensor for decoders with gated feed-forward layers, at the longest
prompts and completions that the config allows: good to some ten per cent, and rather too much than too little.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import JsonValue

from rlhf_core.schemas.run import RunSpec, with_changes
from rlhf_core.schemas.trainers import CDF_CHUNK_ELEMENTS, LOGIT_CHUNK_ELEMENTS, REDUCE_BUCKET_ELEMENTS

GIB = 2**30

GPU_MEMORY_GB: Mapping[str, tuple[int, ...]] = {
    "gb200": (186,),
    "b200": (180,),
    "b300": (288,),
    "h200": (141,),
    "gh200": (96, 144),
    "h100": (80, 94),
    "h20": (96,),
    "a100": (40, 80),
    "a800": (40, 80),
    "h800": (80,),
    "l40s": (48,),
    "l40": (48,),
    "l4": (24,),
    "a40": (48,),
    "a30": (24,),
    "a16": (16,),
    "a10g": (24,),
    "a10": (24,),
    "a6000": (48,),
    "a5000": (24,),
    "v100": (16, 32),
    "p100": (12, 16),
    "t4": (16,),
    "rtx5090": (32,),
    "rtx4090": (24,),
    "rtx3090": (24,),
}
"""Memory of each type of GPU by the vendor's data sheet, in GB; several where it was built with several."""

USABLE_SHARE = 0.93
"""The rest is taken by the driver, error correction and what the allocator cannot fill."""

GPU_BASE_BYTES = int(1.5 * GIB)
"""CUDA context, kernels, and NCCL's buffers of one rank."""
CPU_BASE_BYTES = int(0.7 * GIB)
"""The interpreter with torch, transformers and DeepSpeed imported."""

_BYTES = {"float32": 4, "bfloat16": 2}


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
    vocabulary: int


@dataclass(frozen=True)
class Estimate:
    """Memory of one rank in bytes, by what takes it."""

    resident: Mapping[str, int]
    """There at all times."""
    moments: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Additional memory while a rank samples, trains and so on; only one of these at a time."""

    @property
    def resident_bytes(self) -> int:
        """Sum of what is there at all times."""
        return sum(self.resident.values())

    @property
    def peak_bytes(self) -> int:
        """The most at any time."""
        return self.resident_bytes + sum(self._worst.values())

    @property
    def largest(self) -> list[tuple[str, int]]:
        """Return the largest parts of the peak, largest first."""
        return sorted({**self.resident, **self._worst}.items(), key=lambda part: -part[1])

    @property
    def _worst(self) -> Mapping[str, int]:
        return max(self.moments.values(), key=lambda parts: sum(parts.values()), default={})


def gpu_memory_bytes(kind: str) -> int | None:
    """Usable memory of a GPU by its name, as Slurm or the driver writes it; None for one that is not in the table.

    Of a type with several sizes the one that the name gives is taken (``a100_80gb``), otherwise the smallest.
    """
    text = re.sub(r"[\s_-]+", " ", kind.lower()).replace("rtx ", "rtx")
    for name in sorted(GPU_MEMORY_GB, key=len, reverse=True):
        if re.search(rf"(?<![a-z0-9]){name}(?![0-9])", text):
            sizes = GPU_MEMORY_GB[name]
            named = [size for size in sizes if re.search(rf"(?<!\d){size}(?!\d)", text)]
            return int((named or sizes)[0] * GIB * USABLE_SHARE)
    return None


def shape_of(config: Mapping[str, Any], parameters: int | None, vocabulary: int) -> Shape | None:
    """Read the shape of a decoder from its ``config.json``; None if it lacks the dimensions.

    Args:
        vocabulary: taken where the config names none, because the tokenizer is built.
    """
    try:
        hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
        heads, feed_forward = int(config["num_attention_heads"]), int(config["intermediate_size"])
    except (KeyError, TypeError, ValueError):
        return None
    if parameters is None or heads < 1:
        return None
    head_dim = int(config.get("head_dim") or hidden // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    size = int(config.get("vocab_size") or vocabulary)
    return Shape(parameters, hidden, layers, heads * head_dim, kv_heads * head_dim, feed_forward, size)


# ---------------------------------------------------------------------------------------------------------------------
# The parts


def weight_bytes(shape: Shape, dtype: str) -> int:
    """The weights that are computed with: parameters x 4 (float32) or 2 (bfloat16). Whole on every rank in ZeRO 1."""
    return shape.parameters * _BYTES[dtype]


def gradient_bytes(shape: Shape, dtype: str) -> int:
    """Gradients, summed up in float32 over micro-batches: 4 bytes a parameter; for bfloat16 also those of the pass.

    ZeRO 1 does not split them (Rajbhandari et al. 2020, arXiv 1910.02054, section 5); stage 2 would.
    """
    return shape.parameters * (4 if dtype == "float32" else 6)


def optimizer_bytes(shape: Shape, num_ranks: int) -> int:
    """AdamW's float32 master weights and two moments, 12 bytes a parameter, split over the ranks by ZeRO 1
    (Rajbhandari et al. 2020, arXiv 1910.02054: K = 12 divided by N)."""
    return -(-12 * shape.parameters // num_ranks)


def activation_bytes(shape: Shape, dtype: str, tokens: int, checkpointing: bool) -> int:
    """Activations that the forward pass keeps for the backward pass, counted as in Korthikanti et al. 2022 (arXiv
    2205.05198).

    Per layer and token: two norms (input, normalised, output), queries, keys and values before and after their norm
    and rotation, keys and values repeated for every head, the attention's output, and four times the width of the
    gated feed-forward layer. Scores of the attention are not kept (fused kernels). With gradient checkpointing one
    hidden state per layer and token, and one layer in full while it is computed again. The last norm comes on top.
    """
    size = _BYTES[dtype]
    elements = 6 * shape.hidden + 6 * shape.query + 5 * shape.keys + 4 * shape.feed_forward
    upcast = 0 if size == 4 else 8 * shape.hidden  # norms are computed in float32
    layer = tokens * (elements * size + upcast)
    last = tokens * 2 * shape.hidden * size
    if checkpointing:
        return shape.layers * tokens * shape.hidden * size + layer + last
    return shape.layers * layer + last


def logit_bytes(shape: Shape, tokens: int) -> int:
    """Logits of training: tokens x vocabulary x 4 bytes, five times (logits, scaled, log-softmax, entropy, gradient).

    The model wrapper makes them chunk by chunk, so it is never more than one chunk.
    """
    return min(tokens * shape.vocabulary, LOGIT_CHUNK_ELEMENTS) * 4 * 5


def cache_bytes(shape: Shape, dtype: str, sequences: int, length: int) -> int:
    """KV cache: sequences x length x layers x (keys + values) x bytes; one layer is there twice while it grows."""
    layer = sequences * length * 2 * shape.keys * _BYTES[dtype]
    return layer * (shape.layers + 1)


def sampling_bytes(shape: Shape, dtype: str, sequences: int) -> int:
    """Logits of the last position for every sequence, their log-softmax in float32, and the sums of a chunk of them in
    float64."""
    elements = sequences * shape.vocabulary
    return elements * (_BYTES[dtype] + 8) + min(elements, CDF_CHUNK_ELEMENTS) * 16


# ---------------------------------------------------------------------------------------------------------------------
# The roles


def trainer_estimate(spec: RunSpec, shape: Shape) -> Estimate:
    """Memory of one trainer rank: it samples and trains in turn, with optimizer and all in place."""
    dtype, on_gpu = spec.model.dtype, bool(spec.resources.gpus_per_node)
    optimizer = f"optimizer (ZeRO 1 over {spec.num_ranks} ranks)"
    resident = {
        "weights": weight_bytes(shape, dtype),
        "gradients": gradient_bytes(shape, dtype),
        optimizer: optimizer_bytes(shape, spec.num_ranks),
        "reduction buffer": min(shape.parameters, REDUCE_BUCKET_ELEMENTS) * 4,
        "libraries": GPU_BASE_BYTES if on_gpu else CPU_BASE_BYTES,
    }
    length = spec.data.max_prompt_tokens + spec.rollout.max_new_tokens
    algorithms = [loop.algorithm for loop in spec.loops.named.values()]
    sequences = max(algorithm.sequences_per_step for algorithm in algorithms) // spec.num_ranks
    micro = max(1, min(spec.native_trainer.micro_batch_size, sequences))
    samples = any(algorithm.samples for algorithm in algorithms)
    moments = {
        "train": {
            "activations": activation_bytes(shape, dtype, micro * length, spec.native_trainer.gradient_checkpointing),
            "logits": logit_bytes(shape, micro * length),
        },
        "sample": _sampling(spec, shape, sequences if samples else _sequences_of_an_evaluation(spec)),
    }
    if any(algorithm.reference for algorithm in algorithms):
        resident["reference model"] = weight_bytes(shape, dtype)
    if any(algorithm.critic for algorithm in algorithms):
        # As large as the policy, and trained like it.
        resident["critic"] = sum(resident[part] for part in ("weights", "gradients", optimizer))
    return Estimate(resident, moments)


def evaluator_estimate(spec: RunSpec, shape: Shape) -> Estimate:
    """Memory of one evaluator rank: the weights and what sampling takes."""
    resident = {
        "weights": weight_bytes(shape, spec.model.dtype),
        "libraries": GPU_BASE_BYTES if spec.resources.gpus_per_node else CPU_BASE_BYTES,
    }
    return Estimate(resident, {"sample": _sampling(spec, shape, _sequences_of_an_evaluation(spec))})


def _sampling(spec: RunSpec, shape: Shape, sequences: int) -> dict[str, int]:
    batch = max(1, min(spec.rollout.batch_size, sequences))
    length = spec.data.max_prompt_tokens + spec.rollout.max_new_tokens
    return {
        "KV cache": cache_bytes(shape, spec.model.dtype, batch, length),
        "sampling": sampling_bytes(shape, spec.model.dtype, batch),
    }


def _sequences_of_an_evaluation(spec: RunSpec) -> int:
    prompts = spec.evaluate.num_prompts or spec.rollout.batch_size * spec.num_ranks
    return -(-prompts * spec.evaluate.samples_per_prompt // spec.num_ranks)


# ---------------------------------------------------------------------------------------------------------------------
# What would fit


def remedies(spec: RunSpec, shape: Shape, room: int) -> list[tuple[dict[str, JsonValue], int]]:
    """Changes of settings with which a trainer rank fits into ``room`` bytes, and its peak then.

    Single changes that do it; where none does, several together. None changes what is learned but the number format.
    """
    micro: list[dict[str, JsonValue]] = [
        {"trainer.micro_batch_size": n} for n in _halves(spec.native_trainer.micro_batch_size)
    ]
    batch: list[dict[str, JsonValue]] = [{"rollout.batch_size": n} for n in _halves(spec.rollout.batch_size)]
    again: dict[str, JsonValue] = {"trainer.gradient_checkpointing": True}
    short: dict[str, JsonValue] = {"model.dtype": "bfloat16"}
    smallest = {**again, **(micro or [{}])[-1], **(batch or [{}])[-1]}
    both = [{**one, **other} for one, other in zip(micro, batch, strict=False)]
    for ladders in ([micro, batch, [again], [short]], [both, [{**again, **change} for change in both]], [[smallest]]):
        found = [fitting for ladder in ladders if (fitting := _first_that_fits(spec, shape, room, ladder))]
        if found:
            return found
    return []


def _first_that_fits(
    spec: RunSpec, shape: Shape, room: int, changes: Sequence[dict[str, JsonValue]]
) -> tuple[dict[str, JsonValue], int] | None:
    for change in changes:
        peak = trainer_estimate(with_changes(spec, change), shape).peak_bytes
        if peak <= room:
            return change, peak
    return None


def _halves(size: int) -> Iterator[int]:
    while size > 1:
        size //= 2
        yield size
