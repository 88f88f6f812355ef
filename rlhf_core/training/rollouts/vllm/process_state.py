"""State of a process that vLLM reads or changes: environment variables, threads of torch, and modules of vLLM."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rlhf_core.schemas.rollouts import VllmSettings


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
