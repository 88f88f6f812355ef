"""The engine's end of the broadcast: receives from its predecessor in the chain and relays to its successor.

Buckets arrive at their place in staging, so that relaying copies nothing; or on the GPU, from which they are relayed
and copied to staging. The shares of several senders arrive concurrently, each over its own chain and in its own thread,
into the same row of bytes.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from rlhf_core.errors import WeightSyncFailed
from rlhf_core.schemas.weight_sync import Chain, Manifest, Offer
from rlhf_core.weight_sync.base import Beat
from rlhf_core.weight_sync.broadcast import ABANDONED, HEAD_BYTES, abandoned_key, head, link_key, linked_key
from rlhf_core.weight_sync.gpu import Gpu
from rlhf_core.weight_sync.gpu_links import connect
from rlhf_core.weight_sync.layout import Share, buckets_of, checksum, merged
from rlhf_core.weight_sync.links import BUCKET, HEAD, Link, LinkEnd, Pending, answers, own_address, reach

_Answer = TypeVar("_Answer")


class BroadcastIncoming:
    """An engine's place in the chains of all senders."""

    def __init__(self) -> None:
        self._places: list[_PlaceInChain] = []

    def connect(self, offer: Offer) -> None:
        """Make the links of all chains; see :class:`rlhf_core.weight_sync.base.Incoming`."""
        count = len(offer.chains)
        self._places += [_PlaceInChain() for _ in range(len(self._places), count)]
        try:
            _concurrently(
                [partial(self._places[index].connect, offer, chain) for index, chain in enumerate(offer.chains)]
            )
        except BaseException:
            self.close()  # a sender that already waits on the other links notices
            raise

    def fill(self, offer: Offer, row: Tensor, beat: Beat) -> list[bytes]:
        """Receive a version; see :class:`rlhf_core.weight_sync.base.Incoming`.

        The shares that are not lost are received completely before the first error is raised: a sender stops as soon as
        it learns of another's failure.
        """
        count = len(offer.chains)
        lock = threading.Lock()

        def beat_alone() -> None:
            with lock:
                beat()

        shares = _concurrently(
            [
                partial(self._places[index].fill, offer, chain, Share(index, count), row, beat_alone)
                for index, chain in enumerate(offer.chains)
            ]
        )
        return merged(offer.manifest, shares)

    def close(self) -> None:
        """Close the links."""
        for place in self._places:
            place.close()
        self._places = []


def _concurrently(calls: Sequence[Callable[[], _Answer]]) -> list[_Answer]:
    """Results of calls, each in its own thread. Waits for all of them, then raises the first error to occur."""
    with ThreadPoolExecutor(max_workers=len(calls), thread_name_prefix="share") as pool:
        running = [pool.submit(call) for call in calls]
        errors = [error for one in as_completed(running) if (error := one.exception()) is not None]
    if errors:
        raise errors[0]
    return [one.result() for one in running]


class _PlaceInChain:
    """An engine's place in one chain, with its links."""

    def __init__(self) -> None:
        self._session = ""
        self._links: tuple[Link, Link | None] | None = None

    def connect(self, offer: Offer, chain: Chain) -> None:
        """Make the links of a new session, or keep those of the last version."""
        if chain.is_new_session:
            self.close()
            self._links, self._session = _connect(offer, chain), chain.session
        elif self._links is None or chain.session != self._session:
            raise WeightSyncFailed(
                f"{offer.receiver} has no links of this session; reset the sender after an engine restarts",
                offer.receiver,
            )

    def fill(self, offer: Offer, chain: Chain, share: Share, row: Tensor, beat: Beat) -> list[bytes]:
        """Receive a share over these links; returns the checksums of its buckets.

        An engine that loses its successor or finds a damaged bucket receives the rest before it fails: if it stopped,
        its predecessor would take it for lost.
        """
        links = self._links
        assert links is not None, "connect before fill"
        gpu, predecessor = links[0].gpu, chain.before(offer.receiver)
        try:
            with nullcontext() if gpu is None else gpu.aside():
                return _Relay(offer.manifest, predecessor, share, row, *links).run(beat)
        except BaseException:
            self.close()  # links are reused only after a complete share
            raise

    def close(self) -> None:
        """Close the links."""
        links, self._links = self._links, None
        for link in links or ():
            if link is not None:
                link.close()


class _ReceiveBuffers:
    """Memory into which buckets are received: their own place in the row, or buffers on the GPU, used in turn.

    There are enough buffers for the buckets that are expected and those that are being relayed.
    """

    def __init__(self, gpu: Gpu | None, depth: int, size: int) -> None:
        self._gpu = gpu
        self._buffers = [] if gpu is None else [gpu.empty(size) for _ in range(2 * depth)]
        self._staging = None if gpu is None else gpu.staging(size)
        self._next = 0

    def for_bucket(self, bucket: Tensor) -> Tensor:
        """Memory to receive a bucket into; ``bucket`` is its place in the row."""
        if not self._buffers:
            return bucket
        buffer = self._buffers[self._next % len(self._buffers)]
        self._next += 1
        return buffer[: len(bucket)]

    def settle(self, arrived: Tensor, bucket: Tensor) -> None:
        """Copy a received bucket to its place in the row, unless it is already there."""
        if self._gpu is not None and self._staging is not None:
            staging = self._staging[: len(bucket)]
            self._gpu.copy_out(arrived, staging)
            bucket.copy_(staging)


