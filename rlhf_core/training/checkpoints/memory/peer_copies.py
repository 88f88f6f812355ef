"""Copy of each rank's part of a checkpoint on the next node, so that a restart survives losing one node's memory.

The nodes form a ring: each sends to the next. One thread sends, a thread of the other rank receives
(``peer_transfer.py``). A rank waits for a transfer only before its next snapshot, which reuses the buffers. A transfer
that fails or stalls costs only that copy.
"""

import os
import threading
from collections.abc import Sequence
from typing import Any

from rlhf_core.files.whole import shared_secret
from rlhf_core.training.checkpoints.background_save import Content
from rlhf_core.training.checkpoints.memory.copies import PEER, MemoryPart
from rlhf_core.training.checkpoints.memory.peer_transfer import PartReceiver, PeerRefused, send_part
from rlhf_core.training.distributed import Ranks, own_line
from rlhf_core.training.types import WorkerContext
from rlhf_core.weight_sync.links import own_address


class PeerCopies:
    """Sends this rank's parts, and keeps those of a rank on the previous node."""

    def __init__(self, receiver: PartReceiver, address: tuple[str, int], peer: str, key: bytes) -> None:
        """Take over the parts made by :func:`peer_copies`.

        Args:
            address: address of the rank that keeps this rank's parts.
            peer: node of that rank.
        """
        self._receiver = receiver
        self._address = address
        self._peer = peer
        self._key = key
        self._sending: threading.Thread | None = None

    def begin(self, part: MemoryPart, content: Content) -> None:
        """Send a part in the background. Its buffers must stay as they are until :meth:`finish` returns."""
        # A daemon: a thread waiting for another node must not keep the process from exiting.
        self._sending = threading.Thread(
            target=self._send, args=(part, content), name=f"peer-copy-{part.manifest.step}", daemon=True
        )
        self._sending.start()

    def finish(self) -> None:
        """Wait until nothing is being sent; bounded, because a stalled transfer times out."""
        if self._sending is not None:
            self._sending.join()
            self._sending = None

    def close(self) -> None:
        """Stop receiving."""
        self._receiver.close()

    def _send(self, part: MemoryPart, content: Content) -> None:
        try:
            send_part(self._address, self._key, part, content)
        except (OSError, PeerRefused) as error:
            own_line(f"no copy of step {part.manifest.step} on {self._peer}: {error}")


def peer_copies(context: WorkerContext, ranks: Ranks) -> PeerCopies | None:
    """Start receiving and find the rank to send to; None, with a log line, if there is no other node.

    Collective if the settings enable peer copies.
    """
    if context.spec.checkpoint.memory != "peer":
        return None
    nodes = ranks.gather(context.node)
    target = rank_on_next_node(nodes, ranks.rank)
    if target is None:
        ranks.log('checkpoint.memory is "peer", but all ranks are on one node: its newest copy stays there')
        return None
    receiver, key, problem = _receiver(context)
    of_ranks: list[list[Any]] = ranks.gather([*(receiver.address if receiver is not None else ("", 0)), problem])
    problems = [f"{nodes[rank]}: {found}" for rank, (_, _, found) in enumerate(of_ranks) if found]
    if receiver is None or problems:
        ranks.log(f"no copies on other nodes: {'; '.join(problems)}")
        if receiver is not None:
            receiver.close()
        return None
    host, port, _ = of_ranks[target]
    return PeerCopies(receiver, (host, port), nodes[target], key)


def rank_on_next_node(nodes: Sequence[str], rank: int) -> int | None:
    """Rank that keeps a rank's parts: the one at the same position on the next node, wrapping around.

    Args:
        nodes: node of each rank.

    Returns:
        None if all ranks are on one node.
    """
    names = list(dict.fromkeys(nodes))
    if len(names) == 1:
        return None
    following = names[(names.index(nodes[rank]) + 1) % len(names)]
    here = [other for other, name in enumerate(nodes) if name == nodes[rank]]
    there = [other for other, name in enumerate(nodes) if name == following]
    return there[here.index(rank) % len(there)]


def kept_ranks(nodes: Sequence[str], node: str) -> dict[str, list[int]]:
    """Ranks whose parts a node keeps, by the folder: its own, and those of the previous node.

    Args:
        nodes: node of each rank.
    """
    names = list(dict.fromkeys(nodes))
    previous = names[names.index(node) - 1] if len(names) > 1 else None
    return {
        place: [rank for rank, name in enumerate(nodes) if name == owner]
        for place, owner in (("", node), (PEER, previous))
    }


def _receiver(context: WorkerContext) -> tuple[PartReceiver | None, bytes, str]:
    """Create this rank's receiver and read the attempt's key, or return the reason for having none."""
    if context.memory is None:
        return None, b"", "no in-memory file system"
    try:
        key = shared_secret(context.run_dir.attempt(context.attempt).key)
        return PartReceiver(context.memory / PEER, key, own_address(os.environ["MASTER_ADDR"]), own_line), key, ""
    except (OSError, ValueError) as error:
        return None, b"", str(error)
