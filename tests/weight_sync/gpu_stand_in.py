"""Main memory in place of a GPU, and gloo in place of NCCL, for links that do not notice the difference."""

import contextlib
import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store


class CpuForGpu:
    """The methods of ``gpu.Gpu``."""

    identity = ""

    def __init__(self) -> None:
        """Act as a GPU of this process alone."""
        self.identity = self.identity or f"cpu {id(self)} of process {os.getpid()}"

    def group(self, store: Store, rank: int, connect_timeout_s: float) -> "GlooForNccl":
        """Connect at once; NCCL connects with the first message."""
        return GlooForNccl(ProcessGroupGloo(store, rank, 2, timedelta(seconds=connect_timeout_s)))

    def empty(self, size: int) -> Tensor:
        """Memory that is not zeroed."""
        return torch.full((size,), 7, dtype=torch.uint8)

    def staging(self, size: int) -> Tensor:
        """Staging memory into which no bucket has been written."""
        return torch.full((size,), 9, dtype=torch.uint8)

    def copy_out(self, bucket: Tensor, staging: Tensor) -> None:
        """Copy the bytes."""
        staging.copy_(bucket)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Do nothing: there are no streams."""
        yield


class GlooForNccl:
    """A process group that behaves like NCCL: messages never end by themselves, and an abort ends all of them."""

    def __init__(self, group: Any) -> None:
        """Create a group of two processes."""
        self._group = group
        self._works: list[_Work] = []

    def send(self, tensors: list[Tensor], other: int, tag: int) -> "_Work":
        """Start to send."""
        return self._begin(self._group.send(tensors, other, tag))

    def recv(self, tensors: list[Tensor], other: int, tag: int) -> "_Work":
        """Start to receive."""
        return self._begin(self._group.recv(tensors, other, tag))

    def abort(self) -> None:
        """Complete all messages, without any sign of what has not arrived."""
        for work in self._works:
            work.done.set()

    def _begin(self, work: Any) -> "_Work":
        self._works.append(_Work(work))
        return self._works[-1]


class _Work:
    def __init__(self, work: Any) -> None:
        self._work = work
        self.done = threading.Event()
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        with contextlib.suppress(RuntimeError):  # NCCL reports nothing of a peer that is gone either
            self._work.wait(timedelta(hours=1))
            self.done.set()

    def is_completed(self) -> bool:
        """True if the message has been sent, received or aborted."""
        return self.done.is_set()

    def wait(self) -> None:
        """Raise nothing: to NCCL, an abort is no error."""
