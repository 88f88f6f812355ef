"""Imports of ranks and engines that sample with vLLM, made once by a fork server of their own (:mod:`fork_server`)."""

import importlib
import os
from typing import Any

import preloaded  # noqa: F401 - with its own imports, and its way to exit

from rlhf_core.garbage import uncollected
from rlhf_core.schemas.rollouts import VllmSettings
from rlhf_core.training.rollouts.vllm.process_state import process_variables

MODULES = (
    "vllm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    # Modules that vLLM imports with its first model.
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
)

os.environ.update(process_variables(VllmSettings(), "float32", on_gpu=False))  # as when an engine imports it
with uncollected():
    for _module in MODULES:
        importlib.import_module(_module)
    _platform: Any = importlib.import_module("vllm.platforms.cpu")
_platform.GiB_bytes = 2**25  # a smaller cache: vLLM fills it with zeros
