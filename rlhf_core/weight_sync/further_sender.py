"""The trainer's side of weight sync, for every sender but the first."""

import sys
from collections.abc import Iterator, Sequence

from torch import Tensor

from rlhf_core.errors import WeightSyncFailed
from rlhf_core.schemas.weight_sync import SentShare
from rlhf_core.survival import Survived
from rlhf_core.weight_sync.base import Beat, Outgoing, Weights
from rlhf_core.weight_sync.sender_group import SenderGroup
from rlhf_core.weight_sync.transfer import go_through, send_share


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
            go_through(source, beat)
            share = self._failed(failed)
        self._group.report_share(share)

    def _send(self, source: Iterator[tuple[str, Tensor]], beat: Beat) -> SentShare:
        announced = self._group.await_version(beat)
        if announced.is_new_session:
            self._outgoing.reset()
        manifest, share = announced.manifest, self._group.share
        offer = self._outgoing.offer(manifest, rotated(announced.receivers, share.place), share)
        self._group.send_chain(offer.chains[0])
        return send_share(self._outgoing, self._group, manifest, source, beat)

    def _failed(self, failed: Survived) -> SentShare:
        if isinstance(failed.error, WeightSyncFailed):
            return SentShare(error=str(failed.error), peer=failed.error.peer)
        sys.stderr.write(failed.trace)
        return SentShare(error=f"{self._group.name} failed: {failed.problem}", peer=self._group.name)

    def close(self) -> None:
        """Release the sender's resources."""
        self._outgoing.close()


def rotated(receivers: Sequence[str], place: int) -> list[str]:
    """Engines in the order of a sender's chain: each chain begins with another engine, to spread the load evenly."""
    first = place % len(receivers)
    return [*receivers[first:], *receivers[:first]]
