"""Isolation of a node of the throw-away cluster, so that it can be disturbed alone: own network, own processor time.

A node gets a network namespace with one cable (a veth pair) to a bridge that acts as the switch, a host name, and a
control group. The names are derived from the cluster's folder alone, so any process that knows the folder can find and
remove everything, even after a start that was killed halfway.
"""

import contextlib
import hashlib
import ipaddress
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

PROGRAMS = ("ip", "tc", "nsenter", "unshare", "mount")
# Bit numbers in capabilities(7): links and queues need the first, namespaces and mounts the second.
CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
NAMESPACES = Path("/run/netns")
# The node's end of the cable. It has the same name on every node, as on a real cluster.
INNER = "eth0"
MOST_NODES = 250
PERIOD_US = 100_000
# The host name and /etc/hosts are the node's own; the rest of the file system is shared.
ENTER = 'echo "$1" >/proc/sys/kernel/hostname && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'


class ClusterError(Exception):
    """The cluster cannot do it; the message says what is missing or which log has the reason."""


def why_not() -> str:
    """Reason why nodes cannot have namespaces here; empty if they can."""
    missing = [program for program in PROGRAMS if program_path(program) is None]
    if missing:
        return f"missing: {', '.join(missing)}; install iproute2, util-linux and mount"
    held = int(Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0], 16)
    lacking = [name for name, bit in CAPABILITIES.items() if not held >> bit & 1]
    if lacking:
        return f"no right to make network namespaces: this process lacks {' and '.join(lacking)}; be root for it"
    return ""


def search_path() -> str:
    """PATH with the folder of the daemons, which is not on the PATH of ordinary users."""
    return os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"


def program_path(name: str) -> str | None:
    """Path of a program; None if it is missing on this machine."""
    return shutil.which(name, path=search_path())


def short_name(folder: Path) -> str:
    """Prefix of the names of a cluster's namespaces, links and groups; the name of a link may have 15 characters."""
    return "rl" + hashlib.sha256(str(folder).encode()).hexdigest()[:8]


class Network:
    """The bridge, cables and namespaces of one cluster."""

    def __init__(self, folder: Path) -> None:
        self._name = short_name(folder)
        self._bridge = f"{self._name}-br"
        self._hosts = folder / "etc" / "hosts"

    def make(self, nodes: Sequence[str]) -> tuple[str, dict[str, str]]:
        """Create the cables. Returns the address of the bridge, at which the controller is reached, and that of each
        node.

        Raises:
            ClusterError: it is not permitted here, or no subnet is free.
        """
        if reason := why_not():
            raise ClusterError(f"found {reason}, or go without --namespaces")
        if len(nodes) > MOST_NODES:
            raise ClusterError(f"found {len(nodes)} nodes; one subnet has room for {MOST_NODES}")
        subnet = _free_subnet()
        bridge = str(subnet[1])
        _run("ip", "link", "add", self._bridge, "type", "bridge")
        _run("ip", "address", "add", f"{bridge}/{subnet.prefixlen}", "dev", self._bridge)
        _run("ip", "link", "set", self._bridge, "up")
        addresses = {}
        for node in nodes:
            addresses[node] = str(subnet[1 + _number(node)])
            self._lay(node, f"{addresses[node]}/{subnet.prefixlen}")
        lines = [f"{address} {node}\n" for node, address in addresses.items()]
        self._hosts.write_text(Path("/etc/hosts").read_text() + "".join(lines))
        return bridge, addresses

    def _lay(self, node: str, address: str) -> None:
        space, outer = self._space(node), self._outer(node)
        _run("ip", "netns", "add", space)
        _run("ip", "link", "add", outer, "type", "veth", "peer", "name", INNER, "netns", space)
        _run("ip", "link", "set", outer, "master", self._bridge, "up")
        _run("ip", "-n", space, "link", "set", "lo", "up")
        _run("ip", "-n", space, "address", "add", address, "dev", INNER)
        _run("ip", "-n", space, "link", "set", INNER, "up")

    def remove(self) -> None:
        """Remove everything, even if incomplete, and end what still runs on the nodes; harmless if there is nothing."""
        spaces = [path.name for path in NAMESPACES.glob(f"{self._name}-*")]
        deadline = time.monotonic() + 10
        while pids := [int(pid) for space in spaces for pid in _run("ip", "netns", "pids", space).split()]:
            if time.monotonic() > deadline:
                raise ClusterError(f"processes {pids} live on after SIGKILL, in the namespaces {', '.join(spaces)}")
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        # Removing one end removes the pair at once; removing only the namespace does so a little later.
        for _, link in socket.if_nameindex():
            if link.startswith(f"{self._name}-"):
                _run("ip", "link", "delete", link)
        for space in spaces:
            _run("ip", "netns", "delete", space)

    def inside(self, node: str, words: list[str]) -> list[str]:
        """The command that runs ``words`` on the node, as the same process; ``words`` if it has no namespace."""
        if not self.has(node):
            return words
        enter = ["nsenter", f"--net={NAMESPACES / self._space(node)}", "--", "unshare", "--uts", "--mount", "--"]
        return [*enter, "sh", "-c", ENTER, "sh", node, str(self._hosts), *words]

    def has(self, node: str) -> bool:
        """True if the node has a namespace."""
        return (NAMESPACES / self._space(node)).exists()

    def slow(self, node: str, rate_mbit: float, latency_ms: float = 0) -> None:
        """Limit each direction of the node's cable to ``rate_mbit``, delayed by ``latency_ms``.

        Raises:
            ClusterError: the node has no cable, or the kernel lacks the module that delays packets.
        """
        if latency_ms:
            queue = ["netem", "delay", f"{latency_ms}ms", "rate", f"{rate_mbit}mbit"]
        else:
            # Enough for the bytes of one tick of the slowest kernel clock (100 Hz), and for one packet before
            # segmentation.
            burst = max(65_536, int(rate_mbit * 1e6 / 8 / 100))
            queue = ["tbf", "rate", f"{rate_mbit}mbit", "burst", str(burst), "latency", "50ms"]
        try:
            self._queue(node, *queue)
        except ClusterError as error:
            if latency_ms:
                raise ClusterError(f"{error} (a latency needs a kernel with sch_netem)") from error
            raise

    def cut(self, node: str) -> None:
        """Make the switch silently drop all packets from and to the node.

        Raises:
            ClusterError: the node has no cable.
        """
        self._require_cable(node)
        _run("ip", "link", "set", self._outer(node), "nomaster")

    def mend(self, node: str) -> None:
        """Let the node's cable pass everything again; harmless if it does already."""
        self._queue(node, "noqueue")
        _run("ip", "link", "set", self._outer(node), "master", self._bridge)

    def _queue(self, node: str, *queue: str) -> None:
        self._require_cable(node)
        _run("tc", "-n", self._space(node), "qdisc", "replace", "dev", INNER, "root", *queue)
        _run("tc", "qdisc", "replace", "dev", self._outer(node), "root", *queue)

    def _require_cable(self, node: str) -> None:
        if not self.has(node):
            raise ClusterError(f"found no cable of its own at {node}; start the cluster with --namespaces")

    def _space(self, node: str) -> str:
        return f"{self._name}-{node}"

    def _outer(self, node: str) -> str:
        return f"{self._name}-{_number(node)}"


