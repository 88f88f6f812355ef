"""Engines and trainers in separate processes, with faults that tests inject."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
import xxhash
from fork_server import fork_server
from gpu_stand_in import CpuForGpu, GlooForNccl
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from rlhf_core.errors import WeightSyncFailed
from rlhf_core.schemas.weight_sync import LinkBackend, Offer, Receipt, TensorEntry, WeightSyncReport
from rlhf_core.weight_sync import broadcast, broadcast_incoming, gpu_links, receiver
from rlhf_core.weight_sync.layout import buckets_of, bytes_of, entries_of
from rlhf_core.weight_sync.links import Link, LinkEnd
from rlhf_core.weight_sync.sender import Sender
from rlhf_core.weight_sync.session import synchronize

ANSWER_TIMEOUT_S = 120.0
"""Timeout for a machine that is busy with other work; no test waits for it to expire."""


@dataclass(frozen=True)
class Faults:
    """Faults of an engine that occur while it receives version 1."""

    die_at_bucket: int | None = None
    """SIGKILL itself after this many buckets."""
    stop_at_bucket: int | None = None
    """SIGSTOP itself after this many buckets."""
    refuses: bool = False
    """Refuses the version at once, before it makes links."""
    die_before_commit: bool = False
    """SIGKILL itself when told to commit."""
    die_after_receipt: bool = False
    """SIGKILL itself after answering the offer."""
    trusts_heads: bool = False
    """Negative control: accepts the sender's checksums as those of the received bytes."""
    keeps_first_share_only: bool = False
    """Negative control: receives the shares of all senders, and keeps only the first one."""
    trusts_deltas: bool = False
    """Negative control: applies a delta to any base, and trusts its digest."""
    leaves_on_gpu: bool = False
    """Negative control: relays the bytes that arrive at the GPU, and copies none of them to main memory."""
    links_meet: bool = False
    """Makes no link between GPUs, in no version, before it makes two of them."""
    fails_upstream: bool = False
    """Makes its link to its successor, and fails to make that to its predecessor."""
    has_gpu: bool = False
    """Has a GPU; otherwise it has a stand-in for one, if it is offered a link between GPUs."""


