"""Measurement of a node before training: its devices, its links, and the correctness of collectives.

One independent process per rank: a hang affects only that process, and its agent ends it at the deadline. Every
completed step prints one line, so that a rank's progress is known even if it gets stuck.

Nodes first communicate in pairs, each with its own process group, so that a slow or dead link identifies two nodes.
Rounds along a ring give every node two partners; one that is slow with both is to blame (the pairwise check of DLRover,
https://github.com/intelligent-machine-learning/dlrover). Then all ranks communicate. Everything is measured twice and
the better result counts, since a single slow result may be chance.
"""

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from rlhf_core.survival import Survived

MATMUL_S = 0.2
"""Duration of one measurement of matrix products, in seconds."""
PAIR_S = 0.1
"""Duration of one measurement of a pair, in seconds."""
REPEATS = 2
LATENCY_ROUNDS = 20
CPU_SIZE, GPU_SIZE = 256, 8192
CPU_BYTES, GPU_BYTES = 1 << 20, 256 << 20
"""Bytes per exchange of a pair: enough to saturate the link."""
MAX_EXCHANGES = 50


class Late(Exception):
    """Other ranks did not come in time. Its name begins the rank's problem, by which this is told from a cause."""


@dataclass(frozen=True)
class MeasuringPlace:
    """Position of this process among the ranks, and how they rendezvous."""

    node: int
    """Index of its node in the allocation."""
    num_nodes: int
    local_rank: int
    ranks_per_node: int
    store: str
    """``host:port`` of the agents' store, or the path of a file if there is only one node."""
    prefix: str
    """Prefix of the ranks' keys in the store."""
    gpu: bool
    start_s: float
    """Timeout in seconds for all ranks to start."""
    timeout_s: float
    """Timeout in seconds for one step that involves other ranks."""

    @property
    def rank(self) -> int:
        """Rank over all nodes."""
        return self.node * self.ranks_per_node + self.local_rank

    @property
    def world(self) -> int:
        """Number of ranks over all nodes."""
        return self.num_nodes * self.ranks_per_node


def run(place: dict[str, Any]) -> int:
    """Measure, and print one JSON object per step. Returns the exit code.

    Args:
        place: The fields of :class:`MeasuringPlace`.
    """
    with Survived() as found:  # from torch, CUDA or a network: the error is the finding
        for line in _steps(MeasuringPlace(**place)):
            print(json.dumps(line), flush=True)
        return 0
    lines = str(found.error).strip().splitlines()
    print(json.dumps({"problem": f"{type(found.error).__name__}: {lines[0] if lines else ''}"}), flush=True)
    return 1


