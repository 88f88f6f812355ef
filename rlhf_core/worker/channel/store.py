"""Key-value store in which the agents of an attempt leave messages for each other; agent 0 hosts it.

It lives as long as the attempt, through all restarts of the workers. The port follows from the name of the job, so that
no agent has to be told it: of eight candidates agent 0 takes the first that is free, and the others try them all until
a store answers that carries the mark of this attempt.

torch's store authenticates no client. It listens on the address of the node in the allocation only, and what is read
from it is believed when it is signed (``signing.py``).
"""

import contextlib
import hashlib
import hmac
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

from rlhf_core.worker.channel.signing import MessageSigner

NUM_PORTS = 8
PORTS = range(20000, 30000)
"""Below the range from which Linux hands out ports to clients."""
JOIN_TIMEOUT_S = 60.0
"""Time for which agents look for the store of agent 0, and agent 0 waits for them."""
ANSWER_TIMEOUT_S = 5.0
BACKLOG = 1024
"""Connections that may wait to be accepted: all workers of a start come at once."""
MARK = "rlhf/marker"
LOOPBACK = "127.0.0.1"


class AgentStoreLost(Exception):
    """The store does not answer."""


class AgentStore(Protocol):
    """Texts by key."""

    endpoint: str
    """``host:port`` of its store; port 0 where there is none."""

    def set(self, key: str, text: str) -> None:
        """Leave a text.

        Raises:
            AgentStoreLost: the store does not answer.
        """

    def get(self, keys: Sequence[str]) -> list[str | None]:
        """Texts by key, None where none was left.

        Raises:
            AgentStoreLost: the store does not answer.
        """


class MemoryAgentStore:
    """For an agent that is alone, and for tests."""

    endpoint = "127.0.0.1:0"

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._lock = threading.Lock()

    def set(self, key: str, text: str) -> None:
        """Leave a text."""
        with self._lock:
            self._texts[key] = text

    def get(self, keys: Sequence[str]) -> list[str | None]:
        """Texts by key."""
        with self._lock:
            return [self._texts.get(key) for key in keys]


class TcpAgentStore:
    """On torch's ``TCPStore``."""

    def __init__(self, store: Any, endpoint: str) -> None:
        self._store = store
        self.endpoint = endpoint

    def set(self, key: str, text: str) -> None:
        """Leave a text."""
        try:
            self._store.set(key, text)
        except RuntimeError as error:
            raise AgentStoreLost(str(error)) from error

    def get(self, keys: Sequence[str]) -> list[str | None]:
        """Texts by key; one question where all are there."""
        if not keys:
            return []
        try:
            # A query for a key that was never set would wait for it.
            if self._store.check(list(keys)):
                return [_text(content) for content in self._store.multi_get(list(keys))]
            return [_text(self._store.get(key)) if self._store.check([key]) else None for key in keys]
        except RuntimeError as error:
            raise AgentStoreLost(str(error)) from error


def _text(content: bytes) -> str:
    """Text that was left, also by a stranger: bytes that are no text must not hide the rest."""
    return content.decode("utf-8", errors="replace")


def candidate_ports(marker: str) -> list[int]:
    """Ports on which the store of a job may be, in the order in which they are tried."""
    digest = hashlib.sha256(marker.encode()).digest()
    numbers = (int.from_bytes(digest[2 * place : 2 * place + 2]) for place in range(NUM_PORTS))
    return list(dict.fromkeys(PORTS.start + number % len(PORTS) for number in numbers))


def host_agent_store(address: str, listen_at: str, signer: MessageSigner) -> TcpAgentStore:
    """Start the store of an attempt; for agent 0.

    Args:
        address: Of agent 0's node, as the others know it.
        listen_at: Address to listen on; empty for all interfaces.
        signer: Its own.

    Raises:
        AgentStoreLost: all candidate ports are taken.
    """
    taken = []
    for port in candidate_ports(signer.marker):
        try:
            store, port = _host_store(listen_at, port)
        except (OSError, RuntimeError) as error:
            taken.append(f"{port}: {str(error).splitlines()[0]}")
            continue
        store.set(MARK, signer.mark(f"{address}:{port}"))
        return TcpAgentStore(store, f"{address}:{port}")
    raise AgentStoreLost(f"none of the ports of {signer.marker} is free ({'; '.join(taken)})")


