"""Throw-away Slurm nodes with networks of their own: they reach each other, and are removed without a trace."""

import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import WHY_NO_NAMESPACES, needs_namespaces, node_space, throwaway

CLUSTER = Path(__file__).parents[2] / "infra" / "slurm" / "cluster.py"
NODES = ["node1", "node2", "node3", "node4"]

# node2 sends a line to node1, on a port and by a name that are the nodes' own business.
GREET = """
import os, socket, time
if os.environ["SLURMD_NODENAME"] == "node1":
    with socket.create_server(("", 29500)) as server:
        caller, (address, _) = server.accept()
        print(address, caller.recv(100).decode(), flush=True)
else:
    for _ in range(100):
        try:
            with socket.create_connection(("node1", 29500)) as caller:
                caller.sendall(b"from " + socket.gethostname().encode())
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[throwaway.Cluster]:
    with throwaway.Cluster(tmp_path_factory.mktemp("slurm"), namespaces=True).running() as cluster:
        yield cluster
    assert traces(cluster.folder) == []


def traces(folder: Path) -> list[str]:
    """Remains of a cluster on the machine outside its folder."""
    name = node_space.short_name(folder)
    links = [link for _, link in socket.if_nameindex() if link.startswith(name)]
    spaces = node_space.NAMESPACES.glob(f"{name}*")
    groups = [group for where in (".", "cpu") for group in Path("/sys/fs/cgroup", where).glob(f"{name}*")]
    return [*links, *map(str, spaces), *map(str, groups)]


def addresses(cluster: throwaway.Cluster) -> dict[str, str]:
    """Node addresses, which the batch script of a run reads, too."""
    output = cluster.command("scontrol", "--oneliner", "show", "node")
    return dict(re.findall(r"NodeName=(\S+) .*NodeAddr=(\S+)", output))


@needs_namespaces
def test_each_node_has_its_own_address_and_host_name(cluster: throwaway.Cluster) -> None:
    addresses_of_nodes = addresses(cluster)
    assert sorted(addresses_of_nodes) == NODES
    assert len(set(addresses_of_nodes.values())) == 4
    output = cluster.command("srun", "-N4", "sh", "-c", "echo $SLURMD_NODENAME $(uname -n) $(ip -4 -o addr show eth0)")
    for line in output.splitlines():
        name, host, *rest = line.split()
        assert host == name
        assert any(word.startswith(addresses_of_nodes[name] + "/") for word in rest)


@needs_namespaces
def test_programs_of_two_nodes_connect_on_any_port_by_name_and_loopback_is_up(cluster: throwaway.Cluster) -> None:
    output = cluster.command("srun", "-N2", "--nodelist=node1,node2", sys.executable, "-c", GREET)
    assert output == f"{addresses(cluster)['node2']} from node2"
    assert "UP" in cluster.command("srun", "-N1", "ip", "link", "show", "lo")


@needs_namespaces
def test_a_batch_script_starts_steps_on_all_nodes(cluster: throwaway.Cluster) -> None:
    output = cluster.folder / "batch.out"
    command = ["sbatch", "--wait", "-N4", f"--output={output}", "--wrap=srun sh -c 'echo $SLURMD_NODENAME'"]
    cluster.command(*command)
    assert sorted(output.read_text().split()) == NODES


@needs_namespaces
def test_a_restarted_node_keeps_its_own_network(cluster: throwaway.Cluster) -> None:
    before = cluster.command("srun", "--nodelist=node3", "readlink", "/proc/self/ns/net")
    cluster.stop("slurmd-node3", signal.SIGKILL)
    throwaway.Cluster(cluster.folder).start("slurmd-node3")
    assert cluster.command("srun", "--nodelist=node3", "readlink", "/proc/self/ns/net") == before
    assert str(Path("/proc/self/ns/net").readlink()) != before


@needs_namespaces
def test_two_clusters_with_namespaces_live_side_by_side(cluster: throwaway.Cluster, tmp_path: Path) -> None:
    with throwaway.Cluster(tmp_path, nodes=2, namespaces=True).running() as other:
        assert set(addresses(other).values()).isdisjoint(addresses(cluster).values())
        assert len(other.command("srun", "-N2", "uname", "-n").split()) == 2
    assert traces(tmp_path) == []
    assert len(cluster.command("srun", "-N4", "uname", "-n").split()) == 4


@needs_namespaces
def test_leftovers_of_a_job_end_with_their_node(tmp_path: Path) -> None:
    with throwaway.Cluster(tmp_path, nodes=1, namespaces=True).running() as cluster:
        orphan = int(cluster.command("srun", "sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!"))
        assert throwaway._lives(orphan)
    assert not throwaway._lives(orphan)
    assert traces(tmp_path) == []


@needs_namespaces
@pytest.mark.parametrize("half", ["-br", "-2"])
def test_down_removes_the_leftovers_of_a_killed_up(tmp_path: Path, half: str) -> None:
    waited_for = node_space.short_name(tmp_path) + half
    with subprocess.Popen([sys.executable, CLUSTER, "up", tmp_path, "--namespaces"]) as up:
        deadline = time.monotonic() + 30
        while waited_for not in [link for _, link in socket.if_nameindex()] and time.monotonic() < deadline:
            time.sleep(0.001)
        up.kill()
    assert traces(tmp_path) != []
    subprocess.run([sys.executable, CLUSTER, "down", tmp_path], check=True)
    assert traces(tmp_path) == []


@pytest.mark.skipif(bool(WHY_NO_NAMESPACES) or not shutil.which("setpriv"), reason=WHY_NO_NAMESPACES or "no setpriv")
def test_a_missing_permission_is_named(tmp_path: Path) -> None:
    without = ["setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin"]
    done = subprocess.run(
        [*without, sys.executable, CLUSTER, "up", tmp_path, "--namespaces"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "no right to make network namespaces: this process lacks CAP_NET_ADMIN" in done.stderr
    assert traces(tmp_path) == []
