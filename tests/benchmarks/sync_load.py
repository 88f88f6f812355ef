"""Processes of ``bench_sync.py``: one trainer, and engines that it reaches at their addresses.

    python tests/benchmarks/sync_load.py engine ADDRESS PORT NAME
    python tests/benchmarks/sync_load.py trainer JSON
    python tests/benchmarks/sync_load.py sender JSON PLACE

The *baseline* is the method of OpenRLHF #533: for every parameter a message to each engine (its name, type and shape),
a broadcast from rank 0 over one gloo group of all processes, and an acknowledgement of each engine, before the next
parameter. The messages are pickles over an open TCP connection, which is cheaper than the Ray calls used there.
"""

import json
import os
import socket
import statistics
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from rlhf_core.errors import WeightSyncFailed
from rlhf_core.schemas.weight_sync import Offer, Receipt
from rlhf_core.weight_sync.base import Outgoing
from rlhf_core.weight_sync.broadcast import BroadcastOutgoing
from rlhf_core.weight_sync.delta import DeltaEncoder
from rlhf_core.weight_sync.layout import entries_of
from rlhf_core.weight_sync.receiver import Receiver
from rlhf_core.weight_sync.sender import FurtherSender, Sender
from rlhf_core.weight_sync.sender_group import SenderGroup
from rlhf_core.weight_sync.session import synchronize
from rlhf_core.weight_sync.shared_memory import SharedMemoryOutgoing

KEY = b"bench"
SENDERS_PORT = 29_640
TIMEOUT_S = 120.0
Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def qwen_shapes(hidden: int, intermediate: int, key_values: int, vocabulary: int) -> Shapes:
    """The 290 weights of Qwen2.5-0.5B in bf16 (24 layers, tied head), in any width."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(24):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}self_attn.q_proj.weight": (hidden, hidden),
            f"{at}self_attn.q_proj.bias": (hidden,),
            f"{at}self_attn.k_proj.weight": (key_values, hidden),
            f"{at}self_attn.k_proj.bias": (key_values,),
            f"{at}self_attn.v_proj.weight": (key_values, hidden),
            f"{at}self_attn.v_proj.bias": (key_values,),
            f"{at}self_attn.o_proj.weight": (hidden, hidden),
            f"{at}mlp.gate_proj.weight": (intermediate, hidden),
            f"{at}mlp.up_proj.weight": (intermediate, hidden),
            f"{at}mlp.down_proj.weight": (hidden, intermediate),
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}post_attention_layernorm.weight": (hidden,),
        }
    shapes["model.norm.weight"] = (hidden,)
    return {name: (torch.bfloat16, shape) for name, shape in shapes.items()}


MODELS: dict[str, Shapes] = {
    "tiny": qwen_shapes(hidden=64, intermediate=256, key_values=32, vocabulary=4_000),
    "small": qwen_shapes(hidden=192, intermediate=1024, key_values=64, vocabulary=32_000),
    "0.1B": qwen_shapes(hidden=448, intermediate=2432, key_values=64, vocabulary=50_000),
    "0.5B": qwen_shapes(hidden=896, intermediate=4864, key_values=128, vocabulary=151_936),
}


def zeros(shapes: Shapes) -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in shapes.items()}


def num_bytes(shapes: Shapes) -> int:
    """Total bytes of a model's weights."""
    return sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in shapes.values())


