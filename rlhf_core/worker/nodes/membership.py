"""The nodes of an attempt, this node's index among them, and its address.

The job's batch script queries the scheduler once and passes names and addresses in ``RLHF_NODES``, because node names
need not resolve; the scheduler's own ``SLURM_NODEID`` gives this node's index. Without both there is a single node.
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

NODES_VARIABLE = "RLHF_NODES"
"""``name=address,name=address`` in the order of the allocation."""
INDEX_VARIABLE = "SLURM_NODEID"
NAME_VARIABLE = "SLURMD_NODENAME"


class NodesError(Exception):
    """Raised if the environment is contradictory about the nodes; the message says how."""


@dataclass(frozen=True)
class Nodes:
    """The nodes of an attempt, as seen by one of them."""

    names: tuple[str, ...]
    """Node names in allocation order; agent 0 runs on the first."""
    addresses: tuple[str, ...]
    index: int
    """Index of this node among them."""

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> "Nodes":
        """Read the nodes from the environment.

        Raises:
            NodesError: the environment is contradictory.
        """
        listed = environment.get(NODES_VARIABLE, "")
        own_name = environment.get(NAME_VARIABLE) or socket.gethostname()
        position = environment.get(INDEX_VARIABLE, "0")
        if not position.isdigit():
            raise NodesError(f"found {INDEX_VARIABLE}={position!r}, expected a number from 0")
        if not listed:
            if int(position) > 0:
                message = f"found {INDEX_VARIABLE}={position} but no {NODES_VARIABLE}: the job's script must set both"
                raise NodesError(message)
            return cls((own_name,), ("127.0.0.1",), 0)
        pairs = [pair.partition("=") for pair in listed.split(",")]
        if not all(name and address for name, _, address in pairs):
            raise NodesError(f"found {NODES_VARIABLE}={listed!r}, expected name=address,name=address")
        names = tuple(name for name, _, _ in pairs)
        if len(set(names)) < len(names):
            raise NodesError(f"found a duplicate name in {NODES_VARIABLE}={listed!r}")
        if int(position) >= len(names):
            raise NodesError(f"found {INDEX_VARIABLE}={position}, but {NODES_VARIABLE} names {len(names)} nodes")
        if environment.get(NAME_VARIABLE) and names[int(position)] != own_name:
            message = f"node {position} is {names[int(position)]} in {NODES_VARIABLE}, but {NAME_VARIABLE}={own_name}"
            raise NodesError(message)
        return cls(names, tuple(address for _, _, address in pairs), int(position))

    @property
    def name(self) -> str:
        """Name of this node."""
        return self.names[self.index]

    @property
    def address(self) -> str:
        """Address at which the other nodes reach this node."""
        return self.addresses[self.index]

    @property
    def listening_address(self) -> str:
        """Numeric address on which this node listens for the others; empty for all interfaces.

        It is empty if the node's name resolves to none of its interfaces, or to loopback although there are other
        nodes: the probe ends such an attempt, but only after the agents have connected.
        """
        own = _number(self.address)
        if not interface_of(own) or (
            _is_loopback(own) and not all(_is_loopback(_number(one)) for one in self.addresses)
        ):
            return ""
        return own

    @property
    def num(self) -> int:
        """Number of nodes."""
        return len(self.names)

    @property
    def is_first(self) -> bool:
        """True if agent 0 runs here."""
        return self.index == 0


def interface_of(address: str) -> str:
    """Network interface that has the address of a host; empty if there is none."""
    number = _number(address)
    for interface, entries in psutil.net_if_addrs().items():
        if number and any(entry.address == number for entry in entries):
            return interface
    return ""


def _number(address: str) -> str:
    try:
        return socket.gethostbyname(address)
    except OSError:
        return ""


def _is_loopback(number: str) -> bool:
    return number.startswith("127.")


def unused_port(address: str) -> int:
    """A port of this node on which no process is listening at the moment.

    Args:
        address: Address of this node; if it belongs to no local interface (a proxy, a name), all interfaces are used.
    """
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
