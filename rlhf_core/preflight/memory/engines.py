"""Memory of vLLM: on a GPU the share that it fills itself, on CPU measured values."""

from dataclasses import replace

from rlhf_core.preflight.memory.formulas import BYTES, activation_bytes, weight_bytes
from rlhf_core.preflight.memory.gpus import GIB, USABLE_SHARE
from rlhf_core.preflight.memory.shapes import Shape, trained_shape
from rlhf_core.schemas.model import ALL_LINEAR, LoraSpec
from rlhf_core.schemas.rollouts import VLLM_ADAPTER_RANKS
from rlhf_core.schemas.run import RunSpec
from rlhf_core.schemas.trainers import REDUCE_BUCKET_ELEMENTS

VLLM_CPU_LIBRARIES = int(0.35 * GIB)
"""Main memory of vLLM's imports and engine objects, in addition to torch and transformers
(``tests/benchmarks/bench_vllm_memory.py``)."""
LARGE_GPU_BYTES = 70 * GIB
"""Total memory from which vLLM makes larger steps on a GPU."""
STEP_TOKENS = {"cpu": 4096, "gpu": 8192, "large gpu": 16384}
"""Maximum tokens in a step of an engine in its caller's process: vLLM's default (0.32, ``engine/arg_utils.py``). On an
A100 of 80 GB it is that of a smaller GPU, which its memory does not show."""
STEP_SEQUENCES = {"cpu": 256, "gpu": 256, "large gpu": 1024}
"""Maximum sequences in a step, likewise."""


def vllm_adapter_bytes(spec: RunSpec, shape: Shape) -> int:
    """Memory that vLLM reserves for an adapter: of the next supported rank, on every linear layer of the model."""
    lora = spec.model.lora
    if lora is None:
        return 0
    everywhere = lora.model_copy(update={"rank": _vllm_rank(lora), "target_modules": (ALL_LINEAR,)})
    return weight_bytes(trained_shape(shape, everywhere), spec.model.dtype)


def _vllm_rank(lora: LoraSpec) -> int:
    return next((rank for rank in VLLM_ADAPTER_RANKS if rank >= lora.rank), lora.rank)


def waiting_base_bytes(spec: RunSpec, shape: Shape) -> dict[str, int]:
    """Bytes of a trainer rank's main memory that hold vLLM's base model between two rollouts, because weight syncs do
    not include it. Without GPUs vLLM keeps it in place."""
    in_process = spec.rollout.engine == "vllm" and not spec.rollout.engines
    if not in_process or not spec.resources.gpus_per_node or spec.model.lora is None:
        return {}
    return {"vLLM's base model": weight_bytes(shape, spec.model.dtype) + vllm_adapter_bytes(spec, shape)}


def token_cache_bytes(shape: Shape, dtype: str) -> int:
    """KV cache of one token: layers x (keys + values) x bytes. Sliding windows are not counted: of a layer with one,
    vLLM reserves the tokens of a whole step."""
    return shape.layers * shape.cached * BYTES[dtype]


def vllm_share_bytes(spec: RunSpec, gpu: int) -> int:
    """Bytes of a GPU that vLLM may take, including weights. Its share is relative to the total memory.

    Args:
        gpu: usable memory of the GPU in bytes.
    """
    return int(spec.rollout.vllm.gpu_memory_share * gpu / USABLE_SHARE)


def sglang_share_bytes(spec: RunSpec, gpu: int) -> int:
    """Bytes of a GPU that SGLang takes for weights and cache; see :func:`vllm_share_bytes`."""
    return int(spec.rollout.sglang.gpu_memory_share * gpu / USABLE_SHARE)


def vllm_fixed_bytes(spec: RunSpec, shape: Shape, gpu: int | None) -> int:
    """Bytes that vLLM needs before it can hold a single token: weights, and one step with the maximum number of
    tokens."""
    return weight_bytes(shape, spec.model.dtype) + vllm_adapter_bytes(spec, shape) + step_bytes(spec, shape, gpu)


def vllm_cache_budget(spec: RunSpec, shape: Shape, gpu: int | None) -> int | None:
    """Bytes that vLLM has for its KV cache, 0 or less if its share is too small; None if the GPU is unknown."""
    if not spec.resources.gpus_per_node:
        return spec.rollout.vllm.cpu_cache_gb * GIB
    return None if gpu is None else vllm_share_bytes(spec, gpu) - vllm_fixed_bytes(spec, shape, gpu)


def vllm_resident(spec: RunSpec, shape: Shape) -> dict[str, int]:
    """Bytes that vLLM always keeps; on GPUs it frees everything between two rollouts (sleep mode).

    On CPU it repacks the output layer: if that is tied to the embedding, or when weights are received, this is a copy.
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
    """Additional bytes that vLLM takes while it samples.

    Args:
        batch: number of sequences sampled at a time.
        length: tokens of the longest sequence.
        gpu: usable memory of the GPU in bytes; None if unknown: then as much cache as the batch needs.
    """
    dtype = spec.model.dtype
    given = trained_shape(shape, spec.model.lora).parameters
    bucket = min(given, REDUCE_BUCKET_ELEMENTS) * BYTES[dtype]
    if not spec.resources.gpus_per_node:
        return {"vLLM's step": step_bytes(spec, shape, gpu), "bucket of weights": bucket}
    if gpu is not None:
        return {f"vLLM ({spec.rollout.vllm.gpu_memory_share:.0%} of the GPU)": vllm_share_bytes(spec, gpu)}
    return {
        "vLLM's weights": weight_bytes(shape, dtype) + vllm_adapter_bytes(spec, shape),
        "vLLM's KV cache": batch * length * token_cache_bytes(shape, dtype),
        "vLLM's step": step_bytes(spec, shape, gpu),
    }


def step_bytes(spec: RunSpec, shape: Shape, gpu: int | None) -> int:
    """Bytes of one step with the maximum number of tokens and sequences: activations, and logits in float32.

    On a GPU the widest point of a layer: hidden states and residual, and the gated feed-forward layer. On CPU all
    activations of a layer, as measured: freed main memory is not returned at once.

    Args:
        gpu: usable memory of the GPU in bytes; None if unknown or without a GPU.
    """
    dtype = spec.model.dtype
    if not spec.resources.gpus_per_node:
        all_layers = activation_bytes(replace(shape, is_lean=False), dtype, STEP_TOKENS["cpu"], checkpointing=False)
        return all_layers // shape.layers + STEP_SEQUENCES["cpu"] * shape.vocabulary * 4
    kind = "large gpu" if gpu is None or gpu / USABLE_SHARE >= LARGE_GPU_BYTES else "gpu"
    widest = (2 * shape.hidden + 3 * shape.feed_forward) * BYTES[dtype]
    return STEP_TOKENS[kind] * widest + STEP_SEQUENCES[kind] * shape.vocabulary * 4
