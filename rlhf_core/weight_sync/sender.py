"""The trainer's side of weight sync, for a single sender or the first of several."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from rlhf_core.schemas.weight_sync import Announcement, Manifest, TensorEntry
from rlhf_core.weight_sync.base import Beat, Outgoing, Weights
from rlhf_core.weight_sync.delta import DeltaEncoder
from rlhf_core.weight_sync.layout import bucket_bytes_for
from rlhf_core.weight_sync.sender_group import SenderGroup
from rlhf_core.weight_sync.transfer import Transfer, go_through


class Participants(NamedTuple):
    """Processes between which a version is sent."""

    senders: tuple[str, ...]
    """Names of the senders, the first one first."""
    receivers: tuple[str, ...]
    """Names of the engines."""


class Sender:
    """Sends versions of weights over one transport, one at a time.

    Every rank of the trainer gathers; one of them has this sender, some may have a :class:`FurtherSender`, and the
    others iterate over their weights in parallel.
    """

    def __init__(
        self,
        outgoing: Outgoing,
        *,
        bucket_bytes: int | None = None,
        delta: DeltaEncoder | None = None,
        group: SenderGroup | None = None,
    ) -> None:
        """Send nothing yet.

        Args:
            bucket_bytes: size of a bucket; by default one that suits the size of the version.
            delta: sends changes instead of whole weights if it can; for a single sender.
            group: all senders, of which this is the first; None for a single one.
        """
        self._outgoing, self._bucket_bytes, self._delta = outgoing, bucket_bytes, delta
        self._alone = SenderGroup.alone(outgoing.name)
        self._all = group or self._alone
        self._settled: Participants | None = None  # those of the last version, unless it failed

    def offer(
        self,
        version: int,
        tensors: Sequence[TensorEntry],
        weights: Weights,
        receivers: Sequence[str],
        beat: Beat,
        *,
        is_alone: bool = False,
    ) -> Transfer:
        """Announce a version, with one offer per receiver.

        Until it is settled, the next version takes it for failed, and relies on nothing that engines have kept.

        Args:
            version: number of optimizer steps behind the weights.
            tensors: layout of ``weights`` (``layout.entries_of``).
            weights: iterated to the end even after a failure, because gathering may be collective: by
                :meth:`Transfer.send`, or here if the layout of the transfer depends on them (a delta).
            receivers: names of the engines.
            is_alone: True for engines that have come back, while the other senders are busy: they take no part.

        Raises:
            WeightSyncFailed: another sender does not respond; ``peer`` is its name.
        """
        layout = Manifest(
            version=version, tensors=tuple(tensors), bucket_bytes=self._bucket_bytes or bucket_bytes_for(tensors)
        )
        group = self._alone if is_alone else self._all
        is_new_session = self._settled != Participants(group.names, tuple(receivers))
        self._settled = None
        if is_new_session:
            self._outgoing.reset()
        gathered = iter(weights)
        try:
            manifest, parts = layout, gathered
            if self._delta is not None:
                if is_alone:  # for an engine that has come back, without a base
                    self._delta.forget()
                manifest, parts = self._delta.encode(layout, gathered, receivers, beat)
            offer = self._outgoing.offer(manifest, receivers, group.share)
            announcement = Announcement(manifest=manifest, receivers=tuple(receivers), is_new_session=is_new_session)
            chains = (*offer.chains, *group.publish_version(announcement, beat))
            offers = offer.model_copy(update={"chains": chains}).for_all()
            return Transfer(offers, self._outgoing, group, parts, gathered)
        except BaseException:
            group.cancel()
            go_through(gathered, beat)
            raise

    def settle(self, transfer: Transfer, engines: Collection[str]) -> None:
        """Record on which engines a version is active: the next one reuses the links if these are all, and a later
        delta is against it."""
        receivers = tuple(offer.receiver for offer in transfer.offers)
        if set(receivers) <= set(engines):
            self._settled = Participants(transfer.senders, receivers)
        if self._delta is not None:
            self._delta.settle(transfer.sent, engines)

    def reset(self) -> None:
        """Stop relying on what engines have kept: one was restarted."""
        self._settled = None

    def close(self) -> None:
        """Release the sender's resources."""
        self._outgoing.close()
