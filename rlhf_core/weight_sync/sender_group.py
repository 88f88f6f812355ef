"""The trainer ranks that send weights, each its share, and the messages between them.

    first sender (sender.Sender)                              others (sender.FurtherSender)
    publish_version(announcement)  ------------------------>  await_version()
         <---------------------------------------- chain ---  send_chain(chain)
                                                              ... both send their shares, each over its chain
    cancel()  <------------ at the first failure ---------->  cancel()
         <----------------------------------- SentShare -----  report_share(share)

They communicate through a store that the first sender hosts. Nothing here is a collective: weights are gathered
meanwhile.
"""

import contextlib
import time
from collections.abc import Sequence
from typing import Self

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from rlhf_core.errors import WeightSyncFailed
from rlhf_core.schemas.base import Schema
from rlhf_core.schemas.weight_sync import Announcement, Chain, SentShare
from rlhf_core.weight_sync.base import Beat
from rlhf_core.weight_sync.layout import Share

POLL_INTERVAL_S = 0.002


def sender_ranks(nodes: Sequence[str], senders: int) -> list[int]:
    """Ranks that send: the first rank of every node, then the second ones, and so on, to use the links of all nodes.

    Args:
        nodes: name of the node of each rank.
        senders: number of senders; all ranks if there are fewer.

    Returns:
        Ranks in the order of their shares. Rank 0 comes first.
    """
    seen: dict[str, int] = {}
    turns = []
    for rank, node in enumerate(nodes):
        turns.append((seen.get(node, 0), rank))
        seen[node] = seen.get(node, 0) + 1
    return [rank for _, rank in sorted(turns)[:senders]]


class SenderGroup:
    """The senders of a trainer, from the view of one of them. One version at a time, in which all take part."""

    def __init__(self, names: Sequence[str], place: int, store: Store, *, timeout_s: float) -> None:
        """Args:
        names: names of all senders, in the order of their shares.
        place: index of this sender.
        store: reachable by all senders, and used for nothing else.
        timeout_s: longest wait for a message of another sender.
        """
        self.names, self.share = tuple(names), Share(place, len(names))
        self._store, self._timeout_s = store, timeout_s
        self._number = 0

    @classmethod
    def alone(cls, name: str) -> Self:
        """A group of a single sender."""
        return cls([name], 0, HashStore(), timeout_s=0.0)

    @property
    def name(self) -> str:
        """Name of this sender."""
        return self.names[self.share.place]

    # -----------------------------------------------------------------------------------------------------------------
    # The first sender

    def publish_version(self, announcement: Announcement, beat: Beat) -> list[Chain]:
        """Have the other senders send their shares of a version; returns their chains.

        Raises:
            WeightSyncFailed: one does not respond; ``peer`` is its name.
        """
        self._begin()
        self._send(self._key("announcement"), announcement)
        return [Chain.model_validate_json(self._receive("chain", place, beat)) for place in self._others]

    def shares(self, beat: Beat) -> list[SentShare]:
        """Reports of the other senders. Call it once the engines have responded: none has much left to do then.

        A sender that does not report has failed.
        """
        found = []
        for place in self._others:
            try:
                found.append(SentShare.model_validate_json(self._receive("share", place, beat)))
            except WeightSyncFailed as error:
                found.append(SentShare(error=str(error), peer=error.peer))
        return found

    @property
    def _others(self) -> range:
        return range(1, len(self.names))

    # -----------------------------------------------------------------------------------------------------------------
    # The others

    def await_version(self, beat: Beat) -> Announcement:
        """Wait for the next version.

        Raises:
            WeightSyncFailed: none is announced.
        """
        self._begin()
        return Announcement.model_validate_json(self._wait_for(self._key("announcement"), self.names[0], beat))

    def send_chain(self, chain: Chain) -> None:
        """Send the chain of this sender to the first one."""
        self._send(self._key(f"chain/{self.share.place}"), chain)

    def report_share(self, share: SentShare) -> None:
        """Report the outcome of this sender's share to the first sender.

        Raises:
            WeightSyncFailed: it is gone.
        """
        self._send(self._key(f"share/{self.share.place}"), share)

    # -----------------------------------------------------------------------------------------------------------------
    # All

    def cancel(self) -> None:
        """Have all senders abandon the version. From any thread."""
        with contextlib.suppress(RuntimeError):  # from torch: the first sender is gone, and the version with it
            self._store.set(self._key("cancelled"), "")

    @property
    def is_cancelled(self) -> bool:
        """True if a sender has abandoned the version, or the first one is gone."""
        try:
            return bool(self._store.check([self._key("cancelled")]))
        except RuntimeError:
            return True

    def _begin(self) -> None:
        """Begin the next version. The first sender deletes the keys of the last one, which all senders have
        finished."""
        if not self.share.place:
            own_keys = [f"{what}/{place}" for what in ("chain", "share") for place in self._others]
            for what in ("announcement", "cancelled", *own_keys):
                self._store.delete_key(self._key(what))
        self._number += 1

    def _key(self, what: str) -> str:
        return f"{self._number}/{what}"

    def _send(self, key: str, message: Schema) -> None:
        try:
            self._store.set(key, message.model_dump_json())
        except RuntimeError as error:
            raise self._lost() from error

    def _lost(self) -> WeightSyncFailed:
        return WeightSyncFailed(f"{self.names[0]} is lost, and with it the store of the senders", self.names[0])

    def _receive(self, what: str, place: int, beat: Beat) -> bytes:
        return self._wait_for(self._key(f"{what}/{place}"), self.names[place], beat)

    def _wait_for(self, key: str, name: str, beat: Beat) -> bytes:
        """Value of a key that the named sender sets.

        Raises:
            WeightSyncFailed: it did not do so in time.
        """
        deadline = time.monotonic() + self._timeout_s
        try:
            while not self._store.check([key]):
                if time.monotonic() > deadline:
                    raise WeightSyncFailed(f"{name} was silent for {self._timeout_s:g} s", name)
                beat()
                time.sleep(POLL_INTERVAL_S)
            value: bytes = self._store.get(key)
        except RuntimeError as error:
            raise self._lost() from error
        return value
