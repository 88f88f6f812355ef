"""Senders beside the first one, in separate processes, with faults that tests inject."""

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from fork_server import fork_server
from gpu_stand_in import CpuForGpu
from sync_processes import ANSWER_TIMEOUT_S, EngineProcess, beat, layout_of, odd_weights, streamed
from torch import Tensor

from rlhf_core.schemas.weight_sync import LinkBackend, WeightSyncReport
from rlhf_core.weight_sync import broadcast, gpu_links
from rlhf_core.weight_sync.broadcast import BroadcastOutgoing
from rlhf_core.weight_sync.links import GlooLink, Pending, listen, reach
from rlhf_core.weight_sync.sender import FurtherSender, Sender
from rlhf_core.weight_sync.sender_group import SenderGroup
from rlhf_core.weight_sync.session import synchronize

HOST = "127.0.0.1"


@dataclass(frozen=True)
class SenderFault:
    """Fault of a sender that occurs while it sends its share of version 1."""

    bucket: int
    """Number of its buckets before the fault."""
    kind: str
    """``kill``, ``stop``, ``raise``, ``damage`` (a bit on the wire) or ``layout`` (weights of another model)."""


def _further(
    names: Sequence[str],
    place: int,
    port: int,
    timeout_s: float,
    backend: LinkBackend,
    fault: SenderFault | None,
    pipe: Connection,
) -> None:
    gpu_links.Gpu = CpuForGpu  # type: ignore[misc, assignment]
    store = reach(HOST, port, names[0])
    group = SenderGroup(names, place, store, timeout_s=timeout_s)
    way = BroadcastOutgoing(names[place], HOST, stall_timeout_s=timeout_s, backend=backend)
    sender = FurtherSender(way, group)
    while True:
        try:
            version, seed = pipe.recv()
        except EOFError:
            return
        weights, read = odd_weights(seed), list[str]()
        if fault is not None and version == 1:
            weights = _put_in(fault, weights)
        sender.send(streamed(weights, read), beat)
        pipe.send(read)


def _put_in(fault: SenderFault, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    sound, send, sent = broadcast.checksum, GlooLink.send, 0

    def checksum(data: Tensor) -> bytes:
        nonlocal sent
        sent += 1
        if sent == fault.bucket:
            if fault.kind == "raise":
                raise ZeroDivisionError("a fault of a test")
            if fault.kind in ("kill", "stop"):
                os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
        return sound(data)

    def damaged(self: GlooLink, message: Tensor, tag: int) -> Pending:
        if tag == 1 and sent == fault.bucket and fault.kind == "damage":
            message = message.clone()
            message[5] ^= 1
        return send(self, message, tag)

    broadcast.checksum = checksum
    GlooLink.send = damaged  # type: ignore[method-assign]
    return weights | {"odd": torch.zeros(8)} if fault.kind == "layout" else weights


@dataclass
class Trainer:
    """The senders of a trainer: the first one in this process, the others in separate processes."""

    num_senders: int
    faults: dict[int, SenderFault] = field(default_factory=dict)
    timeout_s: float = 60.0
    bucket_bytes: int = 8192
    backend: LinkBackend = LinkBackend.GLOO

    def __post_init__(self) -> None:
        """Start the other senders."""
        names = [f"trainer-{place}" for place in range(self.num_senders)]
        self._store = listen(HOST)
        group = SenderGroup(names, 0, self._store, timeout_s=self.timeout_s) if self.num_senders > 1 else None
        way = BroadcastOutgoing(names[0], HOST, stall_timeout_s=self.timeout_s, backend=self.backend)
        self.sender = Sender(way, bucket_bytes=self.bucket_bytes, group=group)
        self.others = [self._start(names, place) for place in range(1, self.num_senders)]
        self._read: list[str] = []

    def _start(self, names: Sequence[str], place: int) -> tuple[Any, Connection]:
        ours, theirs = fork_server().Pipe()
        arguments = (names, place, self._store.port, self.timeout_s, self.backend, self.faults.get(place), theirs)
        process = fork_server().Process(target=_further, args=arguments, daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def sync(
        self, engines: Sequence[EngineProcess], version: int, seed: int, *, is_alone: bool = False
    ) -> WeightSyncReport:
        """Bring the odd weights with this seed into force."""
        weights, self._read = odd_weights(seed), []
        if not is_alone:
            for _, pipe in self.others:
                pipe.send((version, seed))
        return synchronize(
            self.sender, engines, version, layout_of(weights), streamed(weights, self._read), beat, is_alone=is_alone
        )

    def read(self, place: int) -> list[str]:
        """Names of the tensors that a sender has read for the last version."""
        if place == 0:
            return self._read
        _, pipe = self.others[place - 1]
        assert pipe.poll(ANSWER_TIMEOUT_S)
        found: list[str] = pipe.recv()
        return found

    def end(self) -> None:
        """Stop the other senders."""
        for process, pipe in self.others:
            process.kill()
            process.join()
            pipe.close()
