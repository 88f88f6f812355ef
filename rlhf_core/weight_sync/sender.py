"""The trainer's side of weight sync."""

import time
from collections.abc import Collection, Iterator, Sequence

from torch import Tensor

from rlhf_core.schemas.weight_sync import Manifest, Offer, SentVersion, TensorEntry
from rlhf_core.weight_sync.base import Beat, Outgoing, Weights
from rlhf_core.weight_sync.delta import DeltaEncoder
from rlhf_core.weight_sync.layout import bucket_bytes_for, digest_of


class Sender:
    """Sends versions of weights over one way, one at a time.

    Every rank of the trainer gathers; one of them has a sender, and the others go through their weights beside it.
    """

    def __init__(
        self, outgoing: Outgoing, *, bucket_bytes: int | None = None, delta: DeltaEncoder | None = None
    ) -> None:
        """Send nothing yet.

        Args:
            bucket_bytes: size of a bucket; by default one that suits the size of the version.
            delta: sends changes in place of whole weights where it can.
        """
        self._outgoing, self._bucket_bytes, self._delta = outgoing, bucket_bytes, delta
        self._offered: tuple[Manifest, Iterator[tuple[str, Tensor]]] | None = None
        self._is_settled = True

    def offer(
        self, version: int, tensors: Sequence[TensorEntry], weights: Weights, receivers: Sequence[str], beat: Beat
    ) -> list[Offer]:
        """Announce a version: one offer per receiver, in their order.

        Args:
            version: number of optimizer steps that the weights have behind them.
            tensors: layout of ``weights`` (``layout.entries_of``).
            weights: gone through to the end whatever happens, because gathering may be collective: by :meth:`send`, or
                here where the layout of what is sent depends on them (a delta).
            receivers: names of the engines.
        """
        manifest = Manifest(
            version=version, tensors=tuple(tensors), bucket_bytes=self._bucket_bytes or bucket_bytes_for(tensors)
        )
        source = iter(weights)
        if not self._is_settled:
            self._outgoing.reset()
        self._is_settled = False
        try:
            if self._delta is not None:
                manifest, source = self._delta.encode(manifest, source, receivers, beat)
            self._offered = manifest, source
            return self._outgoing.offer(manifest, receivers)
        except BaseException:
            _go_through(source, beat)
            raise

    def send(self, beat: Beat) -> SentVersion:
        """Send the version that was offered last, while it is gathered.

        Raises:
            WeightSyncFailed: an engine is lost or silent, or the weights are not what was offered. Nothing has come
                into force. ``peer`` names the engine.
        """
        assert self._offered is not None, "offer before send"
        (manifest, source), self._offered = self._offered, None
        begin = time.perf_counter()
        try:
            checksums = self._outgoing.send(manifest, source, beat)
        except BaseException:
            _go_through(source, beat)
            raise
        return SentVersion(
            version=manifest.version,
            digest=manifest.result_digest or digest_of(manifest, checksums),
            bytes_sent=manifest.total_bytes,
            is_delta=manifest.is_delta,
            wire_s=time.perf_counter() - begin,
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
        """Have :meth:`send` fail soon. From another thread, when an engine is known to be lost."""
        self._outgoing.cancel()

    def close(self) -> None:
        """Give back what the sender holds."""
        self._outgoing.close()


def _go_through(source: Iterator[tuple[str, Tensor]], beat: Beat) -> None:
    """Take part in the rest of a gathering: the other ranks would wait for this one for ever."""
    for _ in source:
        beat()
