"""One version on its way from the trainer to its engines."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from rlhf_core.errors import WeightSyncFailed
from rlhf_core.schemas.weight_sync import Manifest, Offer, SentShare, SentVersion
from rlhf_core.weight_sync.base import Beat, Outgoing, Weights
from rlhf_core.weight_sync.layout import digest_of, merged
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
            self._shares = [send_share(self._outgoing, self._group, self.manifest, self._weights, beat)]
        finally:
            go_through(self._gathered, beat)

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


def send_share(outgoing: Outgoing, group: SenderGroup, manifest: Manifest, weights: Weights, beat: Beat) -> SentShare:
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


def go_through(gathered: Iterator[tuple[str, Tensor]], beat: Beat) -> None:
    """Iterate over the rest of the weights: in a collective gathering, the other ranks would wait for this one for
    ever."""
    for _ in gathered:
        beat()
