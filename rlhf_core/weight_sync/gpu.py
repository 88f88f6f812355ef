"""The GPU of this process, for links over NCCL (on AMD: RCCL, under the same name). Contains all uses of CUDA for
links.

Not run on two GPUs yet: the tests replace it with a stand-in that has the same methods, in main memory and over gloo.
Only copies to main memory have run on a GPU.
"""

import contextlib
import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from rlhf_core.machine.variables import with_variables

_FOREVER = timedelta(days=1)
"""Message timeout of torch's watchdog, which would end the process; messages have timeouts of their own."""
_NO_HANDLING = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
"""Read when a group is made: the watchdog ignores errors of this group. By default it ends the process."""
_MAKING = threading.Lock()


def has_nccl() -> bool:
    """True if this process sees a GPU, and torch was built with NCCL."""
    return torch.cuda.is_available() and dist.is_nccl_available()


class Gpu:
    """The current GPU, with a separate stream from the one that computes."""

    def __init__(self) -> None:
        """Raises:
        RuntimeError: there is no GPU.
        """
        if not has_nccl():
            raise RuntimeError("found no GPU, or torch without NCCL")
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @property
    def identity(self) -> str:
        """Name of the GPU, the same in every process that uses it."""
        return str(torch.cuda.get_device_properties(self._device).uuid)

    def group(self, store: Store, rank: int, connect_timeout_s: float) -> Any:
        """Make a process group of two, which connects at its first message.

        Args:
            connect_timeout_s: longest wait for the other end. The first value holds for the process: torch reads it
                once.
        """
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _FOREVER
        options.config.blocking = 0  # so that connecting can time out or be aborted
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(int(connect_timeout_s)))
        with _MAKING, with_variables(_NO_HANDLING):
            return dist.ProcessGroupNCCL(store, rank, 2, options)

    def empty(self, size: int) -> Tensor:
        """Memory of this GPU, bytes ``[size]``."""
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def staging(self, size: int) -> Tensor:
        """Main memory to which this GPU copies at the full speed of its link, bytes ``[size]``."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def copy_out(self, bucket: Tensor, staging: Tensor) -> None:
        """Copy bytes of this GPU to main memory; returns when they have arrived."""
        staging.copy_(bucket, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Run this thread's GPU work on a separate stream, so that it does not wait for computations."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield
