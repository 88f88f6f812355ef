"""Memory of vLLM: a share of a GPU that it fills itself, or on CPU what was measured."""

from dataclasses import replace

from rlhf_core.preflight.memory.formulas import BYTES, activation_bytes, weight_bytes
from rlhf_core.preflight.memory.gpus import GIB, USABLE_SHARE
from rlhf_core.preflight.memory.shapes import Shape, trained_shape
from rlhf_core.schemas.model import ALL_LINEAR, LoraSpec
from rlhf_core.schemas.rollouts import VLLM_ADAPTER_RANKS
from rlhf_core.schemas.run import RunSpec
from rlhf_core.schemas.trainers import REDUCE_BUCKET_ELEMENTS

VLLM_CPU_LIBRARIES = int(0.35 * GIB)
"""Main memory of vLLM's own imports and of the objects of an engine, beside torch and transformers
(``tests/benchmarks/bench_vllm_memory.py``)."""
STEP_TOKENS = {"cpu": 4096, "gpu": 16384}
"""Most tokens of one step of an engine in the process of its caller, vLLM's default (0.32, ``engine/arg_utils.py``)."""
STEP_SEQUENCES = {"cpu": 256, "gpu": 1024}
"""Most sequences of one step, likewise."""


def vllm_adapter_bytes(spec: RunSpec, shape: Shape) -> int:
    """Room that vLLM keeps for an adapter: of the next rank that it knows, beside every linear layer of the model."""
    lora = spec.model.lora
    if lora is None:
        return 0
    everywhere = lora.model_copy(update={"rank": _vllm_rank(lora), "target_modules": (ALL_LINEAR,)})
    return weight_bytes(trained_shape(shape, everywhere), spec.model.dtype)


def _vllm_rank(lora: LoraSpec) -> int:
    return next((rank for rank in VLLM_ADAPTER_RANKS if rank >= lora.rank), lora.rank)


def waiting_base_bytes(spec: RunSpec, shape: Shape) -> dict[str, int]:
    """Bytes of a trainer rank's main memory in which vLLM's base model waits between two rollouts: no version brings it
    again. Without GPUs vLLM keeps it where it is."""
    if spec.rollout.engine != "vllm" or spec.rollout.engines or not spec.resources.gpus_per_node:
        return {}
    if spec.model.lora is None:
        return {}
    return {"vLLM's base model": weight_bytes(shape, spec.model.dtype) + vllm_adapter_bytes(spec, shape)}


def token_cache_bytes(shape: Shape, dtype: str) -> int:
    """KV cache of one token: layers x (keys + values) x bytes."""
    return shape.layers * 2 * shape.keys * BYTES[dtype]


def vllm_share_bytes(spec: RunSpec, gpu: int) -> int:
    """Bytes of a GPU that vLLM may take, weights included. Its share is one of all memory.

    Args:
        gpu: usable memory of the GPU in bytes.
    """
    return int(spec.rollout.vllm.gpu_memory_share * gpu / USABLE_SHARE)


def vllm_fixed_bytes(spec: RunSpec, shape: Shape) -> int:
    """Bytes that vLLM needs before it can hold a single token: weights, and one step of the most tokens."""
    return weight_bytes(shape, spec.model.dtype) + vllm_adapter_bytes(spec, shape) + step_bytes(spec, shape)


def vllm_cache_budget(spec: RunSpec, shape: Shape, gpu: int | None) -> int | None:
    """Bytes that vLLM has for its KV cache, 0 or less where its share is too small; None where the GPU is not known."""
    if not spec.resources.gpus_per_node:
        return spec.rollout.vllm.cpu_cache_gb * GIB
    return None if gpu is None else vllm_share_bytes(spec, gpu) - vllm_fixed_bytes(spec, shape)


def vllm_resident(spec: RunSpec, shape: Shape) -> dict[str, int]:
    """Bytes that vLLM keeps at all times; on GPUs it gives everything back between two rollouts (its sleep mode).

    On CPU it packs the output layer anew: where that is tied to the embedding, and where the weights come in, this is a
    copy.
    """
    if spec.rollout.engine != "vllm" or spec.resources.gpus_per_node:
        return {}
    dtype = spec.model.dtype
    return {
        "vLLM's weights": weight_bytes(shape, dtype) + shape.vocabulary * shape.hidden * BYTES[dtype],
        "vLLM's KV cache": spec.rollout.vllm.cpu_cache_gb * GIB,
        "vLLM's libraries": VLLM_CPU_LIBRARIES,
        **({"vLLM's adapter": vllm_adapter_bytes(spec, shape)} if spec.model.lora is not None else {}),
    }


def vllm_moment(spec: RunSpec, shape: Shape, batch: int, length: int, gpu: int | None) -> dict[str, int]:
    """Bytes that vLLM takes beside that while it samples.

    Args:
        batch: sequences that it is given at a time.
        length: tokens of the longest.
        gpu: usable memory of the GPU in bytes; None where it is not known: then as much cache as the batch needs.
    """
    dtype = spec.model.dtype
    given = trained_shape(shape, spec.model.lora).parameters
    bucket = min(given, REDUCE_BUCKET_ELEMENTS) * BYTES[dtype]
    if not spec.resources.gpus_per_node:
        return {"vLLM's step": step_bytes(spec, shape), "bucket of weights": bucket}
    if gpu is not None:
        return {f"vLLM ({spec.rollout.vllm.gpu_memory_share:.0%} of the GPU)": vllm_share_bytes(spec, gpu)}
    cache = batch * length * token_cache_bytes(shape, dtype)
    return {
        "vLLM's weights": weight_bytes(shape, dtype) + vllm_adapter_bytes(spec, shape),
        "vLLM's KV cache": cache,
        "vLLM's step": step_bytes(spec, shape),
    }


def step_bytes(spec: RunSpec, shape: Shape) -> int:
    """Bytes of one step of the most tokens and sequences: activations, and logits in float32.

    On a GPU the widest point of a layer: hidden states and residual, and the gated feed-forward layer. On CPU as much
    as all activations of a layer was measured: main memory that was freed is not given back at once.
    """
    dtype = spec.model.dtype
    if not spec.resources.gpus_per_node:
        all_layers = activation_bytes(replace(shape, is_lean=False), dtype, STEP_TOKENS["cpu"], checkpointing=False)
        return all_layers // shape.layers + STEP_SEQUENCES["cpu"] * shape.vocabulary * 4
    widest = (2 * shape.hidden + 3 * shape.feed_forward) * BYTES[dtype]
    return STEP_TOKENS["gpu"] * widest + STEP_SEQUENCES["gpu"] * shape.vocabulary * 4