class Processor:
    """The processor time of each node of one cluster: a control group per node, version 1 or 2."""

    def __init__(self, folder: Path, mounted: Path = Path("/sys/fs/cgroup")) -> None:
        self._name = short_name(folder)
        self._old = (mounted / "cpu" / "cgroup.procs").exists()
        self._root = mounted / "cpu" if self._old else mounted

    def add(self, node: str, pid: int) -> None:
        """Put a process and all its later children into the node's control group, if groups can be created.

        If they cannot, the node works all the same, but :meth:`slow` has no effect.
        """
        group = self._group(node)
        try:
            if not self._old:
                (self._root / "cgroup.subtree_control").write_text("+cpu")
            group.mkdir(exist_ok=True)
            (group / "cgroup.procs").write_text(str(pid))
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()

    def slow(self, node: str, share: float) -> None:
        """Limit everything on the node to ``share`` cores in total: 0.25 is a quarter of one core, 2 is two cores.

        Raises:
            ClusterError: the share is too small for the kernel, or the node has no control group.
        """
        if share * PERIOD_US < 1000:
            raise ClusterError(f"found a share of {share}; the kernel knows no less than {1000 / PERIOD_US}")
        self._set(node, int(share * PERIOD_US))

    def mend(self, node: str) -> None:
        """Remove the limit of the node; harmless if there is none."""
        self._set(node, None)

    def prioritize(self, weight: int) -> None:
        """Give each node the weight of ``weight`` processes outside the cluster; 1 is the kernel's default."""
        for group in self._root.glob(f"{self._name}-*"):
            if self._old:
                (group / "cpu.shares").write_text(str(1024 * weight))
            else:
                (group / "cpu.weight").write_text(str(100 * weight))

    def remove(self) -> None:
        """Remove the control groups, after all their processes have ended."""
        for group in self._root.glob(f"{self._name}-*"):
            deadline = time.monotonic() + 5
            while True:
                try:
                    group.rmdir()
                    break
                except OSError:  # killed processes do not disappear at once
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.05)

    def _set(self, node: str, quota_us: int | None) -> None:
        group = self._group(node)
        if not group.exists():
            raise ClusterError(
                f"found no control group of {node}; start the cluster with --namespaces, "
                f"where control groups for cpu can be made under {self._root}"
            )
        if self._old:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us or -1))
        else:
            (group / "cpu.max").write_text(f"{quota_us or 'max'} {PERIOD_US}")

    def _group(self, node: str) -> Path:
        return self._root / f"{self._name}-{node}"


def _number(node: str) -> int:
    return int(node.removeprefix("node"))


def _free_subnet() -> ipaddress.IPv4Network:
    """A private subnet that overlaps with no route and no address of this machine."""
    output = _run("ip", "-4", "-oneline", "address") + " " + _run("ip", "-4", "route", "show", "table", "all")
    taken = []
    for word in output.split():
        with contextlib.suppress(ValueError):
            taken.append(ipaddress.IPv4Interface(word).network)
    free = [ipaddress.IPv4Network(f"10.{second}.{third}.0/24") for second in range(200, 250) for third in range(250)]
    random.shuffle(free)
    for subnet in free:
        if not any(subnet.overlaps(network) for network in taken):
            return subnet
    raise ClusterError("found no free subnet: this machine has routes to all of 10.200.0.0 to 10.249.255.255")


def _run(*words: str) -> str:
    program = program_path(words[0])
    if program is None:
        raise ClusterError(f"missing: {words[0]}")
    done = subprocess.run([program, *words[1:]], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        raise ClusterError(f"{' '.join(words)} ended with {done.returncode}: {(done.stderr or done.stdout).strip()}")
    return done.stdout
