"""The trainer's side of weight sync: the first sender, which may be the only one, and the others."""

import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from rlhf_core.errors import WeightSyncFailed
from rlhf_core.schemas.weight_sync import Announcement, Manifest, Offer, SentShare, SentVersion, TensorEntry
from rlhf_core.survival import Survived
from rlhf_core.weight_sync.base import Beat, Outgoing, Weights
from rlhf_core.weight_sync.delta import DeltaEncoder
from rlhf_core.weight_sync.layout import bucket_bytes_for, digest_of, merged
from rlhf_core.weight_sync.sender_group import SenderGroup


@dataclass(eq=False)
class Transfer:
    """A version that :meth:`Sender.offer` has offered: sent once, and committed by all engines or by none."""

    offers: Sequence[Offer]
    """One per engine, in their order."""
    _outgoing: Outgoing
    _group: SenderGroup
    """The senders that take part; this one is the first."""
    _weights: Iterator[tuple[str, Tensor]]
    """The weights to send, or the parts of a delta."""
    _gathered: Iterator[tuple[str, Tensor]]
    """The weights that ``_weights`` are made from, while they are gathered."""
    _shares: list[SentShare] = field(default_factory=list, init=False)

    @property
    def manifest(self) -> Manifest:
        """Layout of what is sent."""
        return self.offers[0].manifest

    @property
    def senders(self) -> tuple[str, ...]:
        """Names of the senders; this one is the first."""
        return self._group.names

    def send(self, beat: Beat) -> None:
        """Send this sender's share, while it is gathered.

        Raises:
            WeightSyncFailed: an engine is lost or does not respond, or the weights do not match the offer. Nothing has
                been committed. ``peer`` names the process that is to blame, unless that is one that has cancelled.
        """
        try:
            self._shares = [_send_share(self._outgoing, self._group, self.manifest, self._weights, beat)]
        finally:
            _go_through(self._gathered, beat)

    def failures_of_others(self, beat: Beat) -> dict[str, Exception]:
        """Errors of the other senders by name. Call it once the engines have responded."""
        shares = self._group.shares(beat)
        self._shares += shares
        named = zip(self.senders[1:], shares, strict=True)
        return {name: WeightSyncFailed(share.error, share.peer) for name, share in named if share.error}

    @cached_property
    def sent(self) -> SentVersion:
        """Summary of the version, once all senders have sent it."""
        manifest = self.manifest
        checksums = merged(manifest, [[bytes.fromhex(one) for one in share.checksums] for share in self._shares])
        return SentVersion(
            version=manifest.version,
            digest=manifest.result_digest or digest_of(manifest, checksums),
            bytes_sent=manifest.total_bytes,
            is_delta=manifest.is_delta,
            wire_s=max(share.wire_s for share in self._shares),
        )

    def cancel(self) -> None:
        """Have :meth:`send` and the other senders fail soon. From another thread, when an engine is known to be
        lost."""
        self._group.cancel()


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
        # Names of the senders and engines of the last version, unless it failed.
        self._settled: tuple[tuple[str, ...], tuple[str, ...]] | None = None

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
        is_new_session = self._settled != (group.names, tuple(receivers))
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
            _go_through(gathered, beat)
            raise

    def settle(self, transfer: Transfer, engines: Collection[str]) -> None:
        """Record on which engines a version is active: the next one reuses the links if these are all, and a later
        delta is against it."""
        receivers = tuple(offer.receiver for offer in transfer.offers)
        if set(receivers) <= set(engines):
            self._settled = transfer.senders, receivers
        if self._delta is not None:
            self._delta.settle(transfer.sent, engines)

    def reset(self) -> None:
        """Stop relying on what engines have kept: one was restarted."""
        self._settled = None

    def close(self) -> None:
        """Release the sender's resources."""
        self._outgoing.close()


class FurtherSender:
    """Sends its share of every version that the first sender announces."""

    def __init__(self, outgoing: Outgoing, group: SenderGroup) -> None:
        """Args:
        group: all senders; this one is not the first.
        """
        self._outgoing, self._group = outgoing, group

    def send(self, weights: Weights, beat: Beat) -> None:
        """Send this sender's share of the next version, and report the outcome to the first sender.

        A failure of its own is not raised: the first sender decides, and notifies the engines.

        Args:
            weights: all of them, iterated to the end even after a failure, because gathering may be collective.

        Raises:
            WeightSyncFailed: the first sender is gone.
        """
        source = iter(weights)
        with Survived() as failed:  # reported to the first sender
            share = self._send(source, beat)
        if failed.error is not None:
            self._group.cancel()
            _go_through(source, beat)
            share = self._failed(failed)
        self._group.report_share(share)

    def _send(self, source: Iterator[tuple[str, Tensor]], beat: Beat) -> SentShare:
        announced = self._group.await_version(beat)
        if announced.is_new_session:
            self._outgoing.reset()
        manifest, share = announced.manifest, self._group.share
        offer = self._outgoing.offer(manifest, rotated(announced.receivers, share.place), share)
        self._group.send_chain(offer.chains[0])
        return _send_share(self._outgoing, self._group, manifest, source, beat)

    def _failed(self, failed: Survived) -> SentShare:
        if isinstance(failed.error, WeightSyncFailed):
            return SentShare(error=str(failed.error), peer=failed.error.peer)
        sys.stderr.write(failed.trace)
        return SentShare(error=f"{self._group.name} failed: {failed.problem}", peer=self._group.name)

    def close(self) -> None:
        """Release the sender's resources."""
        self._outgoing.close()


def _send_share(outgoing: Outgoing, group: SenderGroup, manifest: Manifest, weights: Weights, beat: Beat) -> SentShare:
    """Send the share that was offered last, until another sender abandons the version.

    Raises:
        WeightSyncFailed: as in :meth:`Outgoing.send`, after all senders were told to stop. ``peer`` is the name of this
            sender if the failure is its own, and empty if it was told to stop.
    """

    def beat_unless_cancelled() -> None:
        if group.is_cancelled:
            raise WeightSyncFailed("sending was cancelled: an engine has failed")
        beat()

    begin = time.perf_counter()
    try:
        checksums = outgoing.send(manifest, weights, beat_unless_cancelled)
    except BaseException as error:
        if isinstance(error, WeightSyncFailed) and not error.peer and not group.is_cancelled:
            error.peer = group.name
        group.cancel()
        raise
    return SentShare(checksums=tuple(one.hex() for one in checksums), wire_s=time.perf_counter() - begin)


def _go_through(gathered: Iterator[tuple[str, Tensor]], beat: Beat) -> None:
    """Iterate over the rest of the weights: in a collective gathering, the other ranks would wait for this one for
    ever."""
    for _ in gathered:
        beat()


def rotated(receivers: Sequence[str], place: int) -> list[str]:
    """Engines in the order of a sender's chain: each chain begins with another engine, to spread the load evenly."""
    first = place % len(receivers)
    return [*receivers[first:], *receivers[:first]]
