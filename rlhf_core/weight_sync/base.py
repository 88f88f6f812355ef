"""The protocol of weight sync: transfer into staging, then commit.

    trainer (sender.Sender)                                   engine (receiver.Receiver)
    transfer = sender.offer(version, tensors, weights, names, beat)
         -- offer (HTTP) ---------------------------------->  staged = receiver.receive(offer, beat)
    transfer.send(beat)  ================ weights =========>  ... into its staging area
         <--------------------------------- staged.receipt --  verified, not active
    require_agreement(transfer.sent, receipts)
         -- commit (HTTP) --------------------------------->  load(receiver.commit(version).tensors())
         <---------------------------- seconds of loading --
    sender.settle(transfer, engines)

Until the commit, the old version stays active everywhere: the death of a sender or an engine before it, or a damaged
bucket, costs one sync and nothing else. ``session.synchronize`` is this exchange over any control channel.

A transport is a pair of :class:`Outgoing` and :class:`Incoming`, in files of its own. Over the network, several ranks
of a trainer may send, each its share of the buckets (``sender_group``); the first of them drives the exchange.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from torch import Tensor

from rlhf_core.schemas.weight_sync import Manifest, Offer, Receipt
from rlhf_core.weight_sync.layout import Share

Beat = Callable[[], None]
"""Called after every bucket, so that a busy process is not taken for a hung one. That of a sender raises
WeightSyncFailed once the version is given up."""
Weights = Iterable[tuple[str, Tensor]]
"""Names and tensors in the order of a manifest. On any device, with any strides; each is read before the next one is
requested."""


class Outgoing(Protocol):
    """The trainer's end of a transport. One version at a time."""

    @property
    def name(self) -> str:
        """Name of this process, for messages."""

    def offer(self, manifest: Manifest, receivers: Sequence[str], share: Share) -> Offer:
        """Announce a share of a version; over shared memory and files, the share is always the whole.

        Returns:
            Offer to the first receiver, with the chain of this sender alone.
        """

    def send(self, manifest: Manifest, weights: Weights, beat: Beat) -> list[bytes]:
        """Send the share that was offered last, while the weights are gathered.

        Returns:
            Checksums of its buckets.

        Raises:
            DiskFull: the transport is a file system without room for them.
            WeightSyncFailed: an engine is lost or does not respond, the weights do not match the offer, or ``beat``
                raised it. Engines are told, if they can be.
        """

    def reset(self) -> None:
        """Stop relying on what engines have kept of an earlier version: one has failed, or the engines or senders have
        changed."""

    def close(self) -> None:
        """Release its resources."""


class Incoming(Protocol):
    """An engine's end of a transport."""

    def connect(self, offer: Offer) -> None:
        """Connect to the processes that a version comes from and goes on to. Nothing is written to a row yet.

        Raises:
            WeightSyncFailed: one did not connect.
        """

    def fill(self, offer: Offer, row: Tensor, beat: Beat) -> list[bytes]:
        """Fill ``row`` (bytes ``[total_bytes]`` in main memory) with the buckets of a version, once connected.

        Returns:
            Checksums of all buckets, each computed from ``row`` and equal to the sender's.

        Raises:
            WeightSyncFailed: a bucket did not arrive, or is damaged. The row may still be written to afterwards.
        """


class EngineControl(Protocol):
    """Control channel to one engine, as :func:`rlhf_core.weight_sync.session.synchronize` uses it: HTTP in a run.

    Each call blocks until the engine has responded, and raises the engine's ``WeightSyncFailed``, or ``OSError``
    (``TimeoutError`` is one) if the engine is gone or does not respond.
    """

    @property
    def name(self) -> str:
        """Name of the engine."""

    def receive(self, offer: Offer) -> Receipt:
        """Have the engine receive a version."""

    def commit(self, version: int) -> float:
        """Have the engine load its staged version; returns the seconds that this took."""

    def abort(self, version: int) -> None:
        """Have the engine drop its staged version."""
