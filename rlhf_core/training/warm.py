"""Imports of native workers and of the probe, made once per node by the fork server (``worker/groups``)."""

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from rlhf_core.errors import WorkerError

PROBE_MODULES = ("rlhf_core.training.probes.node",)
"""Modules of the probe, which needs nothing but torch."""

NATIVE_MODULES = ("rlhf_core.training.trainers.run", "rlhf_core.training.evaluation.run")
"""Modules of the native targets. Their own imports are loaded with them."""

LATE_MODULES = ("transformers.modeling_layers", "transformers.models.auto.tokenization_auto")
"""Modules that transformers imports with the first model and the first tokenizer, whatever their type."""


def import_libraries() -> None:
    """Import the libraries of a native worker without initialising anything that the worker itself must initialise.

    Raises:
        WorkerError: an import has initialised CUDA or a process group, which belong to the worker that takes over, or
            CUDA could not be used after a fork.
        ImportError: a package is missing or broken.
    """
    with _fit_for_forks():
        _import((*NATIVE_MODULES, *LATE_MODULES))
        from rlhf_core.training.trainers.engine import load_deepspeed

        load_deepspeed(on_cpu=not torch.cuda.is_available())


def import_probe() -> None:
    """Import what a process of the probe needs; raises the same errors as :func:`import_libraries`."""
    with _fit_for_forks():
        _import(PROBE_MODULES)


def _import(modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)


@contextmanager
def _fit_for_forks() -> Iterator[None]:
    """Check that the imports in the block leave all initialisation to the processes that will be forked.

    Raises:
        WorkerError: they have initialised CUDA or a process group.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # otherwise querying GPUs would initialise the driver
    yield
    touched = [name for name, done in _initialised().items() if done]
    if touched:
        raise WorkerError(f"imports initialized {', '.join(touched)}")
    if _is_unfit_for_forks():
        raise WorkerError("counting the GPUs initialized CUDA's driver: on MIG slices and without NVML it has to")


def _initialised() -> dict[str, bool]:
    return {"CUDA": torch.cuda.is_initialized(), "a process group": dist.is_initialized()}


def _is_unfit_for_forks() -> bool:
    """True if a forked process could not use the GPUs. torch records in the child that its parent touched the driver,
    even if it does not report CUDA as initialised."""
    if not torch.backends.cuda.is_built() or torch.cuda.device_count() == 0:
        return False
    child = os.fork()
    if child == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
