"""A link whose buckets go from GPU to GPU over NCCL, and whose heads go over gloo.

NCCL does not complete a message whose other end is gone, and does not distinguish an aborted message from one that has
arrived. So heads, which may announce that a version was abandoned, do not go over it; the completion of a message is
polled, with a timeout, instead of waited for; and the communicator is aborted on timeout. An abort frees the GPU of a
kernel that would wait for ever, and leaves memory half written: an aborted link delivers nothing more (torch
``ProcessGroupNCCL.cpp``, ``WorkNCCL::wait`` and ``abort``; huggingface/trl#6796 is a run that hung for lack of it).
"""

import time
from typing import Any

from torch import Tensor
from torch.distributed import Work
from torch.distributed.distributed_c10d import PrefixStore, Store

from rlhf_core.errors import WeightSyncFailed
from rlhf_core.schemas.weight_sync import LinkBackend
from rlhf_core.weight_sync.gpu import Gpu
from rlhf_core.weight_sync.links import BUCKET, CONNECT_TIMEOUT_S, HEAD, GlooLink, Link, LinkEnd, Pending, first_line

POLL_INTERVAL_S = 0.0005
LAST_MESSAGES_TIMEOUT_S = 2.0
"""Longest wait for buckets in flight when a link is closed: the other end may still receive them."""


def connect(backend: LinkBackend, store: Store, key: str, end: LinkEnd) -> Link:
    """Make a link; blocks until the other end has connected.

    Args:
        key: name of the link, the same at both ends and used once.

    Raises:
        WeightSyncFailed: it did not connect, or does not support this backend.
    """
    return GpuLink(store, key, end) if backend is LinkBackend.NCCL else GlooLink(store, key, end)


class GpuLink:
    """Unidirectional link from a GPU to the next one in the chain."""

    depth = 4  # NCCL processes messages in stream order: more would only hold GPU memory

    def __init__(self, store: Store, key: str, end: LinkEnd) -> None:
        """Connect; blocks until the other end has connected.

        Raises:
            WeightSyncFailed: it did not connect, has no GPU, or has the same one.
        """
        self._peer, self._timeout_s = end.peer, end.stall_timeout_s
        self._other = int(end.is_source)
        self._heads = GlooLink(store, key, end)
        self._sending: list[Work] = []
        self.is_aborted = False
        place = PrefixStore(f"{key}/gpu", store)
        try:
            self.gpu = self._own_gpu(place)
            with self.gpu.aside():
                self._group: Any = self.gpu.group(place, 1 - self._other, CONNECT_TIMEOUT_S)
                self._meet(end.is_source)
        except RuntimeError as error:
            text = f"failed to make a link over NCCL with {end.peer}: {first_line(error)}"
            raise WeightSyncFailed(text, end.peer) from error

    def send(self, message: Tensor, tag: int) -> Pending:
        """Begin to send a head from main memory, or a bucket from this GPU; see ``links.Link``."""
        if tag == HEAD:
            return self._heads.send(message, tag)
        work = self._begin(message, self._group.send)
        self._sending = [one for one in self._sending if not one.is_completed()] + [work]
        return _PendingBucket(self, work, self._peer, self._timeout_s)

    def receive(self, message: Tensor, tag: int) -> Pending:
        """Begin to receive a head into main memory, or a bucket into this GPU; see ``links.Link``."""
        if tag == HEAD:
            return self._heads.receive(message, tag)
        return _PendingBucket(self, self._begin(message, self._group.recv), self._peer, self._timeout_s)

    def post(self, message: Tensor, tag: int) -> None:
        """Send a last head; see ``links.Link``."""
        self._heads.post(message, tag)

    def close(self) -> None:
        """Let the other end receive the messages in flight, and free both GPUs of them."""
        deadline = time.monotonic() + LAST_MESSAGES_TIMEOUT_S
        while not self.is_aborted and time.monotonic() < deadline:
            if all(work.is_completed() for work in self._sending):
                break
            time.sleep(POLL_INTERVAL_S)
        self.abort()

    def abort(self) -> None:
        """End all messages, as if they had arrived; see :class:`_PendingBucket`."""
        if not self.is_aborted:
            self.is_aborted = True
            self._group.abort()

    def _begin(self, message: Tensor, begin: Any) -> Work:
        if self.is_aborted:
            raise WeightSyncFailed(f"the link with {self._peer} was given up", self._peer)
        try:
            work: Work = begin([message], self._other, BUCKET)
        except RuntimeError as error:
            self.abort()
            raise WeightSyncFailed(f"{self._peer} is lost: {first_line(error)}", self._peer) from error
        return work

    def _own_gpu(self, place: Store) -> Gpu:
        """The GPU of this end, which must differ from that of the other end."""
        own, other = f"is/{1 - self._other}", f"is/{self._other}"
        try:
            gpu = Gpu()
        except RuntimeError:
            place.set(own, "")  # the other end need not wait for it
            raise
        place.set(own, gpu.identity)
        found = place.get(other).decode()
        if not found or found == gpu.identity:
            what = f"found {found} at both ends" if found else "the other end has no GPU"
            raise RuntimeError(f"{what}, expected a GPU at each end for NCCL; set rollout.sync.backend=gloo")
        return gpu

    def _meet(self, is_source: bool) -> None:
        """Send a first byte: NCCL connects at the first message, and only here may it take long."""
        byte = self.gpu.empty(1)
        work = self._begin(byte, self._group.send if is_source else self._group.recv)
        _PendingBucket(self, work, self._peer, CONNECT_TIMEOUT_S).wait()


class _PendingBucket:
    """A bucket in flight over NCCL."""

    def __init__(self, link: GpuLink, work: Work, peer: str, timeout_s: float) -> None:
        self._link, self._work, self._peer, self._timeout_s = link, work, peer, timeout_s

    def wait(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not self._work.is_completed():
            if time.monotonic() > deadline:
                self._link.abort()
                raise WeightSyncFailed(f"{self._peer} did not send or receive for {self._timeout_s:g} s", self._peer)
            time.sleep(POLL_INTERVAL_S)
        if self._link.is_aborted:  # completed by the abort, not by the other end
            raise WeightSyncFailed(f"the link with {self._peer} was given up", self._peer)
        try:
            self._work.wait()  # does not block any more, and raises NCCL's error
        except RuntimeError as error:
            self._link.abort()
            raise WeightSyncFailed(f"{self._peer} is lost: {first_line(error)}", self._peer) from error
