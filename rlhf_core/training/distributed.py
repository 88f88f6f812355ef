"""The ranks of a role: process group, device, and every collective that is called outside DeepSpeed.

Each collective goes through ``reporter.collective()``, so that the agent can tell a rank that waits in one from a rank
that never came.
"""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from rlhf_core.errors import WorkerError
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.supervision import SuperviseSpec
from rlhf_core.training.types import Reporter, WorkerContext

Item = TypeVar("Item")

MAX_GATHERED_BYTES = 256 << 20
"""Longest value that a rank may tell the others: a length that is no rank's own must not take all memory."""

_POLL_S = 0.02
_EVIDENCE_S = 600.0
"""Time left to the agent to collect evidence before a collective gives up by itself, in seconds."""


@dataclass(frozen=True)
class Ranks:
    """This rank and its peers. All ranks must call the same methods in the same order."""

    rank: int
    num_ranks: int
    device: torch.device
    reporter: Reporter
    store: Store
    """Key-value store of the job: reaches peers without a collective."""

    @property
    def is_first(self) -> bool:
        """True for rank 0, the only one that writes shared files."""
        return self.rank == 0

    def log(self, message: str) -> None:
        """A line for the worker's log, once for all ranks."""
        if self.is_first:
            print(f"{utc_now():%Y-%m-%d %H:%M:%S} {message}", flush=True)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        with self.reporter.collective():
            dist.barrier()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over the ranks, in double precision; integers up to 2^53 stay exact."""
        vector = torch.tensor(values, dtype=torch.float64, device=self.device)
        with self.reporter.collective():
            dist.all_reduce(vector)
        return [float(value) for value in vector.tolist()]

    def gather_numbers(self, values: Sequence[float]) -> list[list[float]]:
        """Numbers of every rank in rank order, on every rank, in double precision. All ranks bring the same length."""
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        found = [torch.empty_like(own) for _ in range(self.num_ranks)]
        with self.reporter.collective():
            dist.all_gather(found, own)
        numbers: list[list[float]] = torch.stack(found).tolist()  # one copy from the device for all ranks
        return numbers

    def gather(self, value: Item) -> list[Item]:
        """Every rank's value in rank order, on every rank. For small things that JSON knows: no tuples, no classes.

        Nothing is unpickled: whoever comes between two ranks must not get code to run.

        Raises:
            WorkerError: a rank's value is longer than ``MAX_GATHERED_BYTES``.
        """
        content = json.dumps(value).encode()
        with self.reporter.collective():
            sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.num_ranks)]
            dist.all_gather(sizes, torch.tensor([len(content)], device=self.device))
            lengths = [_checked_length(rank, int(size)) for rank, size in enumerate(sizes)]
            parts = [torch.zeros(max(lengths), dtype=torch.uint8, device=self.device) for _ in lengths]
            dist.all_gather(parts, _padded(content, max(lengths), self.device))
        return [json.loads(_bytes(part, length)) for part, length in zip(parts, lengths, strict=True)]

    def from_first(self, text: str) -> str:
        """Rank 0's text, on every rank.

        Raises:
            WorkerError: it is longer than ``MAX_GATHERED_BYTES``.
        """
        content = json.dumps(text).encode() if self.is_first else b""
        with self.reporter.collective():
            size = torch.tensor([len(content)], device=self.device)
            dist.broadcast(size, src=0)
            length = _checked_length(0, int(size))
            data = _padded(content, length, self.device)
            dist.broadcast(data, src=0)
        told: str = json.loads(_bytes(data, length))
        return told

    def deal(self, items: Sequence[Item]) -> Sequence[Item]:
        """This rank's contiguous part of a global batch; the parts of all ranks, in rank order, make up the batch."""
        count = len(items)
        return items[count * self.rank // self.num_ranks : count * (self.rank + 1) // self.num_ranks]

    def tell(self, topic: str, content: dict[str, Any], wait_s: float) -> dict[int, dict[str, Any]]:
        """Exchange a few facts without a collective: works when the ranks' collectives no longer match.

        Returns what each rank told within ``wait_s`` seconds; a rank that is busy with something else is missing.
        """
        answers: dict[int, dict[str, Any]] = {}
        # One deadline for all: with one for each rank, many silent ones would add up to what looks like a hang.
        deadline = time.monotonic() + wait_s
        try:
            self.store.set(f"{topic}/{self.rank}", json.dumps(content))
            for rank in range(self.num_ranks):
                key = f"{topic}/{rank}"
                if not self._comes(key, deadline):
                    continue
                answers[rank] = json.loads(self.store.get(key))
            # Rank 0 holds the store: it must not end before the others have read.
            self.store.add(f"{topic}/read", 1)
            if self.is_first:
                self._wait_for_readers(f"{topic}/read", len(answers), wait_s)
        except RuntimeError:  # torch's own for a store that is gone; a file store has no other
            answers.setdefault(self.rank, content)
        return answers

    def _comes(self, key: str, deadline: float) -> bool:
        """True if a key is in the store by then. The wait of torch's file store looks only once a second."""
        while not self.store.check([key]):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _wait_for_readers(self, key: str, num_readers: int, wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        while self.store.add(key, 0) < num_readers and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def init_process_group(context: WorkerContext) -> Ranks:
    """Join the ranks of this role: gloo on CPU, NCCL on GPU; threads and determinism are set on the way.

    Ranks of one node meet in the file ``context.store``: no port is opened for that. All others meet at MASTER_ADDR and
    MASTER_PORT, where agent 0 keeps a store (torch elastic sets the variables).

    Raises:
        WorkerError: the spec asks for GPUs and this node shows none to this rank.
    """
    spec = context.spec
    device = _device(spec.resources.gpus_per_node, context.local_rank)
    torch.set_num_threads(spec.resources.cpus_per_rank)
    make_deterministic(device)
    timeout = collective_timeout(spec.supervise)
    with context.reporter.collective():
        store, rank, num_ranks = _meet(context, timeout)
        store.set_timeout(timeout)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("process_group", store),
            rank=rank,
            world_size=num_ranks,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
    ranks = Ranks(rank, num_ranks, device, context.reporter, PrefixStore("ranks", store))
    ranks.log(f"{context.role}: {num_ranks} ranks on {device.type}, {torch.get_num_threads()} threads each")
    return ranks


def _meet(context: WorkerContext, timeout: timedelta) -> tuple[Store, int, int]:
    if context.store is not None:
        return FileStore(str(context.store), context.num_ranks), context.rank, context.num_ranks
    store, rank, num_ranks = next(iter(rendezvous("env://", context.rank, context.num_ranks, timeout=timeout)))
    return store, rank, num_ranks


def leave_process_group(ranks: Ranks) -> None:
    """Part from the other ranks at the good end of a role. After an error nobody waits: the process ends anyway."""
    ranks.barrier()
    dist.destroy_process_group()


def collective_timeout(supervise: SuperviseSpec) -> timedelta:
    """Time after which a collective gives up: longer than the agent takes to find a hang and its cause.

    A collective that gives up first would reset its peers' connections and destroy the evidence.
    """
    longest_floor_s = max(supervise.floor_s, supervise.setup_floor_s)
    return timedelta(seconds=supervise.gap_factor * longest_floor_s + _EVIDENCE_S)


def make_deterministic(device: torch.device) -> None:
    """The same inputs give the same bits, run after run, on the same kind of machine and the same number of threads.

    On CUDA this is a wish: an operation without a deterministic version warns instead of ending the run.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=device.type == "cuda")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time, changes nothing
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.benchmark = False


def _checked_length(rank: int, length: int) -> int:
    if not 0 <= length <= MAX_GATHERED_BYTES:
        raise WorkerError(f"rank {rank} announced {length} bytes for all ranks, expected at most {MAX_GATHERED_BYTES}")
    return length


def _padded(content: bytes, length: int, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(content.ljust(length, b"\0")), dtype=torch.uint8).to(device)


def _bytes(data: torch.Tensor, length: int) -> bytes:
    return data[:length].cpu().numpy().tobytes()


def _device(gpus_per_node: int, local_rank: int) -> torch.device:
    if gpus_per_node == 0:
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if local_rank >= visible:
        raise WorkerError(
            f"resources.gpus_per_node is {gpus_per_node}, but this node shows {visible} GPUs to torch and rank "
            f"{local_rank} of the node has none; check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
