"""A link between two processes: a torch process group of two, independent of any other groups.

A group of two is used instead of one group of all because it identifies the lost process, needs only the connections of
the chain, and leaves the other links intact after a failure.
"""

import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from torch import Tensor
from torch.distributed import ProcessGroupGloo, TCPStore, Work  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from rlhf_core.errors import WeightSyncFailed
from rlhf_core.weight_sync.gpu import Gpu

HEAD, BUCKET = 0, 1
"""Tags of messages."""
CONNECT_TIMEOUT_S = 20.0
"""Longest wait for the other end of a link to appear."""
POLL_INTERVAL_S = 0.01
_GLOO_TIMEOUT_S = 2.0
"""Gloo waits five times as long for a connection. Messages have timeouts of their own."""
_LAST_MESSAGE_TIMEOUT_S = 2.0


class Pending(Protocol):
    """A message in flight."""

    def wait(self) -> None:
        """Wait until its memory may be used: it has been sent, or has arrived.

        Raises:
            WeightSyncFailed: the other end is lost or does not respond.
        """


@dataclass(frozen=True)
class LinkEnd:
    """One end of a link."""

    is_source: bool
    """True at the sending end."""
    address: str
    """Own address, at which the other end connects to this process."""
    peer: str
    """Name of the process at the other end, for messages."""
    stall_timeout_s: float
    """Longest wait for one message."""
    require_wanted: Callable[[], None]
    """Called while the other end is waited for; raises WeightSyncFailed once the version is given up."""


class Link(Protocol):
    """Unidirectional link from a process to the next one in the chain."""

    @property
    def depth(self) -> int:
        """Number of buckets in flight: sent or received before one is waited for."""

    @property
    def gpu(self) -> Gpu | None:
        """GPU that holds the buckets; None for main memory. Heads are always in main memory."""

    def send(self, message: Tensor, tag: int) -> Pending:
        """Begin to send bytes; they must not change until the message has been waited for."""

    def receive(self, message: Tensor, tag: int) -> Pending:
        """Begin to receive the message with this tag, which has as many bytes as ``message``."""

    def post(self, message: Tensor, tag: int) -> None:
        """Send a last head; does not fail if the other end is gone."""

    def close(self) -> None:
        """Close the link and drop its pending messages."""


class GlooLink:
    """A link over gloo; see :class:`Link`."""

    depth = 8  # so that no bucket waits for a round trip
    gpu = None

    def __init__(self, store: Store, key: str, end: LinkEnd) -> None:
        """Connect; blocks until the other end has connected.

        Args:
            key: name of the link, the same at both ends and used once.

        Raises:
            WeightSyncFailed: it did not connect, or the version was given up.
        """
        self._peer = peer = end.peer
        self._timeout = timedelta(seconds=end.stall_timeout_s)
        gloo: Any = ProcessGroupGloo  # torch's stubs leave out what is used here
        options = gloo._Options()
        options._timeout = timedelta(seconds=_GLOO_TIMEOUT_S)
        options._devices = [gloo.create_device(hostname=end.address)]
        options._threads = 1
        self._other = int(end.is_source)
        place = PrefixStore(key, store)
        try:
            # The source announces itself last, and only for a version that is wanted: a sink that gives up before is
            # not connected to, which would take until gloo's timeout.
            if not end.is_source:
                place.set("here/sink", "")
            _await_other_end(place, "here/sink" if end.is_source else "here/source", end)
            if end.is_source:
                end.require_wanted()
                place.set("here/source", "")
            self._group: Any = gloo(place, 1 - self._other, 2, options)
        except RuntimeError as error:
            raise WeightSyncFailed(f"failed to make a link with {peer}: {first_line(error)}", peer) from error

    def send(self, message: Tensor, tag: int) -> Pending:
        """Begin to send bytes; see :class:`Link`."""
        return self._begin(lambda: self._group.send([message], self._other, tag))

    def receive(self, message: Tensor, tag: int) -> Pending:
        """Begin to receive bytes; see :class:`Link`."""
        return self._begin(lambda: self._group.recv([message], self._other, tag))

    def post(self, message: Tensor, tag: int) -> None:
        """Send a last message; see :class:`Link`."""
        with contextlib.suppress(RuntimeError):
            self._group.send([message], self._other, tag).wait(timedelta(seconds=_LAST_MESSAGE_TIMEOUT_S))

    def close(self) -> None:
        """Leave the rest to gloo, whose connection ends with the group."""

    def _begin(self, begin: Callable[[], Work]) -> "_PendingWork":
        try:
            return _PendingWork(begin(), self._peer, self._timeout)
        except RuntimeError as error:
            raise _lost(self._peer, error) from error


class _PendingWork:
    """A message over gloo."""

    def __init__(self, work: Work, peer: str, timeout: timedelta) -> None:
        self._work, self._peer, self._timeout = work, peer, timeout

    def wait(self) -> None:
        try:
            self._work.wait(self._timeout)
        except RuntimeError as error:
            raise _lost(self._peer, error, self._timeout) from error


def _await_other_end(place: Store, key: str, end: LinkEnd) -> None:
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while not place.check([key]):
        end.require_wanted()
        if time.monotonic() > deadline:
            text = f"failed to make a link with {end.peer}: it did not connect within {CONNECT_TIMEOUT_S:g} s"
            raise WeightSyncFailed(text, end.peer)
        time.sleep(POLL_INTERVAL_S)


def numeric(address: str) -> str:
    """Numeric address of a host: a store and gloo could each resolve a name differently."""
    return str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])


def listen(address: str) -> TCPStore:
    """Open the store through which links are negotiated, on a free port of one address. torch's default is all
    interfaces.

    Args:
        address: own address, at which the other processes connect to this one.
    """
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    try:
        listener = socket.create_server((address, 0), family=family)
    except OSError:  # it is on no interface of this host; the agents' stores listen on all of them then, too
        listener = socket.create_server(("", 0), family=family)
    with listener:
        port = listener.getsockname()[1]
        return TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=CONNECT_TIMEOUT_S),
            master_listen_fd=listener.detach(),
        )


def reach(address: str, port: int, owner: str) -> TCPStore:
    """Connect to the store of another process.

    Raises:
        WeightSyncFailed: it does not respond.
    """
    timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
    try:
        return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
    except RuntimeError as error:
        raise WeightSyncFailed(f"{owner} does not respond at {address}:{port}: {first_line(error)}", owner) from error


def answers(store: Store) -> bool:
    """True if the process that hosts a store is alive."""
    try:
        store.check(["alive"])
    except RuntimeError:
        return False
    return True


def own_address(towards: str) -> str:
    """Address of this host as seen on the route to another one."""
    family = socket.getaddrinfo(towards, 9)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))  # sends nothing: the kernel only chooses the interface
        return str(probe.getsockname()[0])


def _lost(peer: str, error: RuntimeError, timeout: timedelta | None = None) -> WeightSyncFailed:
    text = first_line(error)
    if timeout is not None and "Timed out" in text:
        return WeightSyncFailed(f"{peer} did not send or receive for {timeout.total_seconds():g} s", peer)
    return WeightSyncFailed(f"{peer} is lost: {text}", peer)


def first_line(error: RuntimeError) -> str:
    """First line of an error of torch's groups, without the code location that follows it."""
    return str(error).splitlines()[0].partition("] ")[2].partition(". This is")[0] or str(error).splitlines()[0]
