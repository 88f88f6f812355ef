"""The nodes of an attempt, the place of this one among them, and its address.

The batch script of the job says it in one variable, because names of nodes need not resolve (``RLHF_NODES``, from one
question to the scheduler); which node this is says the scheduler's own ``SLURM_NODEID``. Without both there is one
node.
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
    """The environment contradicts itself about the nodes; the message says how."""


@dataclass(frozen=True)
class Nodes:
    """The nodes of an attempt, as one of them sees them."""

    names: tuple[str, ...]
    """In the order of the allocation; agent 0 runs on the first."""
    addresses: tuple[str, ...]
    index: int
    """Index of this node among them."""

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> "Nodes":
        """Read the environment.

        Raises:
            NodesError: it contradicts itself.
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
            raise NodesError(f"found a name twice in {NODES_VARIABLE}={listed!r}")
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
        """Address under which the others reach this node."""
        return self.addresses[self.index]

    @property
    def listening_address(self) -> str:
        """Number of the address at which this node listens for the others; empty for all interfaces.

        So it is where its own name leads to none of them, or to the loopback interface though other nodes are
        elsewhere: the probe ends such an attempt, and can only do so when the agents have met.
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
    """Network interface that has an address or the address of a name; empty when none has."""
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
    """A port of this node that no other process listens at just now.

    Args:
        address: Address of this node; where it is of no interface here (a proxy, a name), the port is of all of them.
    """
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
