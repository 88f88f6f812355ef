"""Broadcast along a chain: the trainer sends each bucket to the first engine, and each engine relays it to the next.

Where every process has a link of its own, ``n`` engines take the time of one engine and of ``n - 1`` buckets: while an
engine receives a bucket, it relays the one before. A tree has fewer hops, but its inner nodes send every byte twice
over the same link.

Before each bucket goes its head: version, index, checksum. Buckets arrive in staging where they stay, so that relaying
copies nothing.
"""

import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_core.errors import WeightSyncFailed
from rlhf_core.schemas.weight_sync import Manifest, Offer, Transport
from rlhf_core.weight_sync.base import Beat, Weights
from rlhf_core.weight_sync.layout import buckets_of, bytes_of, checksum, packed
from rlhf_core.weight_sync.links import CONNECT_TIMEOUT_S, Link, Pending, answers, listen, own_address, reach

BUFFERS = 8
"""Buckets in the sender's memory: one is packed while the others are on the wire. More than two, so that the wire stays
full while another process has the processor."""
AHEAD = 8
"""Buckets that an engine is ready to receive before they are sent, so that none waits for a round trip."""
POLL_INTERVAL_S = 0.002
ABANDONED = -1
"""Index in the head that follows when a version is given up; no bucket follows it."""

_HEAD_BYTES = 32


class BroadcastOutgoing:
    """The head of the chain, in the trainer."""

    def __init__(self, name: str, address: str, *, stall_timeout_s: float = 60.0, pinned: bool = False) -> None:
        """Listen on a free port.

        Args:
            name: name of this process, for messages.
            address: own address, at which the engines reach this process.
            stall_timeout_s: longest wait for the next bucket, here and in the engines.
            pinned: weights lie on a GPU.
        """
        self._name, self._timeout_s, self._pinned = name, stall_timeout_s, pinned
        # As a number: the store and gloo would each resolve a name in a way of their own.
        self._address = str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
        self._store = listen(self._address)
        self._session = ""
        self._receivers: tuple[str, ...] = ()
        self._link: Link | None = None
        self._buffers: list[_Buffer] = []
        self._cancelled = threading.Event()

    def offer(self, manifest: Manifest, receivers: Sequence[str]) -> list[Offer]:
        """Announce a version; see :class:`rlhf_core.weight_sync.base.Outgoing`."""
        if not receivers:
            raise ValueError("found no receivers, expected at least one")
        if self._link is None or tuple(receivers) != self._receivers:
            self._session, self._link, self._receivers = uuid.uuid4().hex, None, tuple(receivers)
        self._cancelled.clear()
        return Offer(
            transport=Transport.BROADCAST,
            manifest=manifest,
            sender=self._name,
            receivers=self._receivers,
            place=0,
            session=self._session,
            is_new_session=self._link is None,
            address=self._address,
            port=self._store.port,
            stall_timeout_s=self._timeout_s,
        ).for_all()

    def send(self, manifest: Manifest, weights: Weights, beat: Beat) -> list[bytes]:
        """Send a version; see :class:`rlhf_core.weight_sync.base.Outgoing`."""
        if self._link is None:
            self._link = Link(
                self._store,
                f"{self._session}/0",
                is_source=True,
                address=self._address,
                peer=self._receivers[0],
                stall_timeout_s=self._timeout_s,
            )
            self._await_chain(beat)
        self._reserve(min(manifest.bucket_bytes, manifest.total_bytes))
        try:
            return self._send_over(self._link, manifest, weights, beat)
        except BaseException:
            self._abandon(manifest)
            raise

    def _await_chain(self, beat: Beat) -> None:
        """Wait until every engine has its links, so that a loss from now on is seen as a closed connection."""
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        for place, name in enumerate(self._receivers):
            while not self._store.check([_linked(self._session, place)]):
                if self._cancelled.is_set() or time.monotonic() > deadline:
                    self._link = None
                    reason = "an engine has failed" if self._cancelled.is_set() else f"{name} has made no links"
                    raise WeightSyncFailed(f"sending was given up: {reason}", "" if self._cancelled.is_set() else name)
                beat()
                time.sleep(POLL_INTERVAL_S)

    def _send_over(self, link: Link, manifest: Manifest, weights: Weights, beat: Beat) -> list[bytes]:
        found = []
        for index, bucket in packed(manifest, weights, self._take):
            found.append(checksum(bucket))
            self._buffers[index % BUFFERS].send(link, bucket, head(manifest.version, index, found[-1]))
            beat()
        for buffer in self._buffers:
            buffer.wait()
        return found

    def _take(self, index: int) -> Tensor:
        if self._cancelled.is_set():
            raise WeightSyncFailed("sending was cancelled: an engine has failed")
        buffer = self._buffers[index % BUFFERS]
        buffer.wait()
        return buffer.memory

    def _reserve(self, size: int) -> None:
        if not self._buffers or len(self._buffers[0].memory) < size:
            self._buffers = [_Buffer(size, self._pinned) for _ in range(BUFFERS)]

    def _abandon(self, manifest: Manifest) -> None:
        """Tell the engines, where that is possible, and have new links for the next version."""
        link, self._link = self._link, None
        self._buffers = []  # gloo may still read them
        if link is not None:
            link.post(head(manifest.version, ABANDONED, bytes(16)), 0)

    def cancel(self) -> None:
        """Have :meth:`send` fail at its next bucket."""
        self._cancelled.set()

    def reset(self) -> None:
        """Make new links for the next version."""
        self._link = None

    def close(self) -> None:
        """Let go of link and memory."""
        self._link, self._buffers = None, []


