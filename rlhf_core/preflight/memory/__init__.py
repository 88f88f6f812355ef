"""Memory of each role, estimated only from the configs of run and model. Pure functions; no model library.

Permanent memory (weights, gradients, optimizer, reference) is exact arithmetic. Temporary memory (activations, logits,
cache) is counted tensor by tensor for decoders with gated feed-forward layers, at the longest prompts and completions
that the config allows: accurate to about ten per cent, and rather too high than too low.

``gpus`` has the memory of each type of GPU, ``shapes`` the dimensions of a model, ``formulas`` the bytes of each part,
``engines`` those of vLLM, ``roles`` the sums, ``remedies`` the settings that fit.
"""

from rlhf_core.preflight.memory.engines import (
    token_cache_bytes,
    vllm_cache_budget,
    vllm_fixed_bytes,
    vllm_share_bytes,
    waiting_base_bytes,
)
from rlhf_core.preflight.memory.formulas import (
    CPU_BASE_BYTES,
    GPU_BASE_BYTES,
    Zero,
    activation_bytes,
    cache_bytes,
    gradient_bytes,
    live_weight_bytes,
    logit_bytes,
    main_memory_bytes,
    optimizer_bytes,
    own_weight_bytes,
    reduction_bytes,
    update_bytes,
    weight_bytes,
)
from rlhf_core.preflight.memory.gpus import (
    GIB,
    GPU_MEMORY_GB,
    USABLE_SHARE,
    gpu_memory_bytes,
    with_largest_size,
)
from rlhf_core.preflight.memory.remedies import (
    remedies,
)
from rlhf_core.preflight.memory.roles import (
    Estimate,
    engine_estimate,
    evaluator_estimate,
    longest_sequence,
    micro_batch_tokens,
    reward_model_bytes,
    trainer_estimate,
    with_reward_models,
    zero_of,
)
from rlhf_core.preflight.memory.shapes import (
    Shape,
    part_of,
    shape_of,
    trained_shape,
)

__all__ = [
    "CPU_BASE_BYTES",
    "GIB",
    "GPU_BASE_BYTES",
    "GPU_MEMORY_GB",
    "USABLE_SHARE",
    "Estimate",
    "Shape",
    "Zero",
    "activation_bytes",
    "cache_bytes",
    "engine_estimate",
    "evaluator_estimate",
    "gpu_memory_bytes",
    "gradient_bytes",
    "live_weight_bytes",
    "logit_bytes",
    "longest_sequence",
    "main_memory_bytes",
    "micro_batch_tokens",
    "optimizer_bytes",
    "own_weight_bytes",
    "part_of",
    "reduction_bytes",
    "remedies",
    "reward_model_bytes",
    "shape_of",
    "token_cache_bytes",
    "trained_shape",
    "trainer_estimate",
    "update_bytes",
    "vllm_cache_budget",
    "vllm_fixed_bytes",
    "vllm_share_bytes",
    "waiting_base_bytes",
    "weight_bytes",
    "with_largest_size",
    "with_reward_models",
    "zero_of",
]
