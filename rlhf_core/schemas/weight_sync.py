"""Messages of a weight sync: what the trainer offers, what an engine has staged, and what came into force.

The trainer sends them to the engines over their control channel (HTTP); the weights take another way, which the offer
names. All of them are JSON.
"""

import math
from enum import StrEnum
from itertools import accumulate
from typing import Annotated, Self

from pydantic import Field, model_validator

from rlhf_core.schemas.base import Int64, Label, Message, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Schema

ALIGNMENT = 64
"""Bytes that the offset of every tensor is a multiple of: a cache line, and the largest element."""
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
"""Bytes of one element, by torch's name of the type."""


class Transport(StrEnum):
    """Way of the weights from the trainer to the engines."""

    BROADCAST = "broadcast"
    """Over the network, each engine relaying to the next one."""
    SHARED_MEMORY = "shared_memory"
    """Through memory that the processes of one host share."""
    FILES = "files"
    """Through a file system that all see."""


class LinkBackend(StrEnum):
    """Library that carries buckets between two processes (broadcast)."""

    GLOO = "gloo"
    """From main memory to main memory."""
    NCCL = "nccl"
    """From GPU to GPU; on AMD this is RCCL."""


class TensorEntry(Schema):
    """One tensor of a version."""

    name: str
    dtype: str
    """Type of its elements as torch names it, without ``torch.``."""
    shape: tuple[Int64, ...]
    """Sizes of its dimensions; empty for a scalar."""
    alias_of: str = ""
    """Name of an earlier tensor that this one is tied to; it has no bytes of its own then."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"found the type {self.dtype!r}, expected one of {', '.join(DTYPE_BYTES)}")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"found the shape {self.shape}, expected sizes of 0 and more")
        return self

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements; 0 for an alias."""
        return 0 if self.alias_of else math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class Manifest(Schema):
    """Layout of a version: its tensors one after the other in one row of bytes, cut into buckets of equal size."""

    version: NonNegative
    """Optimizer steps that the weights have behind them."""
    tensors: tuple[TensorEntry, ...]
    """In the order in which they are sent. Names of a delta's parts end in ``#gaps`` and ``#values``."""
    bucket_bytes: Annotated[Positive, Field(multiple_of=ALIGNMENT)]
    """Bytes of every bucket but the last."""
    base_version: NonNegative | None = None
    """Version that a delta is applied to; None where the whole weights are sent."""
    base_digest: str = ""
    """Digest of the base, which the receiver's has to equal."""
    result_digest: str = ""
    """Digest of the whole weights after the delta was applied."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        seen: set[str] = set()
        for entry in self.tensors:
            if entry.name in seen:
                raise ValueError(f"found the tensor {entry.name} twice, expected every name once")
            if entry.alias_of and entry.alias_of not in seen:
                raise ValueError(f"found {entry.name} tied to {entry.alias_of}, expected the name of an earlier tensor")
            seen.add(entry.name)
        if self.base_version is not None and not (self.base_digest and self.result_digest):
            raise ValueError("found a delta without digests, expected those of its base and of its result")
        return self

    @property
    def offsets(self) -> tuple[int, ...]:
        """Byte at which each tensor begins."""
        sizes = (-(-entry.num_bytes // ALIGNMENT) * ALIGNMENT for entry in self.tensors)
        return tuple(accumulate(sizes, initial=0))[:-1]

    @property
    def total_bytes(self) -> int:
        """Bytes of the row, the gaps between its tensors included."""
        return sum(-(-entry.num_bytes // ALIGNMENT) * ALIGNMENT for entry in self.tensors)

    @property
    def num_buckets(self) -> int:
        """Buckets of the row; 0 for a version without bytes."""
        return -(-self.total_bytes // self.bucket_bytes)

    @property
    def is_delta(self) -> bool:
        """True if the changes since ``base_version`` are sent in place of the whole weights."""
        return self.base_version is not None


class Chain(Schema):
    """The way of one sender's share: from the sender to the first engine, and from each engine to the next one.

    A version has one chain per sender. Bucket ``i`` of it takes chain ``i mod n`` of ``n``.
    """

    sender: Label
    """Name of the sending process, for messages."""
    receivers: tuple[Label, ...]
    """Names of all engines, in the order of the chain."""
    session: str = ""
    """Key of the links among these processes (broadcast)."""
    is_new_session: bool = True
    """True if links are to be made; False if those of the version before serve again."""
    backend: LinkBackend = LinkBackend.GLOO
    """Kind of its links (broadcast)."""
    address: str = ""
    """Address of the store at which links are arranged (broadcast)."""
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
    """All that one engine needs to receive a version. Sent to every engine before the weights."""

    transport: Transport
    manifest: Manifest
    receiver: Label
    """Name of the engine that this offer is for."""
    chains: Annotated[tuple[Chain, ...], Field(min_length=1)]
    """Those of all senders; the first sender drives the sync."""
    path: Message = ""
    """File (shared memory) or folder (files) of the weights."""
    stall_timeout_s: PositiveFloat = 60.0
    """Longest wait for the next bucket before its sender is given up."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for chain in self.chains:
            if self.receiver not in chain.receivers:
                raise ValueError(f"found the chain {' - '.join(chain.receivers)}, expected one with {self.receiver}")
        return self

    def for_all(self) -> "list[Offer]":
        """The same offer to each engine, in the order of the first chain."""
        return [self.model_copy(update={"receiver": name}) for name in self.chains[0].receivers]

    @property
    def sender(self) -> str:
        """Name of the first sender."""
        return self.chains[0].sender


