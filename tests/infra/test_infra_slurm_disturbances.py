"""Disturbances of single nodes of the throw-away Slurm: each takes effect on its node only."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_tools import until
from slurm_cluster import WHY_NO_NAMESPACES, needs_namespaces, needs_slurm, node_space, throwaway

CLUSTER = Path(__file__).parents[2] / "infra" / "slurm" / "cluster.py"
needs_compiler = pytest.mark.skipif(node_space.program_path("cc") is None, reason="no C compiler")

# The first task of the step receives ``NUM_BYTES`` from the second, and then sends as many: seconds for each direction.
TRANSFER = """
import os, socket, subprocess, sys, time
NUM_BYTES = 8_000_000
names = subprocess.run(["scontrol", "show", "hostnames"], capture_output=True, text=True).stdout.split()

def receive(link):
    left = NUM_BYTES
    while left:
        left -= len(link.recv(min(left, 1 << 20)))

if os.environ["SLURMD_NODENAME"] == names[0]:
    with socket.create_server(("", 29501)) as server:
        link, _ = server.accept()
        start = time.monotonic()
        receive(link)
        middle = time.monotonic()
        link.sendall(bytes(NUM_BYTES))
        link.recv(1)
        print(middle - start, time.monotonic() - middle)
else:
    for _ in range(100):
        try:
            link = socket.create_connection((names[0], 29501))
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    link.sendall(bytes(NUM_BYTES))
    receive(link)
    link.sendall(b".")
"""
# Seconds of CPU time that a busy loop gets in one second.
BUSY = """
import time
end = time.monotonic() + 1
while time.monotonic() < end:
    pass
print(time.process_time())
"""
CLOCKS = "import time; print(time.time(), time.monotonic())"
# Waiting one to two seconds for a wall-clock deadline, in each of two ways.
WAITS = """
import ctypes, threading, time

class When(ctypes.Structure):
    _fields_ = [("s", ctypes.c_long), ("ns", ctypes.c_long)]

c = ctypes.CDLL(None)
start = time.monotonic()
deadline = When(int(time.time()) + 2, 0)
condition, mutex, semaphore = (ctypes.create_string_buffer(128) for _ in range(3))
c.pthread_mutex_lock(mutex)
c.pthread_cond_timedwait(condition, mutex, ctypes.byref(deadline))
c.sem_timedwait(semaphore, ctypes.byref(deadline))
print(time.monotonic() - start)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[throwaway.Cluster]:
    with throwaway.Cluster(tmp_path_factory.mktemp("slurm"), namespaces=not WHY_NO_NAMESPACES).running() as cluster:
        yield cluster


def on_all(cluster: throwaway.Cluster, program: str, *options: str) -> dict[str, str]:
    """Output of a shell program on each node."""
    output = cluster.command("srun", "-N4", *options, "sh", "-c", f'echo "$SLURMD_NODENAME" "$({program})"')
    return {line.partition(" ")[0]: line.partition(" ")[2] for line in output.splitlines()}


def python_on(cluster: throwaway.Cluster, node: str, program: str) -> list[float]:
    output = cluster.command("srun", "-N1", f"--nodelist={node}", sys.executable, "-c", program)
    return [float(word) for word in output.split()]


def transfer(cluster: throwaway.Cluster, one: str, other: str) -> list[float]:
    """Seconds to transfer 8 MB to the one node, and for the same amount back."""
    output = cluster.command("srun", "-N2", f"--nodelist={one},{other}", sys.executable, "-c", TRANSFER)
    return [float(word) for word in output.split()]


@needs_namespaces
def test_a_slow_link_is_slow_in_both_directions_until_it_is_repaired(cluster: throwaway.Cluster) -> None:
    before = transfer(cluster, "node1", "node2")
    cluster.slow_link("node2", rate_mbit=50)
    slow, elsewhere = transfer(cluster, "node1", "node2"), transfer(cluster, "node3", "node4")
    cluster.mend_link("node2")
    after = transfer(cluster, "node1", "node2")
    print(f"8 MB there and back, s: {before} before, {slow} slow, {elsewhere} elsewhere, {after} after")
    assert min(slow) >= 5 * max(*before, *elsewhere, *after)


