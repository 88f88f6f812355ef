"""The protocol of weight sync: transfer into staging, then commit.

    trainer                                         engine (each)
    offers = sender.offer(version, tensors, weights, receivers, beat)
         -- offer (HTTP) ------------------------->  receiver.receive(offer, beat)
    sent = sender.send(beat)  ======== weights ======>   ... into its staging area
         <------------------------------- receipt --  staged, verified, not in force
    require_agreement(sent, receipts)
         -- commit (HTTP) ------------------------>  load(receiver.commit(version).tensors())
         <------------------------------- applied --

Until the commit the old version is in force everywhere: a sender or an engine that dies earlier, and a bucket that
arrives damaged, cost a sync and nothing else. ``session.synchronize`` is this exchange over any control channel.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from rlhf_core.errors import WeightSyncFailed
from rlhf_core.schemas.weight_sync import AppliedVersion, Offer, Receipt, SentVersion, TensorEntry

Beat = Callable[[], None]
"""Called after every bucket, so that a process that works is not taken for one that hangs."""


class WeightSender(Protocol):
    """The trainer's side of one way. One version at a time."""

    def offer(
        self,
        version: int,
        tensors: Sequence[TensorEntry],
        weights: Iterable[tuple[str, Tensor]],
        receivers: Sequence[str],
        beat: Beat,
    ) -> list[Offer]:
        """Announce a version: one offer per receiver, in their order.

        Args:
            version: number of optimizer steps that the weights have behind them.
            tensors: layout of ``weights`` (``layout.entries_of``).
            weights: names and tensors in that order, without aliases. On any device, of any strides; each is read
                before the next one is asked for. Gone through to the end whatever happens, because gathering may be
                collective: by :meth:`send`, or here where the layout of what is sent depends on it (a delta).
            receivers: names of the engines.
        """

    def send(self, beat: Beat) -> SentVersion:
        """Send the version that was offered last, while it is gathered.

        Raises:
            WeightSyncFailed: an engine is lost or silent, or the weights are not what was offered. Nothing has come
                into force. ``peer`` names the engine.
        """

    def cancel(self) -> None:
        """Have :meth:`send` fail soon. From another thread, when an engine is known to be lost."""

    def close(self) -> None:
        """Give back what the sender holds."""


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

        Of a delta, the tensors with changes. They are views of the staging area: valid until the next version is
        received, and not to be written to.
        """


class WeightReceiver(Protocol):
    """The engine's side, of every way."""

    @property
    def version(self) -> int | None:
        """Version that was committed last; None before the first."""

    def receive(self, offer: Offer, beat: Beat) -> StagedVersion:
        """Take a version into staging; blocks until it is there and verified.

        Raises:
            WeightSyncFailed: it is not; nothing of it is kept. ``peer`` names the process that is to blame.
        """

    def commit(self, version: int) -> StagedVersion:
        """Take the staged version as the one in force; the caller now loads it.

        Raises:
            WeightSyncFailed: another version is staged, or none.
        """

    def abort(self, version: int) -> None:
        """Drop a staged version. Harmless where it is not staged."""

    def close(self) -> None:
        """Give back what the receiver holds."""


class EngineControl(Protocol):
    """Control channel to one engine, as :func:`rlhf_core.weight_sync.session.synchronize` uses it: HTTP in a run.

    Each call blocks until the engine has answered, and raises what it has raised, or ``OSError`` where it is gone.
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
            raise WeightSyncFailed(f"{name} has sent no receipt for version {sent.version}", name)
        if (receipt.version, receipt.digest) != (sent.version, sent.digest):
            raise WeightSyncFailed(
                f"{name} has staged version {receipt.version} with digest {receipt.digest}, expected version "
                f"{sent.version} with digest {sent.digest}; send the whole weights again",
                name,
            )
