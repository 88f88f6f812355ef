"""The ranks of a role: process group, device, and all collectives called outside DeepSpeed.

Each collective goes through :meth:`Ranks.collective`, so that the agent can tell a rank waiting in one from a rank that
never arrived.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from rlhf_core.errors import BadConfig, RlhfError, WorkerError
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.supervision import SuperviseSpec
from rlhf_core.schemas.trainers import NativeTrainer
from rlhf_core.training.types import Reporter, WorkerContext

Item = TypeVar("Item")

MAX_GATHERED_BYTES = 256 << 20
"""Longest value a rank may send the others, so that a corrupt length cannot exhaust memory."""

POLL_S, _LONGEST_POLL_S = 0.02, 0.5
"""First and longest interval at which a rank polls for what others set, in seconds."""


@dataclass(frozen=True)
class SequenceGroup:
    """The consecutive ranks that share each row, a part of its tokens each. All of them must make the same calls.

    The collectives are those of a forward or backward pass, so they are not counted as :meth:`Ranks.collective` does:
    a rank would wait for its GPU in every layer.
    """

    rank: int
    """Index of this rank in the group."""
    size: int
    process_group: Any

    def swap(self, parts: torch.Tensor) -> torch.Tensor:
        """Send the ``i``-th of ``[size, ...]`` parts to rank ``i``; returns the parts received, in rank order.

        Applied twice, it returns the original parts, so it is also its own derivative.
        """
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self.process_group)
        return received

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of the values of the ranks, as a new tensor."""
        values = values.clone()
        dist.all_reduce(values, group=self.process_group)
        return values

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """``[n]`` values of every rank, in rank order; ``n`` may differ from rank to rank."""
        own = torch.tensor([len(values)], device=values.device)
        sizes = [torch.zeros_like(own) for _ in range(self.size)]
        dist.all_gather(sizes, own, group=self.process_group)
        lengths = [int(size) for size in sizes]
        filled = torch.nn.functional.pad(values, (0, max(lengths) - len(values)))
        parts = [torch.empty_like(filled) for _ in lengths]
        dist.all_gather(parts, filled, group=self.process_group)
        return [part[:length] for part, length in zip(parts, lengths, strict=True)]