def send_at_once(pipe: Connection) -> None:
    """Disable Nagle's algorithm, so that the kernel holds no message back: this would cost both methods 40 ms."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def gloo_group(store: TCPStore, rank: int, size: int, address: str) -> Any:
    """Process group of the trainer and all engines."""
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=60)
    options._devices = [gloo.create_device(hostname=address)]
    return gloo(store, rank, size, options)


# ---------------------------------------------------------------------------------------------------------------------
# Engine


def run_engine(address: str, port: int, name: str) -> None:
    """Serve until the trainer closes the connection."""
    with Listener((address, port), authkey=KEY) as listener:
        print("ready", flush=True)
        with listener.accept() as pipe:
            send_at_once(pipe)
            serve(pipe, Receiver(name), address)


def serve(pipe: Connection, receiver: Receiver, address: str) -> None:
    """Answer the trainer's commands."""
    model: dict[str, Tensor] = {}
    group: Any = None
    while True:
        try:
            command, argument = pipe.recv()
        except EOFError:
            return
        answer: Any = None
        if command == "model":
            model = zeros(MODELS[argument])
        elif command == "receive":
            answer = receiver.receive(Offer.model_validate_json(argument), lambda: None).receipt
        elif command == "commit":
            begin = time.perf_counter()
            for key, tensor in receiver.commit(argument).tensors():
                model[key].copy_(tensor)
            answer = time.perf_counter() - begin
        elif command == "join":
            host, port, rank, size = argument
            group = gloo_group(TCPStore(host, port, is_master=False), rank, size, address)
        elif command == "parameter":
            answer = take_parameter(group, model, argument)
        elif command == "sum":
            answer = sum(float(tensor.double().sum()) for tensor in model.values())
        pipe.send(answer)


def take_parameter(group: Any, model: dict[str, Tensor], what: tuple[str, torch.dtype, tuple[int, ...]]) -> float:
    """Receive one parameter and load it; return the seconds of loading."""
    name, dtype, shape = what
    weight = torch.empty(shape, dtype=dtype)
    group.broadcast([weight]).wait()
    begin = time.perf_counter()
    model[name].copy_(weight)
    return time.perf_counter() - begin


# ---------------------------------------------------------------------------------------------------------------------
# Trainer


class RemoteEngine:
    """Control channel to one engine."""

    def __init__(self, name: str, address: str, port: int) -> None:
        self.name = name
        self.pipe = Client((address, port), authkey=KEY)
        send_at_once(self.pipe)

    def ask(self, command: str, argument: Any = None) -> Any:
        self.pipe.send((command, argument))
        return self.pipe.recv()

    def receive(self, offer: Offer) -> Receipt:
        receipt: Receipt = self.ask("receive", offer.model_dump_json())
        return receipt

    def commit(self, version: int) -> float:
        seconds: float = self.ask("commit", version)
        return seconds

    def abort(self, version: int) -> None:
        raise WeightSyncFailed("a sync of a benchmark has failed")


def run_trainer(settings: dict[str, Any]) -> dict[str, Any]:
    """Sync several versions with both methods; return the medians of seconds."""
    engines = [RemoteEngine(*engine) for engine in settings["engines"]]
    for engine in engines:
        engine.ask("model", settings["model"])
    weights = first_weights(settings)
    address = settings["addresses"][0]
    way = BroadcastOutgoing("trainer-0", address)
    group = None if settings["changed"] else sender_group(settings, 0)
    found = sync_versions(settings, engines, weights, way, group)
    if settings["folder"]:
        memory = SharedMemoryOutgoing("trainer-0", folder=Path(settings["folder"]))
        shared = sync_versions(settings, engines, weights, memory, begin=settings["repeats"] + 1)
        found |= {f"memory_{name}": seconds for name, seconds in shared.items()}
    if settings["baseline"]:
        found |= sync_parameters(settings, engines, weights)
    return found


def first_weights(settings: dict[str, Any]) -> dict[str, Tensor]:
    """Weights of the first round, the same in every process."""
    torch.manual_seed(0)
    return {name: tensor.normal_(std=0.02) for name, tensor in zeros(MODELS[settings["model"]]).items()}


def sender_group(settings: dict[str, Any], place: int) -> SenderGroup:
    """Senders, with the addresses that the one at this place uses."""
    addresses = settings["addresses"]
    store = TCPStore(addresses[0], SENDERS_PORT, is_master=place == 0, wait_for_workers=False)
    names = [f"trainer-{index}" for index in range(len(addresses))]
    return SenderGroup(names, place, store, timeout_s=TIMEOUT_S)


