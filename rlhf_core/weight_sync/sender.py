"""The trainer's side of weight sync: of a sender that is alone, or of the first of several."""

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
    """Sends versions of weights over one way, one at a time.

    Every rank of the trainer gathers; one of them has this sender, some may have a :class:`FurtherSender`, and the
    others go through their weights beside them.
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
            delta: sends changes in place of whole weights where it can; for a sender that is alone.
            group: all senders, of which this is the first; None for one that is alone.
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
        """Names of the senders of the version that was offered last; the first is this one."""
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
            version: number of optimizer steps that the weights have behind them.
            tensors: layout of ``weights`` (``layout.entries_of``).
            weights: gone through to the end whatever happens, because gathering may be collective: by :meth:`send`, or
                here where the layout of what is sent depends on them (a delta).
            receivers: names of the engines.
            is_alone: the other senders are busy with something else, and take no part.

        Raises:
            WeightSyncFailed: another sender does not answer; ``peer`` is its name.
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
                manifest, source = self._delta.encode(manifest, source, receivers, beat)
            self._offered = manifest, source
            offer = self._outgoing.offer(manifest, receivers, self._group.share)
            announcement = Announcement(manifest=manifest, receivers=tuple(receivers), is_new_session=is_new_session)
            chains = (*offer.chains, *self._group.tell_version(announcement, beat))
            return offer.model_copy(update={"chains": chains}).for_all()
        except BaseException:
            self._group.cancel()
            go_through(source, beat)
            raise

    def send(self, beat: Beat) -> None:
        """Send this sender's share of the version that was offered last, while it is gathered.

        Raises:
            WeightSyncFailed: an engine is lost or silent, or the weights are not what was offered. Nothing has come
                into force. ``peer`` names the process that is to blame, if it is not one that has cancelled.
        """
        assert self._offered is not None, "offer before send"
        (manifest, source), self._offered = self._offered, None
        self._manifest, self._shares = manifest, []
        self._shares.append(send_share(self._outgoing, self._group, manifest, source, beat))

    def failures_of_others(self, beat: Beat) -> dict[str, Exception]:
        """Errors of the other senders by name. To be asked for when the engines have answered."""
        shares = self._group.shares(beat)
        self._shares += shares
        named = zip(self.names[1:], shares, strict=True)
        return {name: WeightSyncFailed(share.error, share.peer) for name, share in named if share.error}

    def sent(self) -> SentVersion:
        """Account of the version, which all senders have sent."""
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

    def settle(self, sent: SentVersion, in_force: Collection[str]) -> None:
        """Take note of the engines that have a version in force: a later delta is against it.

        Without this call the next version takes the last one for failed, and relies on nothing that engines have kept.
        """
        self._is_settled = True
        if self._delta is not None:
            self._delta.settle(sent, in_force)

    def reset(self) -> None:
        """Rely on nothing that engines have kept: one was restarted."""
        self._is_settled = False

    def cancel(self) -> None:
        """Have :meth:`send` fail soon, and so the other senders. From another thread, when an engine is known to be
        lost."""
        self._group.cancel()
        self._outgoing.cancel()

    def close(self) -> None:
        """Give back what the sender holds."""
        self._outgoing.close()


def send_share(
    outgoing: Outgoing, group: SenderGroup, manifest: Manifest, source: Iterator[tuple[str, Tensor]], beat: Beat
) -> SentShare:
    """Send the share that was offered last, until another sender gives the version up; the weights are gone through to
    the end.

    Raises:
        WeightSyncFailed: as :meth:`Outgoing.send`, all senders told to give up. ``peer`` is the name of this sender
            where the failure is its own, and empty where it was told to give up.
    """
    begin = time.perf_counter()
    try:
        with group.watched(outgoing.cancel):
            checksums = outgoing.send(manifest, source, beat)
    except BaseException as error:
        if isinstance(error, WeightSyncFailed) and not error.peer and not group.is_cancelled:
            error.peer = group.name
        group.cancel()
        go_through(source, beat)
        raise
    return SentShare(checksums=tuple(one.hex() for one in checksums), wire_s=time.perf_counter() - begin)


def go_through(source: Iterator[tuple[str, Tensor]], beat: Beat) -> None:
    """Take part in the rest of a gathering: the other ranks would wait for this one for ever."""
    for _ in source:
        beat()