def rounds(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Pairs of nodes that exchange data, by round: a ring in two halves; an odd ring is closed in a third round.

    Every node has two partners, or one if there are only two nodes, and at most one in each round.
    """
    if num_nodes < 2:
        return []
    ring = [(node, (node + 1) % num_nodes) for node in range(num_nodes)]
    if num_nodes == 2:
        return [ring[:1]]
    even, odd = ring[0 : num_nodes - 1 : 2], ring[1 : num_nodes - num_nodes % 2 : 2]
    closing = [ring[-1]] if num_nodes % 2 else []
    return [each for each in (even, odd, closing) if each]


# ---------------------------------------------------------------------------------------------------------------------
# The steps


def _steps(place: MeasuringPlace) -> Iterator[dict[str, Any]]:
    device = torch.device("cuda", place.local_rank) if place.gpu else torch.device("cpu")
    if place.gpu:
        torch.cuda.set_device(device)
        name = torch.cuda.get_device_name(device)
    else:
        name = f"cpu x {torch.get_num_threads()} threads"
    yield {"step": "started", "device": name}
    store = _store(place) if place.world > 1 else None
    if store is not None:
        _wait_for_all(place, store, "started")  # a rank that still imports would slow down the measurements of others
    yield {"step": "met"}
    first = _matmul(device)
    yield {"step": "matmul", **first}
    if store is not None:
        unreachable = set()
        for repeat in range(REPEATS):
            for number, pairs in enumerate(rounds(place.num_nodes)):
                peer = next((sum(pair) - place.node for pair in pairs if place.node in pair), None)
                if peer is None or peer in unreachable:
                    continue  # an unreachable peer would time out again
                result = _in_time(place, partial(_exchange, place, store, f"{repeat}.{number}", peer, device))
                result["peer"] = peer
                if "problem" in result:
                    unreachable.add(peer)
                yield {"pair": result}
        if unreachable:
            store.add("dead links", 1)
        yield {"step": "pairs"}
        _wait_for_all(place, store, "paired")
        if store.add("dead links", 0):
            raise RuntimeError("some links pass no data, so the rendezvous fails")
        group = _group(place, PrefixStore("all", store), place.rank, place.world)
        yield _step_result("all_reduce", _sum_problem(place, group, device))
        yield _step_result("all_gather", _parts_problem(place, group, device))
    second = _matmul(device)
    yield {"step": "done", **max(first, second, key=lambda one: one["tflops"])}


def _step_result(step: str, problem: str) -> dict[str, Any]:
    return {"step": step, "problem": f"{step}: {problem}"} if problem else {"step": step}


def _store(place: MeasuringPlace) -> Any:
    timeout = timedelta(seconds=place.timeout_s)
    store: Any
    if place.store.startswith("/"):
        store = FileStore(place.store, place.world)
    else:
        host, _, port = place.store.rpartition(":")
        store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    store.set_timeout(timeout)
    return PrefixStore(place.prefix, store)


def _wait_for_all(place: MeasuringPlace, store: Any, done: str) -> None:
    """Wait until all ranks have reached this point, so that a late rank is not mistaken for an unreachable one."""
    if store.add(done, 1) == place.world:
        store.set(f"all {done}", "")
    try:
        store.wait([f"all {done}"], timedelta(seconds=place.start_s))
    except RuntimeError as error:
        num_arrived = store.add(done, 0)
        raise Late(f"{num_arrived} of {place.world} ranks {done} within {place.start_s:.0f} s") from error


def _group(place: MeasuringPlace, store: Any, rank: int, size: int) -> Any:
    """Create a separate process group: it leaves no state behind, and connects only its own ranks."""
    timeout = timedelta(seconds=place.timeout_s)
    if not place.gpu:
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _matmul(device: torch.device) -> dict[str, float]:
    """Average speed of matrix products over a period, instead of the fastest one: a CPU quota throttles the process
    only at times.

    ``core_share`` is the CPU time used, relative to the maximum for the number of threads.
    """
    gpu = device.type == "cuda"
    size = GPU_SIZE if gpu else CPU_SIZE
    matrix = torch.ones(size, size, device=device, dtype=torch.bfloat16 if gpu else torch.float32)
    for _ in range(3):
        matrix @ matrix
    _synchronise(device)
    count, began_s, began_cpu_s = 0, time.perf_counter(), time.process_time()
    while (passed_s := time.perf_counter() - began_s) < MATMUL_S:
        matrix @ matrix
        _synchronise(device)
        count += 1
    share = 1.0 if gpu else min(1.0, (time.process_time() - began_cpu_s) / (passed_s * torch.get_num_threads()))
    return {"tflops": count * 2 * size**3 / passed_s / 1e12, "core_share": share}


def _in_time(place: MeasuringPlace, exchange: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Result of a pair's measurement, or a timeout: gloo tries to connect to an unreachable peer for a minute."""
    results: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    # A hung thread is abandoned: the process exits without waiting for it.
    threading.Thread(target=lambda: results.put(exchange()), daemon=True).start()
    try:
        return results.get(timeout=place.timeout_s)
    except queue.Empty:
        return {"problem": f"no response within {place.timeout_s:.0f} s"}


def _exchange(place: MeasuringPlace, store: Any, name: str, peer: int, device: torch.device) -> dict[str, Any]:
    """Exchange data with the same rank of another node; an error becomes the result."""
    low, high = sorted((place.node, peer))
    own = PrefixStore(f"{name}/{low}-{high}/{place.local_rank}", store)
    try:
        group = _group(place, own, int(place.node == high), 2)
        small = torch.ones(1, device=device)
        latencies = []
        for _ in range(LATENCY_ROUNDS):
            began_s = time.perf_counter()
            group.allreduce([small]).wait()
            _synchronise(device)
            latencies.append(time.perf_counter() - began_s)
        data = torch.ones((GPU_BYTES if place.gpu else CPU_BYTES) // 4, device=device)
        first_s = _time_exchange(group, data)
        # One of the two determines the count, as both must use the same one.
        if place.node == low:
            own.set("count", str(min(MAX_EXCHANGES, max(1, round(PAIR_S / first_s)))))
        count = min(MAX_EXCHANGES, int(own.get("count")))
        best_s = min(first_s, *(_time_exchange(group, data) for _ in range(count)))
    except RuntimeError as error:
        lines = str(error).strip().splitlines()
        return {"problem": _without_source_path(lines[0] if lines else type(error).__name__)}
    # An all-reduce of two sends the data once in each direction.
    return {"gb_s": data.numel() * 4 / best_s / 1e9, "latency_ms": 1e3 * min(latencies)}


def _time_exchange(group: Any, data: torch.Tensor) -> float:
    began_s = time.perf_counter()
    group.allreduce([data]).wait()
    _synchronise(data.device)
    return time.perf_counter() - began_s


def _without_source_path(error: str) -> str:
    """The end of torch's message, without the source path at its beginning."""
    return error.rpartition("] ")[2][:200]


def _sum_problem(place: MeasuringPlace, group: Any, device: torch.device) -> str:
    """Problem with an all-reduce, checked with whole numbers, whose sum is exact in any order; empty if there is
    none."""
    own = torch.arange(1024, device=device, dtype=torch.float32) % 7 + place.rank
    group.allreduce([own]).wait()
    world = place.world
    expected = (torch.arange(1024, device=device, dtype=torch.float32) % 7) * world + world * (world - 1) / 2
    wrong = int((own != expected).sum())
    return f"{wrong} of 1024 sums are wrong" if wrong else ""


def _parts_problem(place: MeasuringPlace, group: Any, device: torch.device) -> str:
    own = torch.full((256,), float(place.rank), device=device)
    parts = [torch.empty_like(own) for _ in range(place.world)]
    group.allgather([parts], [own]).wait()
    wrong = [str(rank) for rank, part in enumerate(parts) if not bool((part == rank).all())]
    return f"the parts of ranks {', '.join(wrong)} are wrong" if wrong else ""
