"""State of a process that vLLM reads or changes: environment variables, threads of torch, classes of
transformers, and modules of vLLM."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from rlhf_core.schemas.rollouts import VllmSettings

_MARK = "vllm_config"
"""Attribute of a model that vLLM has constructed."""


def process_variables(settings: VllmSettings, dtype: str, on_gpu: bool) -> dict[str, str]:
    """Variables that vLLM, and Triton in it, read on import and later."""
    common = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if on_gpu:
        # In float32, vLLM's attention is written in Triton, which would round its factors to the 10 bits of TF32.
        return common | ({"TRITON_F32_DEFAULT": "ieee"} if dtype == "float32" else {})
    return common | {
        "VLLM_CPU_KVCACHE_SPACE": str(settings.cpu_cache_gb),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer uses the threads too
        "TORCH_COMPILE_DISABLE": "1",  # half a minute of compilation for kernels that eager mode does not use
    }


@contextlib.contextmanager
def kept_threads() -> Iterator[None]:
    """Keep the trainer's threads: vLLM on CPU replaces the function that sets them."""
    set_threads, number = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(number)


def inspect_models_here(on_gpu: bool) -> None:
    """Make vLLM on CPU look at the class of a model in this process.

    It starts another process for a class that it has not seen before, which imports all of vLLM for several seconds
    (0.32). That process keeps CUDA uninitialised in this one, so it stays as it is on GPUs.
    """
    if not on_gpu:
        from vllm.model_executor.models import registry

        registry._run_in_subprocess = _result


def _result(inspect: Callable[[], Any]) -> Any:
    return inspect()


@contextlib.contextmanager
def kept_classes() -> Iterator[None]:
    """Keep transformers' classes as they are for all models but those that vLLM constructs within the block.

    vLLM computes some models (GPT-NeoX, Phi) with these classes and changes them in place. Every other model of the
    process, such as the policy beside a colocated engine, would then be constructed and called as vLLM's.
    """
    before = {cls: (cls.__init__, cls.__call__) for cls in _subclasses(PreTrainedModel)}
    yield
    for cls, (construct, call) in before.items():
        if cls.__init__ is not construct:
            cls.__init__, cls.__call__ = construct, _separated(cls.__call__, call)


def _subclasses(parent: type[PreTrainedModel]) -> set[Any]:
    return {parent, *(cls for child in parent.__subclasses__() for cls in _subclasses(child))}


def _separated(vllms: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(self: PreTrainedModel, *arguments: Any, **named: Any) -> Any:
        call = vllms if _MARK in vars(self) else original
        return call(self, *arguments, **named)

    return __call__
