"""The protocol of weight sync: transfer into staging, then commit.

    trainer (sender.Sender)                                   engine (receiver.Receiver)
    offers = sender.offer(version, tensors, weights, names, beat)
         -- offer (HTTP) ---------------------------------->  staged = receiver.receive(offer, beat)
    sender.send(beat)  ================== weights =========>  ... into its staging area
         <--------------------------------- staged.receipt --  verified, not in force
    require_agreement(sender.sent(beat), receipts, names)
         -- commit (HTTP) --------------------------------->  load(receiver.commit(version).tensors())
         <------------------------------- applied version --

Until the commit the old version is in force everywhere: a sender or an engine that dies earlier, and a bucket that
arrives damaged, cost a sync and nothing else. ``session.synchronize`` is this exchange over any control channel.

A way of the weights is a pair of :class:`Outgoing` and :class:`Incoming`, in files of its own. Over the network several
ranks of a trainer may send, each its share of the buckets (``sender_group``); the first of them drives the exchange.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from rlhf_core.errors import WeightSyncFailed
from rlhf_core.schemas.weight_sync import AppliedVersion, Manifest, Offer, Receipt, SentVersion
from rlhf_core.weight_sync.layout import Share

Beat = Callable[[], None]
"""Called after every bucket, so that a process that works is not taken for one that hangs."""
Weights = Iterable[tuple[str, Tensor]]
"""Names and tensors in the order of a manifest, without aliases. On any device, of any strides; each is read before the
next one is asked for."""


class Outgoing(Protocol):
    """The trainer's half of a way. One version at a time."""

    @property
    def name(self) -> str:
        """Name of this process, for messages."""

    def offer(self, manifest: Manifest, receivers: Sequence[str], share: Share) -> Offer:
        """Announce a share of a version.

        Returns:
            Offer to the first receiver, with the chain of this sender alone.

        Raises:
            ValueError: the way has one sender alone, and the share is not the whole.
        """

    def send(self, manifest: Manifest, weights: Weights, beat: Beat) -> list[bytes]:
        """Send the share that was offered last, while the weights are gathered.

        Returns:
            Checksums of its buckets.

        Raises:
            WeightSyncFailed: an engine is lost or silent, or the weights are not what was offered.
        """

    def cancel(self) -> None:
        """Have :meth:`send` fail soon. From another thread, when an engine is known to be lost."""

    def reset(self) -> None:
        """Rely on nothing that an engine has kept of an earlier version: one has failed, or other engines or senders
        take part."""

    def close(self) -> None:
        """Give back what it holds."""


class Incoming(Protocol):
    """An engine's half of a way."""

    def connect(self, offer: Offer) -> None:
        """Reach the processes that a version comes from and goes on to. Nothing is written to a row yet.

        Raises:
            WeightSyncFailed: one has not come.
        """

    def fill(self, offer: Offer, row: Tensor, beat: Beat) -> list[bytes]:
        """Fill ``row`` (bytes ``[total_bytes]`` in main memory) with the buckets of a version, once connected.

        Returns:
            Checksums of all buckets, each as found in ``row`` and equal to the sender's.

        Raises:
            WeightSyncFailed: a bucket has not come, or is damaged. The row may be written to even afterwards.
        """

    def close(self) -> None:
        """Give back what it holds."""


class StagedVersion(Protocol):
    """A version in an engine's staging area, verified."""

    @property
    def receipt(self) -> Receipt:
        """Answer to the offer."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """Names of tied tensors, with the name that each is tied to."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and whole tensors in main memory, aliases left out.

        They are views of the staging area: valid until the next version is received, and not to be written to.
        """


class EngineControl(Protocol):
    """Control channel to one engine, as :func:`rlhf_core.weight_sync.session.synchronize` uses it: HTTP in a run.

    Each call blocks until the engine has answered, and raises ``WeightSyncFailed`` as the engine has raised it, or
    ``OSError`` (``TimeoutError`` is one) where the engine is gone or does not answer.
    """

    @property
    def name(self) -> str:
        """Name of the engine."""

    def receive(self, offer: Offer) -> Receipt:
        """Have the engine receive."""

    def is_ready(self, version: int) -> bool:
        """True if the engine lives and has this version staged."""

    def commit(self, version: int) -> AppliedVersion:
        """Have the engine load what it has staged."""

    def abort(self, version: int) -> None:
        """Have the engine drop what it has staged."""


def require_agreement(sent: SentVersion, receipts: Sequence[Receipt], receivers: Sequence[str]) -> None:
    """Refuse a commit unless every receiver has staged what was sent.

    Raises:
        WeightSyncFailed: a receipt is missing, or is of another version or other weights. ``peer`` names the engine.
    """
    by_name = {receipt.receiver: receipt for receipt in receipts}
    for name in receivers:
        receipt = by_name.get(name)
        if receipt is None:
            raise WeightSyncFailed(f"{name} did not send a receipt for version {sent.version}", name)
        if (receipt.version, receipt.digest) != (sent.version, sent.digest):
            raise WeightSyncFailed(
                f"{name} has staged version {receipt.version} with digest {receipt.digest}, expected version "
                f"{sent.version} with digest {sent.digest}; send the whole weights again",
                name,
            )
