"""Broadcast along a chain: a sender gives each bucket to the first engine, and each engine relays it to the next.

If every process has a link of its own, ``n`` engines take the time of one engine and ``n - 1`` buckets: while an engine
receives a bucket, it relays the previous one. A tree has fewer hops, but its inner nodes send every byte twice over the
same link.

With several senders, each has a chain of its own for its share of the buckets, with separate links. Each bucket is
preceded by its head: version, index, checksum. This is the sender's end; the engine's is ``broadcast_incoming``.
"""

import time
import uuid
from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_core.errors import WeightSyncFailed
from rlhf_core.schemas.weight_sync import Chain, LinkBackend, Manifest, Offer, Transport
from rlhf_core.weight_sync.base import Beat, Weights
from rlhf_core.weight_sync.gpu import Gpu
from rlhf_core.weight_sync.gpu_links import connect
from rlhf_core.weight_sync.layout import WHOLE, Share, bytes_of, checksum, packed
from rlhf_core.weight_sync.links import BUCKET, CONNECT_TIMEOUT_S, HEAD, Link, LinkEnd, Pending, listen, numeric

POLL_INTERVAL_S = 0.002
ABANDONED = -1
"""Index in the head that announces that a version was abandoned; no bucket follows it."""

HEAD_BYTES = 32