class _Relay:
    """One share of a version as it passes through an engine."""

    def __init__(
        self, manifest: Manifest, predecessor: str, share: Share, row: Tensor, upstream: Link, downstream: Link | None
    ) -> None:
        self._manifest, self._predecessor = manifest, predecessor
        self._upstream, self._downstream = upstream, downstream
        buckets = list(buckets_of(manifest, row))
        self._buckets = [(index, buckets[index]) for index in share.buckets(manifest)]
        self._depth = upstream.depth
        self._receive_buffers = _ReceiveBuffers(
            upstream.gpu, self._depth, min(manifest.bucket_bytes, manifest.total_bytes)
        )
        self._expected: deque[tuple[Tensor, Tensor, Pending, Pending]] = deque()
        self._relayed: deque[Pending] = deque()
        self._kept: list[Tensor] = []
        self._failure: WeightSyncFailed | None = None

    def run(self, beat: Beat) -> list[bytes]:
        """Receive and relay every bucket; returns their checksums."""
        found = []
        for _, bucket in self._buckets[: self._depth]:
            self._expect(bucket)
        for number, (index, bucket) in enumerate(self._buckets):
            try:
                head_bytes, arrived = self._receive(index)
            except WeightSyncFailed as error:
                self._relay_end()
                raise self._failure or error from error
            self._relay(arrived, head_bytes)
            self._receive_buffers.settle(arrived, bucket)
            if number + self._depth < len(self._buckets):
                self._expect(self._buckets[number + self._depth][1])
            found.append(checksum(bucket))
            self._verify(index, head_bytes, found[-1])
            beat()
        self._settle(0)
        if self._failure is not None:
            raise self._failure
        return found

    def _expect(self, bucket: Tensor) -> None:
        head_bytes = torch.empty(HEAD_BYTES, dtype=torch.uint8)
        memory = self._receive_buffers.for_bucket(bucket)
        head_message = self._upstream.receive(head_bytes, HEAD)
        self._expected.append((head_bytes, memory, head_message, self._upstream.receive(memory, BUCKET)))

    def _receive(self, index: int) -> tuple[Tensor, Tensor]:
        head_bytes, memory, head_message, transfer = self._expected.popleft()
        head_message.wait()
        version, found = head_bytes[:16].view(torch.int64).tolist()
        if found == ABANDONED:
            raise WeightSyncFailed(f"{self._predecessor} gave up version {self._manifest.version}", self._predecessor)
        if (version, found) != (self._manifest.version, index):
            raise WeightSyncFailed(
                f"{self._predecessor} has sent bucket {found} of version {version}, expected bucket {index} of version "
                f"{self._manifest.version}",
                self._predecessor,
            )
        transfer.wait()
        return head_bytes, memory

    def _relay(self, bucket: Tensor, head_bytes: Tensor) -> None:
        if self._downstream is None:
            return
        try:
            self._relayed.extend([self._downstream.send(head_bytes, HEAD), self._downstream.send(bucket, BUCKET)])
            self._kept.append(head_bytes)
            self._settle(2 * self._depth)
        except WeightSyncFailed as error:
            self._lose_downstream(error)

    def _settle(self, most: int) -> None:
        """Wait until at most ``most`` messages to the successor are in flight."""
        try:
            while len(self._relayed) > most:
                self._relayed.popleft().wait()
        except WeightSyncFailed as error:
            self._lose_downstream(error)

    def _lose_downstream(self, error: WeightSyncFailed) -> None:
        self._failure = self._failure or error
        if self._downstream is not None:
            self._downstream.close()
        self._downstream = None
        self._relayed.clear()

    def _relay_end(self) -> None:
        if self._downstream is not None:
            self._downstream.post(head(self._manifest.version, ABANDONED, bytes(16)), HEAD)

    def _verify(self, index: int, head_bytes: Tensor, found: bytes) -> None:
        if bytes(head_bytes[16:].tolist()) != found and self._failure is None:
            self._failure = WeightSyncFailed(
                f"bucket {index} of version {self._manifest.version} was damaged on the way from {self._predecessor}; "
                "send the version again, and check that link if this repeats",
                self._predecessor,
            )


def _connect(offer: Offer, chain: Chain) -> tuple[Link, Link | None]:
    """Links of an engine to its predecessor and to its successor, if there is one.

    Both are made at once. Otherwise those of a chain would be made one after the other, and NCCL may take seconds for
    each.
    """
    store = reach(chain.address, chain.port, chain.sender)
    own = own_address(chain.address)
    made: dict[bool, Link] = {}

    def link(receiver: str, is_source: bool, peer: str) -> Link:
        place = reach(chain.address, chain.port, chain.sender)  # a store of its own: waiting for a key blocks it

        def require_wanted() -> None:
            if place.check([abandoned_key(chain.session)]):
                raise WeightSyncFailed(f"{chain.sender} gave up version {offer.manifest.version}", chain.sender)

        end = LinkEnd(is_source, own, peer, offer.stall_timeout_s, require_wanted)
        made[is_source] = connect(chain.backend, place, link_key(chain.session, receiver), end)
        return made[is_source]

    ends = [partial(link, offer.receiver, False, chain.before(offer.receiver))]
    if (successor := chain.after(offer.receiver)) is not None:
        ends.append(partial(link, successor, True, successor))
    try:
        upstream, *downstream = _concurrently(ends)
        store.set(linked_key(chain.session, offer.receiver), "")
    except (WeightSyncFailed, RuntimeError) as error:
        for is_source, one in made.items():
            if is_source:  # the successor may already wait for its first bucket
                one.post(head(offer.manifest.version, ABANDONED, bytes(16)), HEAD)
            one.close()
        if answers(store):
            raise
        raise WeightSyncFailed(f"{chain.sender} was lost while making links", chain.sender) from error
    return upstream, downstream[0] if downstream else None