class _Buffer:
    """Memory of one bucket, and the messages that it is being sent with."""

    def __init__(self, size: int, pinned: bool) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self._pending: list[tuple[Pending, Tensor]] = []

    def send(self, link: Link, bucket: Tensor, head_bytes: Tensor) -> None:
        """Begin to send the bucket behind its head."""
        self._pending = [(link.send(head_bytes, 0), head_bytes), (link.send(bucket, 1), bucket)]

    def wait(self) -> None:
        """Wait until the memory may be filled again."""
        for pending, _ in self._pending:
            pending.wait()
        self._pending = []


class BroadcastIncoming:
    """A link of the chain, in an engine: receives from the one before it and relays to the one behind it."""

    def __init__(self) -> None:
        self._session = ""
        self._links: tuple[Link, Link | None] | None = None

    def fill(self, offer: Offer, row: Tensor, beat: Beat) -> list[bytes]:
        """Receive a version; see :class:`rlhf_core.weight_sync.base.Incoming`.

        An engine whose successor is lost, or that finds a bucket damaged, goes on to the end before it fails: stopping
        would look to its predecessor like a loss of its own.
        """
        links, self._links = self._links, None  # used again only after a version that has come as a whole
        if offer.is_new_session:
            links = _connect(offer)
        elif links is None or offer.session != self._session:
            raise WeightSyncFailed(
                f"{offer.receiver} has no links of this session; reset the sender when an engine was restarted",
                offer.receiver,
            )
        self._session = offer.session
        passage = _Passage(offer, row, *links)
        checksums = passage.run(beat)
        self._links = links
        return checksums

    def close(self) -> None:
        """Let go of the links."""
        self._links = None