class Announcement(Schema):
    """The first sender's word to the others: the version that each is to send its share of."""

    manifest: Manifest
    receivers: tuple[Label, ...]
    """Names of all engines, in the order of the first chain."""
    is_new_session: bool
    """True if nothing may be relied on that engines have kept: one was restarted, or a version has failed."""


class SentShare(Schema):
    """A sender's account of its share, to the first sender."""

    checksums: tuple[str, ...] = ()
    """Those of its buckets in their order, as hexadecimal digits."""
    wire_s: NonNegativeFloat = 0.0
    """Seconds from the first bucket to the last one taken by the first engine of its chain."""
    error: Message = ""
    """Failure; empty where all was sent."""
    peer: Label = ""
    """Name of the process that the failure goes back to; empty where the sender was told to give up."""


class Receipt(Schema):
    """An engine's answer to an offer: it has the version in staging, verified, and can bring it into force."""

    receiver: Label
    version: NonNegative
    digest: str
    """Digest of what it has staged; of the whole weights after a delta."""
    bytes_received: Int64
    wire_s: NonNegativeFloat
    """Seconds from the first wait for a bucket to the last one verified."""


class SentVersion(Schema):
    """The senders' account of a version that they have sent."""

    version: NonNegative
    digest: str
    """Digest of the whole weights, which every receipt has to equal."""
    bytes_sent: Int64
    """Bytes that left the senders, once for chains of any length."""
    is_delta: bool
    wire_s: NonNegativeFloat
    """Seconds from the first bucket to the last one taken by the first engine of a chain; the slowest sender's."""


class AppliedVersion(Schema):
    """An engine's answer to a commit: the version is in force."""

    receiver: Label
    version: NonNegative
    apply_s: NonNegativeFloat
    """Seconds in which the engine took over the staged tensors."""


class WeightSyncReport(Schema):
    """Account of one sync over all engines."""

    sent: SentVersion
    receipts: tuple[Receipt, ...]
    applied: tuple[AppliedVersion, ...]
    """Answers of the engines that have the version in force."""
    lost: dict[str, Message] = Field(default_factory=dict)
    """Engines that did not confirm the commit, with the error: to be restarted and synced before they serve again."""

    @property
    def wire_s(self) -> float:
        """Seconds until the last engine had the version in staging."""
        return max([self.sent.wire_s, *(receipt.wire_s for receipt in self.receipts)])

    @property
    def apply_s(self) -> float:
        """Seconds in which the slowest engine took the version over."""
        return max((answer.apply_s for answer in self.applied), default=0.0)
