"""The trainer's side of weight sync, for a single sender or the first of several."""

import time
from collections.abc import Collection, Iterator, Sequence

from torch import Tensor

from rlhf_core.errors import WeightSyncFailed
from rlhf_core.schemas.weight_sync import Announcement, Manifest, Offer, SentShare, SentVersion, TensorEntry
from rlhf_core.weight_sync.base import Beat, Outgoing, Weights
from rlhf_core.weight_sync.delta import DeltaEncoder
from rlhf_core.weight_sync.layout import bucket_bytes_for, digest_of, merged
from rlhf_core.weight_sync.sender_group import SenderGroup


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
        self._group = self._all
        self._offered: tuple[Manifest, Iterator[tuple[str, Tensor]]] | None = None
        self._manifest: Manifest | None = None
        self._shares: list[SentShare] = []
        self._taking_part: tuple[Sequence[str], Sequence[str]] | None = None
        self._is_settled = True

    @property
    def names(self) -> Sequence[str]:
        """Names of the senders of the last offered version; this one is the first."""
        return self._group.names

    def offer(
        self,
        version: int,
        tensors: Sequence[TensorEntry],
        weights: Weights,
        receivers: Sequence[str],
        beat: Beat,
        *,
        is_alone: bool = False,
    ) -> list[Offer]:
        """Announce a version: one offer per receiver, in their order.

        Args:
            version: number of optimizer steps behind the weights.
            tensors: layout of ``weights`` (``layout.entries_of``).
            weights: iterated to the end even after a failure, because gathering may be collective: by :meth:`send`, or
                here if the layout of the transfer depends on them (a delta).
            receivers: names of the engines.
            is_alone: True for engines that have come back, while the other senders are busy: they take no part.

        Raises:
            WeightSyncFailed: another sender does not respond; ``peer`` is its name.
        """
        manifest = Manifest(
            version=version, tensors=tuple(tensors), bucket_bytes=self._bucket_bytes or bucket_bytes_for(tensors)
        )
        source = iter(weights)
        self._group = self._alone if is_alone else self._all
        taking_part = (tuple(receivers), self.names)
        is_new_session = not self._is_settled or taking_part != self._taking_part
        if is_new_session:
            self._outgoing.reset()
        self._is_settled, self._taking_part = False, taking_part
        try:
            if self._delta is not None:
                if is_alone:  # for an engine that has come back, without a base
                    self._delta.forget()
                manifest, source = self._delta.encode(manifest, source, receivers, beat)
            self._offered = manifest, source
            offer = self._outgoing.offer(manifest, receivers, self._group.share)
            announcement = Announcement(manifest=manifest, receivers=tuple(receivers), is_new_session=is_new_session)
            chains = (*offer.chains, *self._group.publish_version(announcement, beat))
            return offer.model_copy(update={"chains": chains}).for_all()
        except BaseException:
            self._group.cancel()
            go_through(source, beat)
            raise

    def send(self, beat: Beat) -> None:
        """Send this sender's share of the last offered version, while it is gathered.

        Raises:
            WeightSyncFailed: an engine is lost or does not respond, or the weights do not match the offer. Nothing has
                been committed. ``peer`` names the process that is to blame, unless that is one that has cancelled.
        """
        assert self._offered is not None, "offer before send"
        (manifest, source), self._offered = self._offered, None
        self._manifest, self._shares = manifest, []
        self._shares.append(send_share(self._outgoing, self._group, manifest, source, beat))

    def failures_of_others(self, beat: Beat) -> dict[str, Exception]:
        """Errors of the other senders by name. Call it once the engines have responded."""
        shares = self._group.shares(beat)
        self._shares += shares
        named = zip(self.names[1:], shares, strict=True)
        return {name: WeightSyncFailed(share.error, share.peer) for name, share in named if share.error}

    def sent(self) -> SentVersion:
        """Summary of the version, once all senders have sent it."""
        manifest = self._manifest
        assert manifest is not None, "send before sent"
        checksums = merged(manifest, [[bytes.fromhex(one) for one in share.checksums] for share in self._shares])
        return SentVersion(
            version=manifest.version,
            digest=manifest.result_digest or digest_of(manifest, checksums),
            bytes_sent=manifest.total_bytes,
            is_delta=manifest.is_delta,
            wire_s=max(share.wire_s for share in self._shares),
        )

    def settle(self, sent: SentVersion, engines: Collection[str]) -> None:
        """Record on which engines a version is active: a later delta is against it.

        Without this call, the next version treats the last one as failed, and relies on nothing that engines have kept.
        """
        self._is_settled = True
        if self._delta is not None:
            self._delta.settle(sent, engines)

    def reset(self) -> None:
        """Stop relying on what engines have kept: one was restarted."""
        self._is_settled = False

    def cancel(self) -> None:
        """Have :meth:`send` and the other senders fail soon. From another thread, when an engine is known to be
        lost."""
        self._group.cancel()

    def close(self) -> None:
        """Release the sender's resources."""
        self._outgoing.close()


def send_share(
    outgoing: Outgoing, group: SenderGroup, manifest: Manifest, source: Iterator[tuple[str, Tensor]], beat: Beat
) -> SentShare:
    """Send the share that was offered last, until another sender abandons the version. The weights are iterated to the
    end in any case.

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
        checksums = outgoing.send(manifest, source, beat_unless_cancelled)
    except BaseException as error:
        if isinstance(error, WeightSyncFailed) and not error.peer and not group.is_cancelled:
            error.peer = group.name
        group.cancel()
        go_through(source, beat)
        raise
    return SentShare(checksums=tuple(one.hex() for one in checksums), wire_s=time.perf_counter() - begin)


def go_through(source: Iterator[tuple[str, Tensor]], beat: Beat) -> None:
    """Iterate over the rest of the weights: in a collective gathering, the other ranks would wait for this one for
    ever."""
    for _ in source:
        beat()
