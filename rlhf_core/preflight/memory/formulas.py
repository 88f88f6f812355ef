"""Formulas of the memory model: bytes of weights, gradients, optimizer, activations and cache of one rank."""

from dataclasses import dataclass

from rlhf_core.preflight.memory.gpus import GIB
from rlhf_core.preflight.memory.shapes import Shape, targets_of, trained_shape
from rlhf_core.schemas.model import LoraSpec
from rlhf_core.schemas.trainers import CDF_CHUNK_ELEMENTS, LIVE_ELEMENTS, LOGIT_CHUNK_ELEMENTS, REDUCE_BUCKET_ELEMENTS

GPU_BASE_BYTES = int(1.5 * GIB)
"""CUDA context, kernels, and NCCL's buffers of one rank."""
CPU_BASE_BYTES = int(0.7 * GIB)
"""The interpreter with torch, transformers and DeepSpeed imported."""

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number, by the name of its format."""


@dataclass(frozen=True)
class Zero:
    """Settings of the trainer that determine a rank's share of weights, gradients and optimizer."""

    stage: int
    offload: str
    num_ranks: int


def weight_bytes(shape: Shape, dtype: str) -> int:
    """The whole weights used in computation: parameters x 4 (float32) or 2 (bfloat16)."""
    return shape.parameters * BYTES[dtype]