def host_worker_store(address: str, listen_at: str) -> tuple[Any, str]:
    """A store in which the workers of one start meet, and its ``host:port``; for agent 0.

    It lives as long as the object is kept.

    Args:
        address: Of agent 0's node, as the others know it.
        listen_at: Address to listen on; empty for all interfaces.

    Raises:
        OSError: no port is free.
        RuntimeError: torch cannot start it.
    """
    store, port = _host_store(listen_at, 0)
    return store, f"{address}:{port}"


def _host_store(listen_at: str, port: int) -> tuple[Any, int]:
    """A store that listens on one address, not on all interfaces as torch's own choice would be; and its port."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((listen_at, port))
        listener.listen(BACKLOG)
        port = listener.getsockname()[1]
        store = TCPStore(
            listen_at or LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=ANSWER_TIMEOUT_S),
            master_listen_fd=listener.detach(),
        )
    return store, port


def join_agent_store(
    address: str, signer: MessageSigner, pause: Callable[[float], bool], timeout_s: float = JOIN_TIMEOUT_S
) -> TcpAgentStore:
    """Find the store of agent 0.

    Args:
        address: Of agent 0's node.
        signer: That of this agent.
        pause: Sleeps for so many seconds; True when there is no more use in waiting.
        timeout_s: Longest time to look, in seconds.

    Raises:
        AgentStoreLost: it was not found; the message says what was.
    """
    deadline = time.monotonic() + timeout_s
    seen: dict[int, str] = {}
    while time.monotonic() < deadline:
        for port in candidate_ports(signer.marker):
            found: queue.SimpleQueue[tuple[Any, str]] = queue.SimpleQueue()
            # In a thread: a program that listens there may be silent for ever, and TCPStore would wait for it.
            threading.Thread(target=_try, args=(address, port, signer, found), daemon=True).start()
            try:
                store, seen[port] = found.get(timeout=ANSWER_TIMEOUT_S)
            except queue.Empty:
                store, seen[port] = None, "does not answer"
            if store is not None:
                return TcpAgentStore(store, f"{address}:{port}")
        if pause(0.25):
            raise AgentStoreLost("no longer looking for agent 0: this agent is to end")
    listed = ", ".join(f"{port} {what}" for port, what in seen.items())
    raise AgentStoreLost(f"agent 0 was not found at {address} within {timeout_s:.0f} s: {listed}")


def _try(address: str, port: int, signer: MessageSigner, found: "queue.SimpleQueue[tuple[Any, str]]") -> None:
    """Find out whether our store is at a port, and what is there otherwise."""
    try:
        # TCPStore itself would try for its whole time-out where nothing listens.
        socket.create_connection((address, port), timeout=ANSWER_TIMEOUT_S).close()
    except OSError as error:
        found.put((None, error.strerror or type(error).__name__))
        return
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        timeout = timedelta(seconds=ANSWER_TIMEOUT_S)
        store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
        mark = _text(store.get(MARK)) if store.check([MARK]) else "no agent"
    except RuntimeError as error:
        found.put((None, f"is no store ({str(error).splitlines()[0][:80]})"))
        return
    expected = signer.mark(f"{address}:{port}")
    if hmac.compare_digest(mark.encode(), expected.encode()):
        found.put((store, ""))
    else:
        owner = mark.partition(" ")[0][:80]
        # Also where this node sees another folder in place of the run directory, and so another key.
        why = "carries the name of this attempt, but not its key" if owner == signer.marker else f"belongs to {owner}"
        found.put((None, why))
