"""Copy of each rank's part of a checkpoint on the next node, so that a restart can do without the memory of one node.

The nodes form a ring: each sends to the next. A thread sends, a thread of the other rank receives
(``peer_transfer.py``); no rank waits for it but for the buffers, before it takes the next snapshot. A transfer that
fails, or does not go on, costs that copy and nothing else.
"""

import os
import socket
import threading
from collections.abc import Sequence

from rlhf_core.files.whole import shared_secret
from rlhf_core.schemas.base import utc_now
from rlhf_core.training.checkpoints.background_save import Content
from rlhf_core.training.checkpoints.memory.copies import PEER, MemoryPart
from rlhf_core.training.checkpoints.memory.peer_transfer import PartReceiver, PeerRefused, send_part
from rlhf_core.training.distributed import Ranks
from rlhf_core.training.types import WorkerContext


class PeerCopies:
    """Sends the parts of this rank, and keeps those of a rank of the node before."""

    def __init__(self, receiver: PartReceiver, address: tuple[str, int], peer: str, key: bytes) -> None:
        """Take over what :func:`peer_copies` has made.

        Args:
            address: that of the rank which keeps the parts of this one.
            peer: its node.
        """
        self._receiver = receiver
        self._address = address
        self._peer = peer
        self._key = key
        self._sending: threading.Thread | None = None

    def begin(self, part: MemoryPart, content: Content) -> None:
        """Send a part in the background. Its buffers must stay as they are until :meth:`finish` returns."""
        # A daemon: one that waits for another node must not keep the process from its end.
        self._sending = threading.Thread(
            target=self._send, args=(part, content), name=f"peer-copy-{part.step}", daemon=True
        )
        self._sending.start()

    def finish(self) -> None:
        """Wait until nothing is being sent: never longer than a transfer may stand still."""
        if self._sending is not None:
            self._sending.join()
            self._sending = None

    def close(self) -> None:
        """Receive no more."""
        self._receiver.close()

    def _send(self, part: MemoryPart, content: Content) -> None:
        try:
            send_part(self._address, self._key, part, content)
        except (OSError, PeerRefused) as error:
            own_line(f"no copy of step {part.step} on {self._peer}: {error}")


def peer_copies(context: WorkerContext, ranks: Ranks) -> PeerCopies | None:
    """Begin to receive, and find out where to send to; None, with a line of the log, where there is no other node.

    Collective where the settings ask for it.
    """
    if context.spec.checkpoint.memory != "peer":
        return None
    nodes = ranks.gather(context.node)
    target = rank_on_next_node(nodes, ranks.rank)
    if target is None:
        ranks.log('checkpoint.memory is "peer", and all ranks are on one node: the copy of the newest one stays on it')
        return None
    receiver, key, problem = _receiver(context)
    hosts = ranks.gather(receiver.address[0] if receiver is not None else "")
    ports = ranks.gather(receiver.address[1] if receiver is not None else 0)
    problems = [f"{nodes[rank]}: {found}" for rank, found in enumerate(ranks.gather(problem)) if found]
    if receiver is None or problems:
        ranks.log(f"no copies on other nodes: {'; '.join(problems)}")
        if receiver is not None:
            receiver.close()
        return None
    return PeerCopies(receiver, (hosts[target], ports[target]), nodes[target], key)


def rank_on_next_node(nodes: Sequence[str], rank: int) -> int | None:
    """The rank that keeps the parts of a rank: the one of the same place on the next node, after the last the first.

    Args:
        nodes: node of each rank.

    Returns:
        None where all ranks are on one node.
    """
    names = list(dict.fromkeys(nodes))
    if len(names) == 1:
        return None
    following = names[(names.index(nodes[rank]) + 1) % len(names)]
    here = [other for other, name in enumerate(nodes) if name == nodes[rank]]
    there = [other for other, name in enumerate(nodes) if name == following]
    return there[here.index(rank) % len(there)]


def own_line(message: str) -> None:
    """A line of the log of this rank."""
    print(f"{utc_now():%Y-%m-%d %H:%M:%S} {message}", flush=True)


def _receiver(context: WorkerContext) -> tuple[PartReceiver | None, bytes, str]:
    """Receiver of this rank and key of the attempt; or why there is none."""
    if context.memory is None:
        return None, b"", "no file system in memory"
    try:
        key = shared_secret(context.run_dir.attempt(context.attempt).key)
        return PartReceiver(context.memory / PEER, key, _own_address(), own_line), key, ""
    except (OSError, ValueError) as error:
        return None, b"", str(error)


def _own_address() -> str:
    """Address of the interface that leads to where the ranks meet.

    Raises:
        OSError: none leads there.
    """
    family, kind, _, _, address = socket.getaddrinfo(os.environ["MASTER_ADDR"], 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing: it only chooses the interface
        return str(probe.getsockname()[0])