def digests(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Hash of every tensor."""
    return {name: xxhash.xxh3_64_hexdigest(bytes_of(tensor).numpy().data) for name, tensor in weights.items()}


def _engine(name: str, faults: Faults, pipe: Connection) -> None:
    if faults.has_gpu:
        torch.cuda.set_device(int(name.removeprefix("engine-")))
    else:
        gpu_links.Gpu = CpuForGpu  # type: ignore[misc, assignment]
    if faults.leaves_on_gpu:
        CpuForGpu.copy_out = lambda *_: None  # type: ignore[method-assign, assignment]
    if faults.links_meet:
        _let_links_meet()
    if faults.fails_upstream:
        _fail_upstream()
    if faults.trusts_heads:
        _trust_heads()
    if faults.keeps_first_share_only:
        _keep_first_share_only()
    if faults.trusts_deltas:
        _trust_deltas()
    own = receiver.Receiver(name)
    active_weights: dict[str, str] = {}
    while True:
        try:
            command, argument = pipe.recv()
        except EOFError:
            return
        try:
            answer = _answer(own, active_weights, faults, command, argument)
        except WeightSyncFailed as error:
            answer = error
        pipe.send(answer)
        if command == "receive" and faults.die_after_receipt and answer.version == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def _answer(own: receiver.Receiver, active_weights: dict[str, str], faults: Faults, command: str, argument: Any) -> Any:
    if command == "receive":
        offer = Offer.model_validate_json(argument)
        if faults.refuses and offer.manifest.version == 1:
            raise WeightSyncFailed(f"{own.name} has no room", own.name)
        return own.receive(offer, _beat_with(faults if offer.manifest.version == 1 else Faults())).receipt
    if command == "commit":
        if faults.die_before_commit and argument == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.perf_counter()
        active_weights |= digests(dict(own.commit(argument).tensors()))
        return time.perf_counter() - begin
    if command == "abort":
        return own.abort(argument)
    return own.version, dict(active_weights)


def _beat_with(faults: Faults) -> Callable[[], None]:
    done = 0

    def beat() -> None:
        nonlocal done
        done += 1
        if done == faults.die_at_bucket:
            os.kill(os.getpid(), signal.SIGKILL)
        if done == faults.stop_at_bucket:
            os.kill(os.getpid(), signal.SIGSTOP)

    return beat


def _let_links_meet() -> None:
    make, both = CpuForGpu.group, threading.Barrier(2, timeout=10.0)

    def make_beside_the_other(self: CpuForGpu, store: Store, rank: int, connect_timeout_s: float) -> GlooForNccl:
        both.wait()
        return make(self, store, rank, connect_timeout_s)

    CpuForGpu.group = make_beside_the_other  # type: ignore[method-assign]


def _fail_upstream() -> None:
    make, is_made = gpu_links.connect, threading.Event()

    def make_downstream(backend: LinkBackend, store: Store, key: str, end: LinkEnd) -> Link:
        if end.is_source:
            link = make(backend, store, key, end)
            is_made.set()
            return link
        is_made.wait(10.0)
        raise WeightSyncFailed(f"failed to make a link with {end.peer}", end.peer)

    broadcast_incoming.connect = make_downstream  # type: ignore[attr-defined]


def _trust_heads() -> None:
    announced: list[bytes] = []
    receive = broadcast_incoming._Relay._receive

    def receive_and_believe(self: Any, index: int) -> tuple[Tensor, Tensor]:
        head, memory = receive(self, index)
        announced.append(bytes(head[16:].tolist()))
        return head, memory

    broadcast_incoming._Relay._receive = receive_and_believe  # type: ignore[method-assign]
    broadcast_incoming.checksum = lambda data: announced[-1]  # type: ignore[attr-defined]


def _keep_first_share_only() -> None:
    fill = broadcast_incoming._PlaceInChain.fill

    def fill_elsewhere(self: Any, offer: Offer, chain: Any, share: Any, row: Tensor, beat: Any) -> list[bytes]:
        fill(self, offer, chain, share, torch.zeros_like(row) if share.place else row, beat)
        buckets = list(buckets_of(offer.manifest, row))
        return [broadcast_incoming.checksum(buckets[index]) for index in share.buckets(offer.manifest)]

    broadcast_incoming._PlaceInChain.fill = fill_elsewhere  # type: ignore[method-assign]


def _trust_deltas() -> None:
    fill = receiver.Receiver._receive_delta

    def receive_anyhow(
        self: receiver.Receiver, offer: Offer, base: receiver.StagedVersion, beat: Callable[[], None]
    ) -> Any:
        manifest = offer.manifest
        base.receipt = base.receipt.model_copy(
            update={"version": manifest.base_version, "digest": manifest.base_digest}
        )
        receiver.row_digest = lambda *_: manifest.result_digest  # type: ignore[attr-defined]
        return fill(self, offer, base, beat)

    receiver.Receiver._receive_delta = receive_anyhow  # type: ignore[method-assign, assignment]


@dataclass
class EngineProcess:
    """Control channel to an engine in a separate process."""

    name: str
    faults: Faults = field(default_factory=Faults)

    answer_timeout_s: float = ANSWER_TIMEOUT_S

    def __post_init__(self) -> None:
        """Start the process."""
        context = fork_server()
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_engine, args=(self.name, self.faults, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, command: str, argument: Any = None) -> None:
        """Send a command."""
        try:
            self._pipe.send((command, argument))
        except BrokenPipeError as error:
            raise ConnectionError(f"{self.name} has ended") from error

    def finish(self) -> Any:
        """Wait for the answer to the command that was sent."""
        try:
            if not self._pipe.poll(self.answer_timeout_s):
                raise TimeoutError(f"{self.name} does not answer")
            answer = self._pipe.recv()
        except EOFError as error:
            raise ConnectionError(f"{self.name} has ended") from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _call(self, command: str, argument: Any = None) -> Any:
        self.begin(command, argument)
        return self.finish()

    def receive(self, offer: Offer) -> Receipt:
        receipt: Receipt = self._call("receive", offer.model_dump_json())
        return receipt

    def commit(self, version: int) -> float:
        seconds: float = self._call("commit", version)
        return seconds

    def abort(self, version: int) -> None:
        self._call("abort", version)

    def active_weights(self) -> tuple[int | None, dict[str, str]]:
        """Version in force, and the hash of every tensor that was loaded."""
        version, found = self._call("active_weights")
        return version, found

    def restart(self) -> None:
        """Replace the process with a new one without faults."""
        self.end()
        self.faults = Faults()
        self.__post_init__()

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.join()
        self._pipe.close()


@dataclass
class Fleet:
    """Engines of one test, killed when it ends."""

    engines: list[EngineProcess] = field(default_factory=list)

    def start(self, number: int, faults: Mapping[int, Faults] | None = None) -> list[EngineProcess]:
        """Start engines ``engine-1`` and so on; ``faults`` maps their numbers to faults."""
        started = [EngineProcess(f"engine-{i}", (faults or {}).get(i, Faults())) for i in range(1, number + 1)]
        self.engines += started
        return started

    def end(self) -> None:
        """Kill all engines."""
        for engine in self.engines:
            engine.end()


def odd_weights(seed: int = 0) -> dict[str, Tensor]:
    """Weights of every kind: bf16 and fp32, empty, scalar, larger than a bucket, non-contiguous, of odd lengths."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "embed": random(701, 33, dtype=torch.bfloat16),
        "empty": random(0, 5),
        "scalar": random(),
        "large": random(60_000),
        "across": random(64, 48, dtype=torch.bfloat16).t(),
        "every_other": random(200)[::2],
        "odd": random(7, dtype=torch.bfloat16),
        "float8": random(33).to(torch.float8_e4m3fn),
        "counter": torch.tensor([seed], dtype=torch.int64),
        "mask": random(9) > 0,
    }