class _Passage:
    """One version on its way through an engine."""

    def __init__(self, offer: Offer, row: Tensor, upstream: Link, downstream: Link | None) -> None:
        self._manifest = offer.manifest
        self._before = before(offer)
        self._upstream, self._downstream = upstream, downstream
        self._buckets = list(buckets_of(offer.manifest, row))
        self._expected: deque[tuple[Tensor, Pending, Pending]] = deque()
        self._relayed: deque[Pending] = deque()
        self._kept: list[Tensor] = []
        self._failure: WeightSyncFailed | None = None

    def run(self, beat: Beat) -> list[bytes]:
        """Receive and relay every bucket; its checksums."""
        found = []
        for bucket in self._buckets[:AHEAD]:
            self._expect(bucket)
        for index, bucket in enumerate(self._buckets):
            try:
                announced = self._receive(index)
            except WeightSyncFailed as error:
                self._relay_end()
                raise self._failure or error from error
            self._relay(bucket, announced)
            if index + AHEAD < len(self._buckets):
                self._expect(self._buckets[index + AHEAD])
            found.append(checksum(bucket))
            self._verify(index, announced, found[-1])
            beat()
        self._settle(0)
        if self._failure is not None:
            raise self._failure
        return found

    def _expect(self, bucket: Tensor) -> None:
        announced = torch.empty(_HEAD_BYTES, dtype=torch.uint8)
        self._expected.append((announced, self._upstream.receive(announced, 0), self._upstream.receive(bucket, 1)))

    def _receive(self, index: int) -> Tensor:
        announced, announcement, transfer = self._expected.popleft()
        announcement.wait()
        version, found = announced[:16].view(torch.int64).tolist()
        if found == ABANDONED:
            raise WeightSyncFailed(f"{self._before} has given version {self._manifest.version} up", self._before)
        if (version, found) != (self._manifest.version, index):
            raise WeightSyncFailed(
                f"{self._before} has sent bucket {found} of version {version}, expected bucket {index} of version "
                f"{self._manifest.version}",
                self._before,
            )
        transfer.wait()
        return announced

    def _relay(self, bucket: Tensor, announced: Tensor) -> None:
        if self._downstream is None:
            return
        try:
            self._relayed.extend([self._downstream.send(announced, 0), self._downstream.send(bucket, 1)])
            self._kept.append(announced)
            self._settle(2 * AHEAD)
        except WeightSyncFailed as error:
            self._lose_downstream(error)

    def _settle(self, most: int) -> None:
        """Wait until at most so many messages are under way to the successor."""
        try:
            while len(self._relayed) > most:
                self._relayed.popleft().wait()
        except WeightSyncFailed as error:
            self._lose_downstream(error)

    def _lose_downstream(self, error: WeightSyncFailed) -> None:
        self._failure = self._failure or error
        self._downstream = None
        self._relayed.clear()

    def _relay_end(self) -> None:
        if self._downstream is not None:
            self._downstream.post(head(self._manifest.version, ABANDONED, bytes(16)), 0)

    def _verify(self, index: int, announced: Tensor, found: bytes) -> None:
        if bytes(announced[16:].tolist()) != found and self._failure is None:
            self._failure = WeightSyncFailed(
                f"bucket {index} of version {self._manifest.version} was damaged on its way from {self._before}; "
                "send the version again, and look at that link when it happens again",
                self._before,
            )


def head(version: int, index: int, bucket_checksum: bytes) -> Tensor:
    """Head of a bucket, bytes ``[32]``: version and index as int64, and the checksum."""
    numbers = torch.tensor([version, index], dtype=torch.int64)
    return torch.cat([bytes_of(numbers), torch.frombuffer(bytearray(bucket_checksum), dtype=torch.uint8)])


def before(offer: Offer) -> str:
    """Name of the process that this engine receives from."""
    return offer.receivers[offer.place - 1] if offer.place else offer.sender


def _connect(offer: Offer) -> tuple[Link, Link | None]:
    """Links of an engine to the one before it and to the one behind it, if there is one."""
    store = reach(offer.address, offer.port, offer.sender)
    own = own_address(offer.address)

    def link(place: int, is_source: bool, peer: str) -> Link:
        return Link(
            store,
            f"{offer.session}/{place}",
            is_source=is_source,
            address=own,
            peer=peer,
            stall_timeout_s=offer.stall_timeout_s,
        )

    is_last = offer.place + 1 == len(offer.receivers)
    try:
        upstream = link(offer.place, False, before(offer))
        downstream = None if is_last else link(offer.place + 1, True, offer.receivers[offer.place + 1])
        store.set(_linked(offer.session, offer.place), "")
    except (WeightSyncFailed, RuntimeError) as error:
        if answers(store):
            raise
        raise WeightSyncFailed(f"{offer.sender} was lost while links were made", offer.sender) from error
    return upstream, downstream


def _linked(session: str, place: int) -> str:
    return f"{session}/linked/{place}"
