"""Weight sync: offers of the trainer, receipts of the engines, and the ledger.

The trainer sends its messages to the engines as JSON over their control channel (HTTP); the weights take the transport
in the offer.
"""

import math
from enum import StrEnum
from itertools import accumulate
from typing import Annotated, Self

from pydantic import Field, model_validator

from rlhf_core.schemas.base import (
    Finite,
    Int64,
    Label,
    Message,
    Moment,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Schema,
)

ALIGNMENT = 64
"""Alignment of tensor offsets in bytes: a cache line, and at least the largest element."""
DTYPE_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Size of an element in bytes, by torch's name of the type."""


class Transport(StrEnum):
    """Transport of the weights from the trainer to the engines."""

    BROADCAST = "broadcast"
    """Over the network, relayed from each engine to the next."""
    SHARED_MEMORY = "shared_memory"
    """Through shared memory of the processes of one host."""
    FILES = "files"
    """Through a shared file system."""


class LinkBackend(StrEnum):
    """Library for the transfer of buckets between two processes (broadcast)."""

    GLOO = "gloo"
    """From main memory to main memory."""
    NCCL = "nccl"
    """From GPU to GPU; on AMD this is RCCL."""


class TensorEntry(Schema):
    """One tensor of a version."""

    name: str
    dtype: str
    """Torch's name of its element type, without ``torch.``."""
    shape: tuple[Int64, ...]
    """Sizes of its dimensions; empty for a scalar."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"found the type {self.dtype!r}, expected one of {', '.join(DTYPE_BYTES)}")
        return self

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class Manifest(Schema):
    """Layout of a version: its tensors in one sequence of bytes, divided into buckets of equal size."""

    version: NonNegative
    """Number of optimizer steps of the weights."""
    tensors: tuple[TensorEntry, ...]
    """Tensors in the order of sending, tied ones once. Names of a delta's parts end in ``#gaps`` and ``#values``."""
    bucket_bytes: Annotated[Positive, Field(multiple_of=ALIGNMENT)]
    """Bytes of every bucket except the last."""
    base_version: NonNegative | None = None
    """Version that a delta is applied to; None for whole weights."""
    base_digest: str = ""
    """Digest of the base, which must equal the receiver's."""
    result_digest: str = ""
    """Digest of the whole weights after the delta."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of each tensor."""
        sizes = (-(-entry.num_bytes // ALIGNMENT) * ALIGNMENT for entry in self.tensors)
        return tuple(accumulate(sizes, initial=0))[:-1]

    @property
    def total_bytes(self) -> int:
        """Bytes of the sequence, including gaps between tensors."""
        return sum(-(-entry.num_bytes // ALIGNMENT) * ALIGNMENT for entry in self.tensors)

    @property
    def num_buckets(self) -> int:
        """Number of buckets; 0 for a version without bytes."""
        return -(-self.total_bytes // self.bucket_bytes)

    @property
    def is_delta(self) -> bool:
        """True if changes since ``base_version`` are sent instead of the whole weights."""
        return self.base_version is not None


class Chain(Schema):
    """Path of one sender's share: from the sender to the first engine, and from each engine to the next.

    A version has one chain per sender. Bucket ``i`` takes chain ``i mod n`` of ``n``.
    """

    sender: Label
    """Name of the sending process, for messages."""
    receivers: tuple[Label, ...]
    """Names of all engines, in the order of the chain."""
    session: str = ""
    """Key of the links between these processes (broadcast)."""
    is_new_session: bool = True
    """True to create links; False to reuse those of the previous version."""
    backend: LinkBackend = LinkBackend.GLOO
    """Kind of its links (broadcast)."""
    address: str = ""
    """Address of the rendezvous store of the links (broadcast)."""
    port: NonNegative = 0
    """Port of that store (broadcast)."""

    def before(self, receiver: str) -> str:
        """Name of the process that an engine receives from."""
        place = self.receivers.index(receiver)
        return self.receivers[place - 1] if place else self.sender

    def after(self, receiver: str) -> str | None:
        """Name of the engine that an engine relays to; None for the last one."""
        place = self.receivers.index(receiver) + 1
        return self.receivers[place] if place < len(self.receivers) else None


class Offer(Schema):
    """Offer of a version to one engine. Sent to every engine before the weights."""

    transport: Transport
    manifest: Manifest
    receiver: Label
    """Name of the engine of this offer."""
    chains: Annotated[tuple[Chain, ...], Field(min_length=1)]
    """Chains of all senders; the first sender drives the sync."""
    path: Message = ""
    """File (shared memory) or folder (files) of the weights."""
    stall_timeout_s: PositiveFloat = 60.0
    """Longest wait for the next bucket before its sender counts as failed."""

    def for_all(self) -> "list[Offer]":
        """Copies of the offer for all engines, in the order of the first chain."""
        return [self.model_copy(update={"receiver": name}) for name in self.chains[0].receivers]

    @property
    def sender(self) -> str:
        """Name of the first sender."""
        return self.chains[0].sender


class Announcement(Schema):
    """Message of the first sender to the others: the version to send."""

    manifest: Manifest
    receivers: tuple[Label, ...]
    """Names of all engines, in the order of the first chain."""
    is_new_session: bool
    """True if the state of engines must not be reused, because one was restarted or a version has failed."""


class SentShare(Schema):
    """Report of a sender on its share, to the first sender."""

    checksums: tuple[str, ...] = ()
    """Checksums of its buckets, in order, in hexadecimal digits."""
    wire_s: NonNegativeFloat = 0.0
    """Seconds from the first bucket to the last one taken by the first engine of its chain."""
    error: Message = ""
    """Failure; empty if everything was sent."""
    peer: Label = ""
    """Process that caused the failure; empty if the sender was told to abort."""


class Receipt(Schema):
    """Answer of an engine to an offer: the version is staged and verified, and can be applied."""

    version: NonNegative
    digest: str
    """Digest of the staged version; of the whole weights after a delta."""
    wire_s: NonNegativeFloat
    """Seconds from the first wait for a bucket to the last one verified."""


class SentVersion(Schema):
    """Report of the senders on a sent version."""

    version: NonNegative
    digest: str
    """Digest of the whole weights, which every receipt must equal."""
    bytes_sent: Int64
    """Bytes sent by the senders, counted once for chains of any length."""
    is_delta: bool
    wire_s: NonNegativeFloat
    """Seconds from the first bucket to the last one taken by the first engine of a chain; the slowest sender's."""


class WeightSyncReport(Schema):
    """Report on one sync over all engines."""

    sent: SentVersion
    receipts: tuple[Receipt, ...]
    applied: dict[str, NonNegativeFloat]
    """Seconds in which each engine has loaded the version, by its name."""
    lost: dict[str, Message] = Field(default_factory=dict)
    """Engines that did not confirm the commit, with the error; they must be restarted and synced before they serve
    again."""

    @property
    def wire_s(self) -> float:
        """Seconds until the last engine had staged the version."""
        return max([self.sent.wire_s, *(receipt.wire_s for receipt in self.receipts)])

    @property
    def apply_s(self) -> float:
        """Seconds of the slowest engine to load the version."""
        return max(self.applied.values(), default=0.0)


class WeightSyncLine(Schema):
    """One line of ``weight-syncs.jsonl``: the sync of a version of the weights to the rollout engines.

    Each sync has two lines with the same number: one before anything is sent, one with the engines' acknowledgements.
    The last one counts. A sync that was killed in between has only the first, without acknowledgements.
    """

    number: NonNegative
    """Number of the sync in this start of the workers, from 0."""
    time: Moment
    """Time of the line (UTC)."""
    version: NonNegative
    """Number of optimizer steps of the weights."""
    engines: NonNegative
    """Engines to update."""
    acknowledged: NonNegative = 0
    """Engines that have applied it."""
    transport: Label = ""
    """Transport, for instance ``in_process``; empty before the acknowledgements."""
    bytes: Annotated[Int64, Field(ge=0)] = 0
    """Bytes sent, over all senders."""
    seconds: Finite | None = None
    """Time from the request to the last acknowledgement, on the slowest rank; null before the acknowledgements."""
    wire_s: Finite = 0.0
    """Part of it on the wire; 0 if the weights stay in the process."""
    apply_s: Finite = 0.0
    """Part of it in which engines loaded the weights. The two overlap if buckets are sent ahead."""

    @property
    def gb_per_s(self) -> float | None:
        """Bytes over all seconds, in GB/s; None before the acknowledgements."""
        return self.bytes / 1e9 / self.seconds if self.seconds else None
