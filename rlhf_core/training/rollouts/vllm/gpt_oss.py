"""Weights of gpt-oss in a form that vLLM's interface for updates sees. Only for vLLM's worker, like ``worker.py``.

vLLM's loader copies the experts of a layer and the sinks of its attention into their parameters by itself, past the
weight loaders of these parameters (0.32). An update through the interface holds parameters without memory until all
their elements went through their weight loaders, so such copies are lost. The same loader accepts experts one by one,
and passes those to the weight loaders.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank

_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.((?:gate_up|down)_proj(?:_bias)?)")
_SINKS = re.compile(r"(.*)\.self_attn\.sinks")


def through_weight_loaders(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Load the sinks of gpt-oss, and yield the other tensors, with one tensor for each expert.

    Args:
        model: vLLM's model, during an update.
        tensors: weights as the files of a checkpoint name them: experts in tensors ``[experts, ...]``, and one sink
            per attention head.
    """
    for name, tensor in tensors:
        if sinks := _SINKS.fullmatch(name):
            _load_sinks(model.get_submodule(f"{sinks[1]}.attn"), tensor)
        elif experts := _EXPERTS.fullmatch(name):
            for number, expert in enumerate(tensor):
                yield f"{experts[1]}.{number}.{experts[2]}", expert
        else:
            yield name, tensor


def _load_sinks(attention: nn.Module, sinks: Tensor) -> None:
    """Load the sinks of the heads that this process computes."""
    parameter: Any = attention.get_parameter("sinks")
    num_heads = len(parameter)
    parameter.weight_loader(parameter, sinks.narrow(0, get_tensor_model_parallel_rank() * num_heads, num_heads))
