"""Memory of each role, estimated from the run's config and the model's config alone. Pure functions; no model library.

What must be there at all times (weights, gradients, optimizer, reference) is exact arithmetic. What comes and goes
(activations, logits, cache) is counted tensor by tensor for decoders with gated feed-forward layers, at the longest
prompts and completions that the config allows: good to some ten per cent, and rather too much than too little.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import JsonValue

from rlhf_core.schemas.model import ALL_LINEAR, LoraSpec
from rlhf_core.schemas.run import RunSpec, with_changes
from rlhf_core.schemas.trainers import CDF_CHUNK_ELEMENTS, LIVE_ELEMENTS, LOGIT_CHUNK_ELEMENTS, REDUCE_BUCKET_ELEMENTS

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

    @property
    def linear_layers(self) -> Mapping[str, int]:
        """Inputs and outputs together of the linear layers of a decoder layer, by the name that most models give it."""
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


@dataclass(frozen=True)
class Zero:
    """Settings of the trainer that decide what a rank has of weights, gradients and optimizer."""

    stage: int
    offload: str
    num_ranks: int


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


def trained_shape(shape: Shape, lora: LoraSpec | None) -> Shape:
    """The shape with the number of parameters that are trained: all of them, or those of an adapter.

    An adapter has ``rank * (inputs + outputs)`` beside each layer (Hu et al. 2021, arXiv 2106.09685, sec. 4.1). A layer
    of another name than usual is taken for one of the widest.
    """
    if lora is None:
        return shape
    sizes = shape.linear_layers
    widths = sum(sizes.get(name, max(sizes.values())) for name in _targets(shape, lora))
    return replace(shape, parameters=shape.layers * lora.rank * widths)


def _targets(shape: Shape, lora: LoraSpec) -> frozenset[str]:
    """Names of the layers that get an adapter."""
    return frozenset(shape.linear_layers if lora.target_modules == (ALL_LINEAR,) else lora.target_modules)


# ---------------------------------------------------------------------------------------------------------------------
# The parts


def weight_bytes(shape: Shape, dtype: str) -> int:
    """The weights that are computed with, whole: parameters x 4 (float32) or 2 (bfloat16)."""
    return shape.parameters * _BYTES[dtype]


def own_weight_bytes(shape: Shape, dtype: str, zero: Zero) -> int:
    """Bytes of them that a rank has at all times: all of them, or 1/N in ZeRO 3, and none where they are offloaded."""
    if zero.offload == "parameters":
        return 0
    return -(-weight_bytes(shape, dtype) // (zero.num_ranks if zero.stage == 3 else 1))


def live_weight_bytes(shape: Shape, dtype: str, zero: Zero, lora: LoraSpec | None = None) -> int:
    """Weights that ZeRO 3 gathers in a forward or backward pass: those of some layers at once.

    Where they are frozen about four times as much was measured, and not explained (``tests/benchmarks/bench_memory.py
    --lora-rank 16``).
    """
    if zero.stage < 3:
        return 0
    return min(shape.parameters, LIVE_ELEMENTS) * _BYTES[dtype] * (1 if lora is None else 4)


def gradient_bytes(shape: Shape, dtype: str, zero: Zero) -> int:
    """Gradients, summed up in float32 over micro-batches: 4 bytes a parameter; for bfloat16 also those of the pass.

    ZeRO 0 and 1 do not split them; 2 and 3 keep 1/N (Rajbhandari et al. 2020, arXiv 1910.02054, section 5), or none
    where the optimizer is offloaded, and those of the pass until a bucket is full.
    """
    of_the_pass = 0 if dtype == "float32" else _BYTES[dtype]
    if zero.stage < 2:
        return shape.parameters * (4 + of_the_pass)
    own = 0 if zero.offload != "none" else -(-4 * shape.parameters // zero.num_ranks)
    return own + min(shape.parameters, REDUCE_BUCKET_ELEMENTS) * _BYTES[dtype]


def optimizer_bytes(shape: Shape, zero: Zero) -> int:
    """AdamW's float32 master weights and two moments, 12 bytes a parameter, split over the ranks from ZeRO 1 on
    (Rajbhandari et al. 2020, arXiv 1910.02054: K = 12 divided by N); in ZeRO 0 the weights are their own masters."""
    if zero.stage == 0:
        return 8 * shape.parameters
    return -(-12 * shape.parameters // zero.num_ranks)


def reduction_bytes(shape: Shape, zero: Zero) -> int:
    """Gradients that are being reduced over the ranks, in float32: one bucket, which ZeRO 3 copies into one row."""
    return min(shape.parameters, REDUCE_BUCKET_ELEMENTS) * 4 * (2 if zero.stage == 3 else 1)


def update_bytes(shape: Shape, zero: Zero) -> int:
    """Bytes that an update needs for its time: the gradients of a rank as one row, and AdamW's denominators.

    In main memory where the optimizer is offloaded; the GPU has the row that is copied there, one bucket.
    """
    if zero.stage == 0:
        return 0  # parameter by parameter
    if zero.offload != "none":
        return min(shape.parameters, REDUCE_BUCKET_ELEMENTS) * 4
    return -(-8 * shape.parameters // zero.num_ranks)


def main_memory_bytes(shape: Shape, dtype: str, zero: Zero, lora: LoraSpec | None = None) -> dict[str, int]:
    """Bytes that a rank has in main memory in place of the GPU's: optimizer, its gradients, and the split weights."""
    found = {}
    trained = trained_shape(shape, lora)
    if zero.offload != "none":
        # With its gradients, and the row and the denominators of an update.
        found["offloaded optimizer"] = optimizer_bytes(trained, zero) + -(-12 * trained.parameters // zero.num_ranks)
    if zero.offload == "parameters":
        found["offloaded weights"] = -(-weight_bytes(shape, dtype) // zero.num_ranks)
    return found


def activation_bytes(shape: Shape, dtype: str, tokens: int, checkpointing: bool, lora: LoraSpec | None = None) -> int:
    """Activations that the forward pass keeps for the backward pass, counted as in Korthikanti et al. 2022 (arXiv
    2205.05198).

    Per layer and token: two norms (input, normalised, output), queries, keys and values before and after their norm
    and rotation, keys and values repeated for every head, the attention's output, and four times the width of the
    gated feed-forward layer. Scores of the attention are not kept (fused kernels). With gradient checkpointing one
    hidden state per layer and token, and one layer in full while it is computed again. The last norm comes on top.

    Under an adapter, frozen layers keep nothing for a gradient of their own: no normalised states, and the input of a
    linear layer where it has an adapter, with ``rank`` values besides.
    """
    size = _BYTES[dtype]
    elements = 6 * shape.hidden + 6 * shape.query + 5 * shape.keys + 4 * shape.feed_forward
    if lora is not None:
        targets = _targets(shape, lora)
        into_attention, into_feed_forward = {"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}
        num_inputs = sum(not targets.isdisjoint(names) for names in (into_attention, into_feed_forward))
        elements = (2 + num_inputs) * shape.hidden + 5 * shape.query + 4 * shape.keys + 3 * shape.feed_forward
        elements += ("down_proj" in targets) * shape.feed_forward + len(targets) * lora.rank
    upcast = 0 if size == 4 else 8 * shape.hidden  # norms are computed in float32
    layer = tokens * (elements * size + upcast)
    last = tokens * 2 * shape.hidden * size
    if checkpointing:
        return shape.layers * tokens * shape.hidden * size + layer + last
    return shape.layers * layer + last


def logit_bytes(shape: Shape, tokens: int) -> int:
    """Logits of training: tokens x vocabulary x 4 bytes, three times (as the model makes them, in float32, and their
    log-probabilities; in the backward pass these and the gradient).

    The model wrapper makes them chunk by chunk, so it is never more than one chunk.
    """
    return min(tokens * shape.vocabulary, LOGIT_CHUNK_ELEMENTS) * 4 * 3


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
    zero = zero_of(spec)
    lora = spec.model.lora
    trained = trained_shape(shape, lora)
    adapter = own_weight_bytes(trained, dtype, zero) if lora is not None else 0
    optimizer = f"optimizer (ZeRO {zero.stage} over {zero.num_ranks} ranks)"
    resident = {
        "weights": own_weight_bytes(shape, dtype, zero) + adapter,
        "gradients": gradient_bytes(trained, dtype, zero),
        optimizer: optimizer_bytes(trained, zero) if zero.offload == "none" else 0,
        "reduction buffer": reduction_bytes(trained, zero),
        "libraries": GPU_BASE_BYTES if on_gpu else CPU_BASE_BYTES,
        # Without GPUs main memory is all there is.
        **({} if on_gpu else main_memory_bytes(shape, dtype, zero, lora)),
    }
    algorithms = [loop.algorithm for loop in spec.loops.named.values()]
    sequences = max(algorithm.sequences_per_step for algorithm in algorithms) // spec.num_ranks
    tokens = micro_batch_tokens(spec)
    samples = any(algorithm.samples for algorithm in algorithms)
    moments = {
        "train": {
            "activations": activation_bytes(shape, dtype, tokens, spec.native_trainer.gradient_checkpointing, lora),
            "logits": logit_bytes(shape, tokens),
            "gathered weights": live_weight_bytes(shape, dtype, zero, lora),
        },
        "update": {"update": update_bytes(trained, zero)},
        "sample": {
            **_sampling(spec, shape, sequences if samples else _sequences_of_an_evaluation(spec)),
            "gathered weights": weight_bytes(shape, dtype) if zero.stage == 3 else 0,
        },
    }
    if any(algorithm.reference for algorithm in algorithms):
        # Under an adapter the reference is the policy without it, or with a second one that is frozen.
        resident["reference model"] = own_weight_bytes(shape, dtype, zero) if lora is None else adapter
    if any(algorithm.critic for algorithm in algorithms):
        # As large as the policy, and trained like it.
        resident["critic"] = sum(resident[part] for part in ("weights", "gradients", optimizer))
    return Estimate(resident, moments)


def with_reward_models(estimate: Estimate, spec: RunSpec, shapes: Mapping[str, Shape]) -> Estimate:
    """The estimate of a trainer rank that has a copy of each reward model beside the rest.

    Args:
        shapes: of the reward models, by name; those that are not known are not counted.
    """
    beside = reward_model_bytes(spec, shapes, in_main_memory=False)
    if not beside:
        return estimate
    scoring = max(_scoring_bytes(spec, name, shapes[name]) for name in shapes if f"reward model {name}" in beside)
    return Estimate({**estimate.resident, **beside}, {**estimate.moments, "reward": {"scoring": scoring}})


def reward_model_bytes(spec: RunSpec, shapes: Mapping[str, Shape], *, in_main_memory: bool) -> dict[str, int]:
    """Weights of the reward models of a rank: those in the memory that it trains in, or those in main memory beside a
    GPU. Without GPUs main memory is all there is."""
    on_gpu = bool(spec.resources.gpus_per_node)
    return {
        f"reward model {name}": weight_bytes(shape, spec.reward.models[name].dtype)
        for name, shape in shapes.items()
        if (on_gpu and spec.reward.models[name].device == "cpu") is in_main_memory
    }


def _scoring_bytes(spec: RunSpec, name: str, shape: Shape) -> int:
    """Activations of one half of a layer, attention or feed-forward, for one batch of sequences: a forward pass alone
    keeps no others."""
    settings = spec.reward.models[name]
    length = settings.max_tokens or spec.data.max_prompt_tokens + spec.rollout.max_new_tokens
    elements = 4 * shape.hidden + max(3 * shape.feed_forward, 3 * shape.query + 4 * shape.keys)
    return settings.batch_size * length * elements * _BYTES[settings.dtype]


def micro_batch_tokens(spec: RunSpec) -> int:
    """Most tokens of one pass, padding included: a sequence of the full length fits any bound."""
    trainer, length = spec.native_trainer, longest_sequence(spec)
    most = max(loop.algorithm.sequences_per_step for loop in spec.loops.named.values())
    sequences = most // spec.num_ranks
    tokens = max(1, min(trainer.micro_batch_size, sequences)) * length
    return min(tokens, max(trainer.micro_batch_tokens, length)) if trainer.micro_batch_tokens else tokens


def longest_sequence(spec: RunSpec) -> int:
    """Tokens of the longest sequence that is trained on: a sampled completion, or one of the data as far as its length
    has a limit."""
    of_data = any(not loop.algorithm.samples for loop in spec.loops.named.values())
    sampled = any(loop.algorithm.samples for loop in spec.loops.named.values())
    completion = max(
        spec.rollout.max_new_tokens if sampled or not spec.data.max_completion_tokens else 0,
        spec.data.max_completion_tokens if of_data else 0,
    )
    return spec.data.max_prompt_tokens + completion


def zero_of(spec: RunSpec) -> Zero:
    """The settings of a run's own trainer."""
    trainer = spec.native_trainer
    return Zero(trainer.zero_stage, trainer.offload, spec.num_ranks)


def evaluator_estimate(spec: RunSpec, shape: Shape) -> Estimate:
    """Memory of one evaluator rank: the weights and what sampling takes."""
    resident = {
        "weights": weight_bytes(shape, spec.model.dtype),
        "libraries": GPU_BASE_BYTES if spec.resources.gpus_per_node else CPU_BASE_BYTES,
    }
    return Estimate(resident, {"sample": _sampling(spec, shape, _sequences_of_an_evaluation(spec))})


def engine_estimate(spec: RunSpec, shape: Shape) -> Estimate:
    """Memory of a rollout engine of its own without a GPU: the weights, those of the next version, and the cache."""
    weights, loops = weight_bytes(shape, spec.model.dtype), spec.loops.named.values()
    resident = {"weights": weights, "libraries": CPU_BASE_BYTES}
    if spec.rollout.engine == "vllm":
        resident["KV cache"] = spec.rollout.vllm.cpu_cache_gb * GIB
        return Estimate(resident, {"sync": {"next weights": weights}})
    sequences = max((loop.algorithm.sequences_per_step for loop in loops if loop.algorithm.samples), default=0)
    return Estimate(resident, {"sync": {"next weights": weights}, "sample": _sampling(spec, shape, sequences)})


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
    trainer = spec.native_trainer
    setting = "micro_batch_tokens" if trainer.micro_batch_tokens else "micro_batch_size"
    micro: list[dict[str, JsonValue]] = [{f"trainer.{setting}": n} for n in _halves(getattr(trainer, setting))]
    batch: list[dict[str, JsonValue]] = [{"rollout.batch_size": n} for n in _halves(spec.rollout.batch_size)]
    again: dict[str, JsonValue] = {"trainer.gradient_checkpointing": True}
    short: dict[str, JsonValue] = {"model.dtype": "bfloat16"} if spec.native_trainer.zero_stage else {}
    split = _stages(spec)
    offloaded = _offloads(spec)
    smallest = {**again, **(micro or [{}])[-1], **(batch or [{}])[-1], **(split or [{}])[-1]}
    both = [{**one, **other} for one, other in zip(micro, batch, strict=False)]
    singles = [micro, batch, [again], split, offloaded[:1], [short]]
    for ladders in (
        singles,
        [both, [{**again, **change} for change in both]],
        [[smallest]],
        [[{**smallest, **change} for change in offloaded]],
    ):
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


def _stages(spec: RunSpec) -> list[dict[str, JsonValue]]:
    """Later stages of ZeRO, where there is another rank to split with."""
    later = range(spec.native_trainer.zero_stage + 1, 4) if spec.num_ranks > 1 else range(0)
    return [{"trainer.zero_stage": stage} for stage in later]


def _offloads(spec: RunSpec) -> list[dict[str, JsonValue]]:
    """Changes that move something to main memory where that is not the GPU's: the optimizer, then the weights."""
    if not spec.resources.gpus_per_node or spec.native_trainer.zero_stage == 0:
        return []
    found: list[dict[str, JsonValue]] = []
    if spec.native_trainer.offload == "none":
        found.append({"trainer.offload": "optimizer"})
    if spec.native_trainer.offload != "parameters":
        found.append({"trainer.offload": "parameters", "trainer.zero_stage": 3})
    return found


def _halves(size: int) -> Iterator[int]:
    while size > 1:
        size //= 2
        yield size