def run_sender(settings: dict[str, Any], place: int) -> None:
    """Send a share of every version beside the trainer."""
    weights = first_weights(settings)
    way = BroadcastOutgoing(f"trainer-{place}", settings["addresses"][place])
    sender = FurtherSender(way, sender_group(settings, place))
    for _ in range(settings["repeats"] + 1):
        sender.send(iter(weights.items()), lambda: None)
        change(weights)


def sync_versions(
    settings: dict[str, Any],
    engines: list[RemoteEngine],
    weights: dict[str, Tensor],
    way: Outgoing,
    group: SenderGroup | None = None,
    begin: int = 0,
) -> dict[str, Any]:
    """Sync versions from ``begin`` on with one transport; return the seconds of each except the first, which makes the
    links."""
    delta = DeltaEncoder(full_every=sys.maxsize) if settings["changed"] else None
    sender = Sender(way, delta=delta, group=group)
    layout = entries_of({name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()})
    wire, apply, total, sent = [], [], [], []
    for version in range(begin, begin + settings["repeats"] + 1):
        began = time.perf_counter()
        report = synchronize(sender, engines, version, layout, iter(weights.items()), lambda: None)
        if version > begin:
            wire.append(report.wire_s)
            apply.append(report.apply_s)
            total.append(time.perf_counter() - began)
            sent.append(report.sent.bytes_sent)
        require_equal(engines, weights)
        change(weights, settings["changed"])
    return {"wire": wire, "apply": apply, "total": total, "bytes": sent}


def sync_parameters(
    settings: dict[str, Any], engines: list[RemoteEngine], weights: dict[str, Tensor]
) -> dict[str, Any]:
    address = settings["addresses"][0]
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    size = len(engines) + 1
    for rank, engine in enumerate(engines, 1):
        engine.pipe.send(("join", (address, store.port, rank, size)))
    group = gloo_group(store, 0, size, address)
    for engine in engines:
        engine.pipe.recv()
    total, apply = [], []
    for round_number in range(max(1, settings["repeats"] - 1) + 1):
        begin, loading = time.perf_counter(), [0.0] * len(engines)
        for name, weight in weights.items():
            for engine in engines:
                engine.pipe.send(("parameter", (name, weight.dtype, tuple(weight.shape))))
            group.broadcast([weight]).wait()
            for index, engine in enumerate(engines):
                loading[index] += engine.pipe.recv()
        if round_number:
            total.append(time.perf_counter() - begin)
            apply.append(max(loading))
        require_equal(engines, weights)
        change(weights)
    return {"baseline": total, "baseline_apply": apply}


def change(weights: dict[str, Tensor], share: float = 0.0) -> None:
    """Change the weights for the next round: this share of the elements of each, anywhere, or those at the begin."""
    for tensor in weights.values():
        elements = tensor.view(-1)
        if share:
            places = torch.randint(len(elements), (1 + int(share * len(elements)),))
            elements[places] = -elements[places]
        else:
            elements[: 1 + len(elements) // 100].mul_(-1)


def require_equal(engines: list[RemoteEngine], weights: dict[str, Tensor]) -> None:
    """Require that all engines have the trainer's weights: a benchmark of a broken sync would be meaningless."""
    expected = sum(float(tensor.double().sum()) for tensor in weights.values())
    for engine in engines:
        assert abs(engine.ask("sum") - expected) < 1e-6 * max(1.0, abs(expected))


def medians(found: dict[str, list[float]]) -> dict[str, float]:
    """Median of every measure."""
    return {name: statistics.median(values) for name, values in found.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "engine":
        run_engine(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    elif sys.argv[1] == "sender":
        run_sender(json.loads(sys.argv[2]), int(sys.argv[3]))
    else:
        print(json.dumps(medians(run_trainer(json.loads(sys.argv[2])))), flush=True)