def layout_of(weights: Mapping[str, Tensor]) -> tuple[TensorEntry, ...]:
    """Layout of these tensors."""
    return entries_of({name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()})


def streamed(weights: Mapping[str, Tensor], read: list[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Weights as a trainer gathers them, one at a time; ``read`` records the ones that were taken."""
    for name, tensor in weights.items():
        yield name, tensor
        if read is not None:
            read.append(name)


def beat() -> None:
    """Heartbeat that is discarded."""


def new_sender(
    way: Any = None,
    *,
    bucket_bytes: int = 8192,
    stall_timeout_s: float = 60.0,
    backend: LinkBackend = LinkBackend.GLOO,
    **settings: Any,
) -> Sender:
    """Sender in this process, with small buckets, so that there are many of them."""
    outgoing = way or broadcast.BroadcastOutgoing(
        "trainer", "127.0.0.1", stall_timeout_s=stall_timeout_s, backend=backend
    )
    return Sender(outgoing, bucket_bytes=bucket_bytes, **settings)


def sync(sender: Sender, engines: list[EngineProcess], version: int, weights: dict[str, Tensor]) -> WeightSyncReport:
    return synchronize(sender, engines, version, layout_of(weights), streamed(weights), beat)


def living(engines: list[EngineProcess], lost: str) -> list[EngineProcess]:
    return [engine for engine in engines if engine.name != lost]


def blames(peer: str) -> Callable[[WeightSyncFailed], bool]:
    """Check that a failed sync names this process."""
    return lambda failed: failed.peer == peer