@dataclass(frozen=True)
class Ranks:
    """This rank and its peers. All ranks must call the same methods in the same order.

    Ranks that share rows (:attr:`sequence`) form a *replica* of the model, as in data parallelism: they process the
    same rows and compute the same figures, of which those of the first rank of each replica count.
    """

    rank: int
    num_ranks: int
    device: torch.device
    reporter: Reporter
    store: Store
    """Key-value store of the job, for reaching peers without a collective."""
    sequence: SequenceGroup | None = None
    """The ranks that share each row with this one; None if every rank has its own rows."""

    @property
    def is_first(self) -> bool:
        """True for rank 0, the only one that writes shared files."""
        return self.rank == 0

    @property
    def num_replicas(self) -> int:
        """Number of parts into which the rows of a forward or backward pass are dealt."""
        return self.num_ranks // self._ranks_per_replica

    @property
    def replica(self) -> int:
        """Index of this rank's part."""
        return self.rank // self._ranks_per_replica

    @property
    def is_first_of_replica(self) -> bool:
        """True for the rank whose figures count for its replica."""
        return self.rank % self._ranks_per_replica == 0

    @property
    def _ranks_per_replica(self) -> int:
        return self.sequence.size if self.sequence is not None else 1

    def sharing_rows(self, sequence_parallel: int, timeout: timedelta | None = None) -> "Ranks":
        """The same ranks, of which ``sequence_parallel`` consecutive ones share each row. Collective.

        Args:
            timeout: longest wait in a collective of theirs; torch's own if omitted.

        Raises:
            BadConfig: their number is not a multiple of it.
        """
        if self.num_ranks % sequence_parallel:
            raise BadConfig(
                f"found trainer.sequence_parallel = {sequence_parallel} with {self.num_ranks} ranks; expected a "
                "divisor of the number of ranks"
            )
        if sequence_parallel == 1:
            return replace(self, sequence=None)
        with self.collective():
            own, _ = dist.new_subgroups(sequence_parallel, timeout=timeout)
        return replace(self, sequence=SequenceGroup(self.rank % sequence_parallel, sequence_parallel, own))

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        """Wrap a collective call: mark this rank as inside it until the result is available.

        NCCL only enqueues a collective. Without the synchronization, the rank would wait for its peers later, where it
        reads the result: to the agent this would be silence outside any collective, which looks like a hang.
        """
        with self.reporter.collective():
            yield
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

    def log(self, message: str) -> None:
        """Write a line to the worker's log, once for all ranks."""
        if self.is_first:
            own_line(message)

    def barrier(self) -> None:
        """Wait until every rank has arrived."""
        with self.collective():
            dist.barrier()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum over the ranks in double precision; integers up to 2^53 stay exact."""
        vector = torch.tensor(values, dtype=torch.float64, device=self.device)
        with self.collective():
            dist.all_reduce(vector)
        return [float(value) for value in vector.tolist()]

    def gather_numbers(self, values: Sequence[float]) -> list[list[float]]:
        """Gather every rank's numbers on every rank, in rank order and double precision. All ranks pass the same
        length."""
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        found = [torch.empty_like(own) for _ in range(self.num_ranks)]
        with self.collective():
            dist.all_gather(found, own)
        numbers: list[list[float]] = torch.stack(found).tolist()  # one device-to-host copy for all ranks
        return numbers

    def gather(self, value: Item) -> list[Item]:
        """Gather every rank's value on every rank, in rank order. For small JSON values: no tuples, no classes.

        Nothing is unpickled, so an attacker on the network between two ranks cannot execute code.

        Raises:
            WorkerError: a rank's value is longer than ``MAX_GATHERED_BYTES``.
        """
        content = json.dumps(value).encode()
        with self.collective():
            sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.num_ranks)]
            dist.all_gather(sizes, torch.tensor([len(content)], device=self.device))
            lengths = [_checked_length(rank, int(size)) for rank, size in enumerate(sizes)]
            parts = [torch.zeros(max(lengths), dtype=torch.uint8, device=self.device) for _ in lengths]
            dist.all_gather(parts, _padded(content, max(lengths), self.device))
        return [json.loads(_bytes(part, length)) for part, length in zip(parts, lengths, strict=True)]

    def from_first(self, value: Item) -> Item:
        """Broadcast rank 0's JSON value to every rank.

        Raises:
            WorkerError: the value is longer than ``MAX_GATHERED_BYTES``.
        """
        content = json.dumps(value).encode() if self.is_first else b""
        with self.collective():
            size = torch.tensor([len(content)], device=self.device)
            dist.broadcast(size, src=0)
            length = _checked_length(0, int(size))
            data = _padded(content, length, self.device)
            dist.broadcast(data, src=0)
        broadcast: Item = json.loads(_bytes(data, length))
        return broadcast

    def on_first(self, act: Callable[[], Item], raises: Sequence[type[RlhfError]] = ()) -> Item:
        """Call a function on rank 0 alone; every rank returns its JSON value, or raises its error of these kinds.

        Args:
            raises: kinds of errors that a message alone can create, with JSON attributes. An error of a subclass is
                raised as its kind, without notes. Any other ends rank 0 alone.
        """
        outcome: dict[str, Any] = {}
        if self.is_first:
            try:
                outcome = {"value": act()}
            except tuple(raises) as error:
                name = next(kind.__name__ for kind in raises if isinstance(error, kind))
                attributes = {key: value for key, value in vars(error).items() if key != "__notes__"}
                outcome = {"error": name, "message": str(error), "attributes": attributes}
        outcome = self.from_first(outcome)
        if "error" in outcome:
            kind = next(kind for kind in raises if kind.__name__ == outcome["error"])
            problem = kind(outcome["message"])
            for name, attribute in outcome["attributes"].items():
                # JSON has no tuples.
                setattr(problem, name, tuple(attribute) if isinstance(attribute, list) else attribute)
            raise problem
        value: Item = outcome["value"]
        return value

    def sum_over_replicas(self, values: Sequence[float]) -> list[float]:
        """:meth:`sum` of figures that the ranks of a replica have in common: each replica counts once."""
        return self.sum([value if self.is_first_of_replica else 0.0 for value in values])

    def numbers_of_replicas(self, values: Sequence[float]) -> list[list[float]]:
        """:meth:`gather_numbers` of figures that the ranks of a replica have in common: one list per replica."""
        return self.gather_numbers(values)[:: self._ranks_per_replica]

    def deal(self, items: Sequence[Item]) -> Sequence[Item]:
        """Return this rank's contiguous part of a global batch; the parts in rank order make up the batch."""
        return _part(items, self.rank, self.num_ranks)

    def deal_to_replicas(self, items: Sequence[Item]) -> Sequence[Item]:
        """:meth:`deal` for forward and backward passes: the ranks of a replica get the same part."""
        return _part(items, self.replica, self.num_replicas)

    def exchange(self, topic: str, content: dict[str, Any], wait_s: float) -> dict[int, dict[str, Any]]:
        """Exchange small values without a collective; works even when the ranks' collectives no longer match.

        Returns the values received within ``wait_s`` seconds; a rank that is busy elsewhere is missing.
        """
        received: dict[int, dict[str, Any]] = {}
        # One deadline for all ranks: separate ones would add up, over many silent ranks, to an apparent hang.
        deadline = time.monotonic() + wait_s
        try:
            self.store.set(f"{topic}/{self.rank}", json.dumps(content))
            for rank in range(self.num_ranks):
                with contextlib.suppress(TimeoutError):
                    received[rank] = json.loads(awaited(self.store, f"{topic}/{rank}", deadline - time.monotonic()))
            # Rank 0 hosts the store, so it must not exit before the others have read.
            self.store.add(f"{topic}/read", 1)
            if self.is_first:
                self._wait_for_readers(f"{topic}/read", len(received), wait_s)
        except RuntimeError:  # torch's own error for a lost store; a file store raises no other
            received.setdefault(self.rank, content)
        return received

    def _wait_for_readers(self, key: str, num_readers: int, wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        while self.store.add(key, 0) < num_readers and time.monotonic() < deadline:
            time.sleep(POLL_S)


def own_line(message: str) -> None:
    """Write a line to this rank's own log."""
    print(f"{utc_now():%Y-%m-%d %H:%M:%S} {message}", flush=True)


def awaited(store: Store, key: str, timeout_s: float) -> bytes:
    """Poll for a key that another rank sets. A blocking wait would lock the store for all other threads, and that of
    torch's file store polls only once a second.

    Raises:
        RuntimeError: torch's own, for a lost store.
        TimeoutError: the key was not set in time.
    """
    interval_s, deadline = POLL_S, time.monotonic() + timeout_s
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{key} was not set within {timeout_s:.0f} s")
        time.sleep(interval_s)
        interval_s = min(2 * interval_s, _LONGEST_POLL_S)
    return bytes(store.get(key))


def init_process_group(context: WorkerContext) -> Ranks:
    """Join the ranks of this role (gloo on CPU, NCCL on GPU), and set threads and determinism.

    Ranks on a single node rendezvous through the file ``context.store``, which needs no port. Otherwise they rendezvous
    at MASTER_ADDR and MASTER_PORT, where agent 0 hosts a store (the agent sets the variables).

    Raises:
        WorkerError: the spec asks for GPUs, but none is visible to this rank.
    """
    spec = context.spec
    device = _device(spec.resources.gpus_per_node, context.local_rank)
    torch.set_num_threads(spec.resources.cpus_per_rank)
    make_deterministic(device, on_gpus=isinstance(spec.trainer, NativeTrainer) and spec.trainer.deterministic)
    timeout = collective_timeout(spec.supervise)
    with context.reporter.collective():
        store, rank, num_ranks = _rendezvous(context, timeout)
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


def _rendezvous(context: WorkerContext, timeout: timedelta) -> tuple[Store, int, int]:
    if context.store is not None:
        return FileStore(str(context.store), context.num_ranks), context.rank, context.num_ranks
    store, rank, num_ranks = next(iter(rendezvous("env://", context.rank, context.num_ranks, timeout=timeout)))
    return store, rank, num_ranks


def leave_process_group(ranks: Ranks) -> None:
    """Leave the process group after a role succeeds. After an error this is skipped: the process ends anyway."""
    ranks.barrier()
    dist.destroy_process_group()


def collective_timeout(supervise: SuperviseSpec) -> timedelta:
    """``collective_timeout_s`` as torch takes it."""
    return timedelta(seconds=supervise.collective_timeout_s)


def make_deterministic(device: torch.device, *, on_gpus: bool) -> None:
    """Make the same inputs give the same bits in every run, given the same kind of machine and number of threads.

    On a GPU this costs time, so it has to be asked for: the backward pass of attention in bfloat16 then takes twice as
    long or more (docs/decisions/0049). Without it, that pass adds up its parts in any order.

    Args:
        on_gpus: also on GPUs. An operation without a deterministic version then raises RuntimeError when it is called.
    """
    is_gpu = device.type == "cuda"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(on_gpus or not is_gpu)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time, changes nothing
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.benchmark = False


def _part(items: Sequence[Item], index: int, num_parts: int) -> Sequence[Item]:
    count = len(items)
    return items[count * index // num_parts : count * (index + 1) // num_parts]


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
        tool = "rocm-smi" if torch.version.hip else "nvidia-smi"
        raise WorkerError(
            f"resources.gpus_per_node is {gpus_per_node}, but torch finds {visible} GPUs on this node and rank "
            f"{local_rank} of the node has none; check the driver ({tool}) and CUDA_VISIBLE_DEVICES"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