def connecting(cluster: throwaway.Cluster) -> str:
    """Result of a connection from node1 to a port of node2 without a listener."""
    program = (
        "import socket\n"
        "try: socket.create_connection(('node2', 9), timeout=2)\n"
        "except OSError as error: print(type(error).__name__)"
    )
    words = cluster._network.inside("node1", [sys.executable, "-c", program])
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


@needs_namespaces
def test_a_cut_link_drops_packets_without_refusal_until_it_is_repaired(cluster: throwaway.Cluster) -> None:
    assert connecting(cluster) == "ConnectionRefusedError"
    cluster.cut_link("node2")
    assert connecting(cluster) == "TimeoutError"
    cluster.mend_link("node2")
    assert connecting(cluster) == "ConnectionRefusedError"


@needs_namespaces
def test_a_delayed_link_is_late_if_the_kernel_can_delay_packets(cluster: throwaway.Cluster) -> None:
    try:
        cluster.slow_link("node2", rate_mbit=1000, latency_ms=200)
    except throwaway.ClusterError as error:
        pytest.skip(str(error))
    try:
        start = time.monotonic()
        transfer(cluster, "node1", "node2")
        assert time.monotonic() - start > 0.4
    finally:
        cluster.mend_link("node2")


@needs_namespaces
def test_a_slow_processor_slows_its_whole_node_until_it_is_repaired(cluster: throwaway.Cluster) -> None:
    if not list(cluster._processor._root.glob(f"{node_space.short_name(cluster.folder)}-*")):
        pytest.skip("control groups for cpu cannot be made here")
    share, limit = 0.1, 0.2  # some periods begin and end within the second
    cluster.prioritize_cpu(100)  # other tests take their share

    def require_full_speed(node: str) -> None:
        until(lambda: max(python_on(cluster, node, BUSY)) > limit, f"{node} at full speed")

    require_full_speed("node3")
    cluster.slow_cpu("node3", share)
    assert max(*python_on(cluster, "node3", BUSY), *python_on(cluster, "node3", BUSY)) < limit
    require_full_speed("node4")
    cluster.mend_cpu("node3")
    require_full_speed("node3")
    cluster.prioritize_cpu(1)


@needs_namespaces
def test_a_running_step_is_slowed_too(cluster: throwaway.Cluster) -> None:
    if not list(cluster._processor._root.glob(f"{node_space.short_name(cluster.folder)}-*")):
        pytest.skip("control groups for cpu cannot be made here")
    output = cluster.folder / "running.out"
    busy = BUSY.replace("+ 1", "+ 3")
    with subprocess.Popen(
        ["srun", "-N1", "--nodelist=node3", f"--output={output}", sys.executable, "-c", busy],
        env=cluster._full_environment(),
    ):
        time.sleep(0.7)
        cluster.slow_cpu("node3", 0.1)
    cluster.mend_cpu("node3")
    assert float(output.read_text()) < 2