class BroadcastOutgoing:
    """The start of a chain, in a trainer rank."""

    def __init__(
        self,
        name: str,
        address: str,
        *,
        stall_timeout_s: float = 60.0,
        backend: LinkBackend = LinkBackend.GLOO,
        fallback: LinkBackend | None = None,
        pinned: bool = False,
    ) -> None:
        """Listen on a free port.

        Args:
            name: name of this process, for messages.
            address: own address, at which the engines connect to this process.
            stall_timeout_s: longest wait for the next bucket, here and in the engines.
            backend: backend of all links of this chain.
            fallback: backend that replaces it permanently if the first version cannot be sent.
            pinned: True if the weights are on a GPU.
        """
        self.name, self.backend = name, backend
        self._fallback = fallback
        self._timeout_s, self._pinned = stall_timeout_s, pinned
        self._address = numeric(address)
        self._store = listen(self._address)
        self._session = ""
        self._receivers: tuple[str, ...] = ()
        self._share = WHOLE
        self._link: Link | None = None
        self._buffers: list[_Buffer] = []

    def offer(self, manifest: Manifest, receivers: Sequence[str], share: Share) -> Offer:
        """Announce a share of a version; see :class:`rlhf_core.weight_sync.base.Outgoing`."""
        if self._link is None:
            self._session = uuid.uuid4().hex
        self._receivers, self._share = tuple(receivers), share
        chain = Chain(
            sender=self.name,
            receivers=self._receivers,
            session=self._session,
            is_new_session=self._link is None,
            backend=self.backend,
            address=self._address,
            port=self._store.port,
        )
        return Offer(
            transport=Transport.BROADCAST,
            manifest=manifest,
            receiver=self._receivers[0],
            chains=(chain,),
            stall_timeout_s=self._timeout_s,
        )

    def send(self, manifest: Manifest, weights: Weights, beat: Beat) -> list[bytes]:
        """Send the offered share; see :class:`rlhf_core.weight_sync.base.Outgoing`."""
        try:
            link = self._link or self._make_link(beat)
            self._reserve(link, min(manifest.bucket_bytes, manifest.total_bytes))
            checksums = self._send_over(link, manifest, weights, beat)
        except BaseException as error:
            self._abandon(manifest)
            if isinstance(error, Exception) and self._fallback not in (None, self.backend):
                text = f"{self.name} cannot send over {self.backend}: {error}; falling back to {self._fallback}"
                print(text, flush=True)
                self.backend = self._fallback
            raise
        self._fallback = None
        return checksums

    def _make_link(self, beat: Beat) -> Link:
        first = self._receivers[0]
        end = LinkEnd(True, self._address, first, self._timeout_s, beat)
        self._link = connect(self.backend, self._store, link_key(self._session, first), end)
        self._await_chain(beat)
        return self._link

    def _await_chain(self, beat: Beat) -> None:
        """Wait until every engine has its links, so that a loss from now on is seen as a closed connection."""
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        for name in self._receivers:
            while not self._store.check([linked_key(self._session, name)]):
                if time.monotonic() > deadline:
                    raise WeightSyncFailed(f"{name} did not make links within {CONNECT_TIMEOUT_S:g} s", name)
                beat()
                time.sleep(POLL_INTERVAL_S)

    def _send_over(self, link: Link, manifest: Manifest, weights: Weights, beat: Beat) -> list[bytes]:
        found = []
        for index, bucket in packed(manifest, weights, self._share, self._take):
            buffer = self._buffer_of(index)
            found.append(checksum(buffer.in_main_memory(bucket)))
            buffer.send(link, bucket, head(manifest.version, index, found[-1]))
            beat()
        for buffer in self._buffers:
            buffer.wait()
        return found

    def _take(self, index: int) -> Tensor:
        buffer = self._buffer_of(index)
        buffer.wait()
        return buffer.memory

    def _buffer_of(self, index: int) -> "_Buffer":
        return self._buffers[index // self._share.senders % len(self._buffers)]

    def _reserve(self, link: Link, size: int) -> None:
        """Allocate memory for as many buckets as are in flight: one is packed while the others are on the wire.

        There are more than two, so that the wire stays full while another process has the CPU.

        Raises:
            WeightSyncFailed: the GPU is full.
        """
        if not self._buffers or len(self._buffers[0].memory) < size:
            try:
                self._buffers = [_Buffer(size, self._pinned, link.gpu) for _ in range(link.depth)]
            except torch.OutOfMemoryError as error:
                text = f"{self.name} has no room for {link.depth} buckets of {size / 1e6:.3g} MB: {error}"
                raise WeightSyncFailed(text, self.name) from error

    def _abandon(self, manifest: Manifest) -> None:
        """Notify the engines, if possible, and make new links for the next version."""
        self._store.set(abandoned_key(self._session), "")  # for engines that are still making links
        if self._link is not None:
            self._link.post(head(manifest.version, ABANDONED, bytes(16)), HEAD)
        self.close()  # with new buffers as well: gloo may still read these

    def reset(self) -> None:
        """Make new links for the next version."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def close(self) -> None:
        """Release link and memory."""
        self.reset()
        self._buffers = []


class _Buffer:
    """Memory of one bucket, and its messages in flight."""

    def __init__(self, size: int, pinned: bool, gpu: Gpu | None) -> None:
        self._gpu = gpu
        self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned) if gpu is None else gpu.empty(size)
        self._staging = self.memory if gpu is None else gpu.staging(size)
        self._pending: list[tuple[Pending, Tensor]] = []

    def send(self, link: Link, bucket: Tensor, head_bytes: Tensor) -> None:
        """Begin to send the bucket, after its head."""
        self._pending = [(link.send(head_bytes, HEAD), head_bytes), (link.send(bucket, BUCKET), bucket)]

    def in_main_memory(self, bucket: Tensor) -> Tensor:
        """The bucket in this memory, copied to main memory if needed, so that its checksum can be computed."""
        if self._gpu is None:
            return bucket
        staging = self._staging[: len(bucket)]
        self._gpu.copy_out(bucket, staging)
        return staging

    def wait(self) -> None:
        """Wait until the memory may be reused."""
        for pending, _ in self._pending:
            pending.wait()
        self._pending = []


def head(version: int, index: int, bucket_checksum: bytes) -> Tensor:
    """Head of a bucket, bytes ``[32]``: version and index as int64, and the checksum."""
    numbers = torch.tensor([version, index], dtype=torch.int64)
    return torch.cat([bytes_of(numbers), torch.frombuffer(bytearray(bucket_checksum), dtype=torch.uint8)])


def link_key(session: str, receiver: str) -> str:
    """Name of the link over which an engine receives."""
    return f"{session}/to/{receiver}"


def linked_key(session: str, receiver: str) -> str:
    """Key that an engine sets in the sender's store when it has its links."""
    return f"{session}/linked/{receiver}"


def abandoned_key(session: str) -> str:
    """Key that the sender sets in its store when it gives up a version."""
    return f"{session}/abandoned"
