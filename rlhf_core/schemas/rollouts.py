"""Settings of rollouts: what samples completions, and how."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from rlhf_core.schemas.base import Positive, Schema


class VllmSettings(Schema):
    """Settings of vLLM where it samples."""

    gpu_memory_share: Annotated[float, Field(gt=0, le=1)] = 0.4
    """Share of a GPU's memory that vLLM may take for weights and cache while it samples; between two rollouts it gives
    them back."""
    cpu_cache_gb: Positive = 1
    """Main memory for the KV cache of each engine where there are no GPUs, in GiB."""
    prefix_caching: bool = True
    """Compute what the prompts of a group have in common once."""
    enforce_eager: bool = False
    """Do without CUDA graphs: a quicker start and less memory, slower sampling."""


class RolloutSpec(Schema):
    """Settings of the completions that are sampled in training."""

    engine: Literal["transformers", "vllm"] = "transformers"
    """Program that samples: `transformers`, in the trainer's own process with its KV cache, or `vllm`, one engine in
    the process of every trainer rank, which is given the weights of every step (needs the extra `vllm`)."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; log-probabilities in training are taken at the same temperature."""
    max_new_tokens: Positive = 64
    """Longest completion in tokens."""
    batch_size: Positive = 256
    """Sequences generated at once on one rank."""
    vllm: VllmSettings = VllmSettings()
    """Settings of vLLM."""