@needs_slurm
def test_variables_are_set_and_unset_on_one_node_only(
    cluster: throwaway.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_0")
    cluster.variables("node2", NCCL_ALGO="Tree, or 'Ring'", NPROC_PER_NODE=7, NCCL_IB_HCA=None)
    shown = 'echo "$NCCL_ALGO|$NPROC_PER_NODE|$NCCL_IB_HCA"'
    assert on_all(cluster, shown) == {
        "node1": "||mlx5_0",
        "node2": "Tree, or 'Ring'|7|",
        "node3": "||mlx5_0",
        "node4": "||mlx5_0",
    }
    cluster.variables("node2")
    assert set(on_all(cluster, shown).values()) == {"||mlx5_0"}


@needs_slurm
def test_variables_of_the_first_node_do_not_reach_the_others_through_the_batch_script(
    cluster: throwaway.Cluster,
) -> None:
    cluster.variables("node1", ODD="yes")
    output = cluster.folder / "batch.out"
    wrapped = "--wrap=srun sh -c 'echo $SLURMD_NODENAME $ODD'"
    cluster.command("sbatch", "--wait", "-N4", f"--output={output}", wrapped)
    cluster.variables("node1")
    assert sorted(output.read_text().splitlines()) == ["node1 yes", "node2", "node3", "node4"]


@needs_slurm
def test_a_value_of_two_lines_is_refused(cluster: throwaway.Cluster) -> None:
    with pytest.raises(throwaway.ClusterError, match="ODD with more than one line"):
        cluster.variables("node1", ODD="a\nb")


@needs_slurm
@needs_compiler
def test_a_wrong_clock_is_seen_on_its_node_only(cluster: throwaway.Cluster) -> None:
    cluster.clock("node3", 3600)
    try:
        now = time.time()
        seen = {name: float(date) - now for name, date in on_all(cluster, "date +%s.%N").items()}
        wall, since_start = python_on(cluster, "node3", CLOCKS)
    finally:
        cluster.clock("node3", 0)
    assert 3500 < seen.pop("node3") < 3700
    assert all(-60 < ahead < 60 for ahead in seen.values())
    assert wall - time.time() > 3500
    assert abs(since_start - time.monotonic()) < 60
    assert abs(python_on(cluster, "node3", CLOCKS)[0] - time.time()) < 60


@needs_slurm
@needs_compiler
@pytest.mark.parametrize("offset_s", [3600, -3600])
def test_a_wrong_clock_does_not_change_how_long_a_wait_lasts(cluster: throwaway.Cluster, offset_s: int) -> None:
    cluster.clock("node3", offset_s)
    try:
        (lasted,) = python_on(cluster, "node3", WAITS)
    finally:
        cluster.clock("node3", 0)
    assert 0.9 < lasted < 30


@needs_namespaces
def test_every_disturbance_is_a_command(cluster: throwaway.Cluster) -> None:
    def command(action: str, *words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, CLUSTER, action, cluster.folder, *words]
        return subprocess.run(line, capture_output=True, text=True, check=False)

    assert command("slow-link", "node4", "100").returncode == 0
    inside = cluster.command("srun", "--nodelist=node4", "tc", "qdisc", "show", "dev", "eth0")
    assert "tbf" in inside
    assert command("mend-link", "node4").returncode == 0
    assert "tbf" not in cluster.command("srun", "--nodelist=node4", "tc", "qdisc", "show", "dev", "eth0")
    assert command("variables", "node4", "ODD=a=b", "HOME").returncode == 0
    assert on_all(cluster, "echo $ODD$HOME")["node4"] == "a=b"
    assert command("variables", "node4").returncode == 0
    unknown = command("clock", "node9", "0")
    assert unknown.returncode == 1
    assert "found node9; the nodes of" in unknown.stderr


@needs_slurm
def test_without_namespaces_a_link_cannot_be_slowed_and_a_new_cluster_is_undisturbed(tmp_path: Path) -> None:
    with throwaway.Cluster(tmp_path, nodes=1).running() as cluster:
        for disturb in (lambda: cluster.slow_link("node1", 100), lambda: cluster.slow_cpu("node1", 0.5)):
            with pytest.raises(throwaway.ClusterError, match="start the cluster with --namespaces"):
                disturb()
        cluster.variables("node1", ODD="yes")
        assert cluster.command("srun", "sh", "-c", "echo $ODD") == "yes"
    with cluster.running():
        assert cluster.command("srun", "sh", "-c", "echo $ODD") == ""


def test_control_groups_of_the_second_version_are_written_too(tmp_path: Path) -> None:
    processor = node_space.Processor(tmp_path, mounted=tmp_path)
    processor.add("node1", 1)
    group = tmp_path / f"{node_space.short_name(tmp_path)}-node1"
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
    assert (group / "cgroup.procs").read_text() == "1"
    processor.slow("node1", 0.25)
    assert (group / "cpu.max").read_text() == "25000 100000"
    processor.mend("node1")
    assert (group / "cpu.max").read_text() == "max 100000"
    with pytest.raises(throwaway.ClusterError, match=r"a share of 0.001"):
        processor.slow("node1", 0.001)