def own_weight_bytes(shape: Shape, dtype: str, zero: Zero) -> int:
    """Bytes of weights that a rank always holds: all of them, 1/N in ZeRO 3, or none if they are offloaded."""
    if zero.offload == "parameters":
        return 0
    return -(-weight_bytes(shape, dtype) // (zero.num_ranks if zero.stage == 3 else 1))


def live_weight_bytes(shape: Shape, dtype: str, zero: Zero, lora: LoraSpec | None = None) -> int:
    """Weights that ZeRO 3 gathers in a forward or backward pass: those of several layers at once.

    For frozen weights, about four times as much was measured, without an explanation
    (``tests/benchmarks/bench_memory.py --lora-rank 16``).
    """
    if zero.stage < 3:
        return 0
    return min(shape.parameters, LIVE_ELEMENTS) * BYTES[dtype] * (1 if lora is None else 4)


def gradient_bytes(shape: Shape, dtype: str, zero: Zero) -> int:
    """Gradients, summed up in float32 over micro-batches: 4 bytes a parameter; for bfloat16 also those of the pass.

    ZeRO 0 and 1 do not split them; 2 and 3 keep 1/N (Rajbhandari et al. 2020, arXiv 1910.02054, section 5), or none if
    the optimizer is offloaded, and those of the pass until a bucket is full.
    """
    of_the_pass = 0 if dtype == "float32" else BYTES[dtype]
    if zero.stage < 2:
        return shape.parameters * (4 + of_the_pass)
    own = 0 if zero.offload != "none" else -(-4 * shape.parameters // zero.num_ranks)
    return own + min(shape.parameters, REDUCE_BUCKET_ELEMENTS) * BYTES[dtype]


def optimizer_bytes(shape: Shape, zero: Zero) -> int:
    """AdamW's float32 master weights and two moments, 12 bytes a parameter, split over the ranks from ZeRO 1 on
    (Rajbhandari et al. 2020, arXiv 1910.02054: K = 12 divided by N); in ZeRO 0 the weights are their own masters."""
    if zero.stage == 0:
        return 8 * shape.parameters
    return -(-12 * shape.parameters // zero.num_ranks)


def reduction_bytes(shape: Shape, zero: Zero) -> int:
    """Gradients during the reduction over the ranks, in float32: one bucket, which ZeRO 3 copies into one row."""
    return min(shape.parameters, REDUCE_BUCKET_ELEMENTS) * 4 * (2 if zero.stage == 3 else 1)


def update_bytes(shape: Shape, zero: Zero) -> int:
    """Temporary bytes of an update: the gradients of a rank as one row, and AdamW's denominators.

    They are in main memory if the optimizer is offloaded; the GPU then holds only one bucket of the row.
    """
    if zero.stage == 0:
        return 0  # parameter by parameter
    if zero.offload != "none":
        return min(shape.parameters, REDUCE_BUCKET_ELEMENTS) * 4
    return -(-8 * shape.parameters // zero.num_ranks)


def main_memory_bytes(shape: Shape, dtype: str, zero: Zero, lora: LoraSpec | None = None) -> dict[str, int]:
    """Bytes that a rank holds in main memory instead of on the GPU: optimizer, its gradients, and the split weights."""
    found = {}
    trained = trained_shape(shape, lora)
    if zero.offload != "none":
        # Including its gradients, and the row and denominators of an update.
        found["offloaded optimizer"] = optimizer_bytes(trained, zero) + -(-12 * trained.parameters // zero.num_ranks)
    if zero.offload == "parameters":
        found["offloaded weights"] = -(-weight_bytes(shape, dtype) // zero.num_ranks)
    return found


def activation_bytes(shape: Shape, dtype: str, tokens: int, checkpointing: bool, lora: LoraSpec | None = None) -> int:
    """Activations kept for the backward pass, counted as in Korthikanti et al. 2022 (arXiv 2205.05198).

    Per layer and token: two norms (input, output), queries, keys and values before and after their norm and rotation,
    keys and values repeated for every head, the attention's output, and twice the width of the gated feed-forward
    layer. Layers that ``models/lean_layers.py`` does not replace also keep normalised states, in float32 as well, and
    the gate's activation and the product. Attention scores are not kept (fused kernels). With gradient checkpointing,
    one hidden state per layer and token, and one layer in full during recomputation. The last norm is added.

    With an adapter, frozen layers keep nothing for gradients of their own: only the input of a norm, and the input of a
    linear layer only if it has an adapter, plus ``rank`` values.
    """
    size = BYTES[dtype]
    targets = targets_of(shape, lora) if lora is not None else shape.linear_layers.keys()
    into_attention, into_feed_forward = {"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}
    num_inputs = sum(not targets.isdisjoint(names) for names in (into_attention, into_feed_forward))
    elements = (2 + num_inputs) * shape.hidden + 5 * shape.query + 4 * shape.keys + 2 * shape.feed_forward
    elements += len(targets) * lora.rank if lora is not None else 0
    upcast = 0
    if shape.is_lean:
        elements += shape.feed_forward * checkpointing
    else:
        elements += shape.feed_forward * (2 if "down_proj" in targets else 1)
        elements += 2 * shape.hidden + shape.query + shape.keys if lora is None else 0
        upcast = 0 if size == 4 else 8 * shape.hidden
    layer = tokens * (elements * size + upcast)
    last = tokens * 2 * shape.hidden * size
    if checkpointing:
        return shape.layers * tokens * shape.hidden * size + layer + last
    return shape.layers * layer + last


def logit_bytes(shape: Shape, tokens: int) -> int:
    """Logits of training: tokens x vocabulary x 4 bytes, three times (as computed by the model, in float32, and their
    log-probabilities; in the backward pass these and the gradient).

    The model wrapper computes them chunk by chunk, so at most one chunk is counted.
    """
    return min(tokens * shape.vocabulary, LOGIT_CHUNK_ELEMENTS) * 4 * 3


def cache_bytes(shape: Shape, dtype: str, sequences: int, length: int) -> int:
    """KV cache: sequences x tokens x layers x (keys + values) x bytes; one layer exists twice while it grows.

    A layer with a sliding window keeps only the tokens of its window, as transformers' cache does.
    """
    whole, kept = shape.layers - shape.windowed, min(length, shape.window)
    tokens = whole * length + shape.windowed * kept + (length if whole else kept)
    return sequences * tokens * shape.cached * BYTES[dtype]


def sampling_bytes(shape: Shape, dtype: str, sequences: int) -> int:
    """Logits of the last position for every sequence, their log-softmax in float32, and the sums of a chunk of them in
    float64."""
    elements = sequences * shape.vocabulary
    return elements * (BYTES[dtype] + 8) + min(elements, CDF_CHUNK_ELEMENTS) * 16
