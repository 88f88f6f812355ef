"""Key-value store through which the agents of an attempt exchange messages; agent 0 hosts it.

It lives as long as the attempt, across all restarts of the workers. The port is derived from the attempt, so it need
not be communicated: agent 0 takes the first free one of eight candidates, and the others try them all until they find a
store that carries the mark of this attempt.

torch's store does not authenticate clients. It therefore listens only on the node's address in the allocation, and
agents trust only the signed messages they read from it (``signing.py``).

For this store, an agent of several nodes alone imports torch: that of a single node sends no messages.
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
"""Ports below Linux's default range of ephemeral ports."""
ANSWER_TIMEOUT_S = 5.0
BACKLOG = 1024
"""Pending connections allowed: all workers of a start connect at once."""
MARK = "rlhf/marker"
LOOPBACK = "127.0.0.1"


class AgentStoreLost(Exception):
    """Raised when the store does not answer or cannot be found."""


class AgentStoreNotFound(AgentStoreLost):
    """Raised when the store was not found in the given time."""


class AgentStore(Protocol):
    """Texts of the given keys."""

    endpoint: str
    """``host:port`` of the store; port 0 if it has no network endpoint."""

    def set(self, key: str, text: str) -> None:
        """Store a text.

        Raises:
            AgentStoreLost: the store does not answer.
        """

    def get(self, keys: Sequence[str]) -> list[str | None]:
        """Texts of the given keys; None for a key that was never set.

        Raises:
            AgentStoreLost: the store does not answer.
        """


class MemoryAgentStore:
    """In-memory store for a single agent, and for tests."""

    endpoint = "127.0.0.1:0"

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._lock = threading.Lock()

    def set(self, key: str, text: str) -> None:
        """Store a text."""
        with self._lock:
            self._texts[key] = text

    def get(self, keys: Sequence[str]) -> list[str | None]:
        """Texts of the given keys."""
        with self._lock:
            return [self._texts.get(key) for key in keys]


class TcpAgentStore:
    """Store backed by torch's ``TCPStore``."""

    def __init__(self, store: Any, endpoint: str) -> None:
        self._store = store
        self.endpoint = endpoint

    def set(self, key: str, text: str) -> None:
        """Store a text."""
        try:
            self._store.set(key, text)
        except RuntimeError as error:
            raise AgentStoreLost(str(error)) from error

    def get(self, keys: Sequence[str]) -> list[str | None]:
        """Texts of the given keys, in a single request if all of them exist."""
        if not keys:
            return []
        try:
            # A get of a key that was never set would block.
            if self._store.check(list(keys)):
                return [_text(content) for content in self._store.multi_get(list(keys))]
            return [_text(self._store.get(key)) if self._store.check([key]) else None for key in keys]
        except RuntimeError as error:
            raise AgentStoreLost(str(error)) from error


def _text(content: bytes) -> str:
    """Decode a stored value, which may come from another program: invalid text must not hide the other values."""
    return content.decode("utf-8", errors="replace")


def candidate_ports(marker: str) -> list[int]:
    """Ports that an attempt's store may listen on, in the order in which they are tried."""
    digest = hashlib.sha256(marker.encode()).digest()
    numbers = (int.from_bytes(digest[2 * place : 2 * place + 2]) for place in range(NUM_PORTS))
    return list(dict.fromkeys(PORTS.start + number % len(PORTS) for number in numbers))


def host_agent_store(address: str, listen_at: str, signer: MessageSigner) -> TcpAgentStore:
    """Start the store of an attempt; for agent 0.

    Args:
        address: Address of agent 0's node, as the others know it.
        listen_at: Address to listen on; empty for all interfaces.
        signer: Agent 0's signer.

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
    """Start a rendezvous store for the workers of one start; returns it and its ``host:port``. For agent 0.

    It lives as long as the returned object.

    Args:
        address: Address of agent 0's node, as the others know it.
        listen_at: Address to listen on; empty for all interfaces.

    Raises:
        OSError: no port is free.
        RuntimeError: torch cannot start it.
    """
    store, port = _host_store(listen_at, 0)
    return store, f"{address}:{port}"


def _host_store(listen_at: str, port: int) -> tuple[Any, int]:
    """Start a store on one address rather than on all interfaces, torch's default; returns it and its port."""
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
    address: str, signer: MessageSigner, pause: Callable[[float], bool], timeout_s: float
) -> TcpAgentStore:
    """Find the store of agent 0.

    Args:
        address: Address of agent 0's node.
        signer: This agent's signer.
        pause: Sleeps for the given number of seconds; returns True once further waiting is pointless.
        timeout_s: Longest search, in seconds.

    Raises:
        AgentStoreNotFound: it was not found in time; the message says what was found instead.
        AgentStoreLost: further waiting is pointless.
    """
    deadline = time.monotonic() + timeout_s
    seen: dict[int, str] = {}
    while time.monotonic() < deadline:
        for port in candidate_ports(signer.marker):
            found: queue.SimpleQueue[tuple[Any, str]] = queue.SimpleQueue()
            # In a thread: TCPStore would wait forever for another program that listens there and never answers.
            threading.Thread(target=_try, args=(address, port, signer, found), daemon=True).start()
            try:
                store, seen[port] = found.get(timeout=ANSWER_TIMEOUT_S)
            except queue.Empty:
                store, seen[port] = None, "does not respond"
            if store is not None:
                return TcpAgentStore(store, f"{address}:{port}")
        if pause(0.25):
            raise AgentStoreLost("stopped looking for agent 0: the attempt is ending")
    listed = ", ".join(f"{port} {what}" for port, what in seen.items())
    raise AgentStoreNotFound(f"agent 0 was not found at {address} within {timeout_s:g} s: {listed}")


def _try(address: str, port: int, signer: MessageSigner, found: "queue.SimpleQueue[tuple[Any, str]]") -> None:
    """Look for this attempt's store at a port; report it, or what is there instead."""
    try:
        # If nothing listens, TCPStore itself would retry for its whole timeout.
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
        found.put((None, f"is not a store ({str(error).splitlines()[0][:80]})"))
        return
    expected = signer.mark(f"{address}:{port}")
    if hmac.compare_digest(mark.encode(), expected.encode()):
        found.put((store, ""))
    else:
        owner = mark.partition(" ")[0][:80]
        # Also happens if this node sees a different folder in place of the run directory, and so a different key.
        why = "has the name of this attempt, but not its key" if owner == signer.marker else f"belongs to {owner}"
        found.put((None, why))
