"""Checkpoints during training: the time for which steps wait, and the duration of the steps meanwhile.

    make bench-checkpoint
    python tests/benchmarks/bench_checkpoint.py [--small] [--steps 17] [--every 4] [--threads 2] [--folder FOLDER]

Whole runs of supervised training in one process, of the model of 50 million parameters of ``bench_train.py``: without
checkpoints, with checkpoints that the step waits for, and with background checkpoints, of which one keeps no copy that
outlives the workers, one keeps such a copy, and one keeps another in the memory of a peer. The peer is another process
of this machine, which receives as a rank of another node does; unlike a real peer, it takes cores from training.

The stall is the time that training waited (``time/checkpoint_s``), without the last checkpoint, for which any run
waits, and without the first, for which memory is allocated. With other work on the machine, ratios of medians hold.
"""

import argparse
import contextlib
import multiprocessing
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))

from bench_train import FIFTY_MILLION
from rank_launcher import TINY_MODEL, make_context

from rlhf_core.files.appended import read_models
from rlhf_core.schemas.reports import MetricsLine
from rlhf_core.training.checkpoints.memory.copies import PEER
from rlhf_core.training.checkpoints.memory.peer_copies import PeerCopies
from rlhf_core.training.checkpoints.memory.peer_transfer import PartReceiver
from rlhf_core.training.distributed import Ranks, init_process_group
from rlhf_core.training.trainers import saving
from rlhf_core.training.trainers.run import train_run
from rlhf_core.training.types import WorkerContext

WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "waiting": {"background": False, "memory": "off"},
    "background": {"background": True, "memory": "off"},
    "background, copy": {"background": True, "memory": "own"},
    "background, copy on a peer": {"background": True, "memory": "peer"},
}
"""Settings of ``[checkpoint]``, beside the interval."""


def settings(model: dict[str, Any], num_steps: int, every: int, threads: int, way: dict[str, Any]) -> dict[str, Any]:
    """Settings of a supervised run that saves every few steps; without a way, it saves only at its end."""
    return {
        "name": "bench",
        "model": {"config": model, "tokenizer": "char"},
        "data": {"generator": "rlhf_core.training.tasks:sort_digits", "generator_args": {"num_digits": 8}},
        "loops": {
            "main": {
                "num_steps": num_steps,
                "algorithm": {"name": "sft", "batch_size": 4},
                "optimizer": {"learning_rate": 1e-4},
            }
        },
        "trainer": {"micro_batch_size": 4, "log_samples_every": 0},
        "rollout": {"max_new_tokens": 2},
        "evaluate": {"num_prompts": 2},
        "checkpoint": {"every_num_steps": every if way else num_steps, "keep_last": 1, **way},
        "resources": {"ranks_per_node": 1, "cpus_per_rank": threads},
    }


def measured(lines: Sequence[MetricsLine], every: int) -> dict[str, float]:
    """Medians over the steps of a run, in seconds."""
    steps = [line.metrics["time/step_s"] for line in lines[1:]]
    # The metrics of a step include the checkpoint that followed the previous step.
    after = [line.metrics for line in lines if line.step % every == 1 and line.step > every + 1]
    waits = [found["time/checkpoint_s"] for found in after]
    queued = [found["time/checkpoint_wait_s"] for found in after]
    writes = [line.metrics["time/checkpoint_write_s"] for line in lines if line.metrics["time/checkpoint_write_s"] > 0]
    found = {"step": median(steps), "wait": median(waits), "queued": median(queued), "sum": sum(steps) + sum(waits)}
    return found | ({"write": median(writes)} if writes else {})


@contextlib.contextmanager
def peer_process(memory: Path) -> Iterator[None]:
    """Run a stand-in for the rank of another node: a process that receives what this one sends to its peer."""
    key = secrets.token_bytes(32)
    context = multiprocessing.get_context("spawn")
    ours, its = context.Pipe()
    process = context.Process(target=receive, args=(memory / PEER, key, its), daemon=True)
    process.start()
    address = ours.recv()

    def peer_copies(worker: WorkerContext, ranks: Ranks) -> PeerCopies | None:
        if worker.spec.checkpoint.memory != "peer":
            return None
        return PeerCopies(PartReceiver(memory / "unused", key, "127.0.0.1", print), address, "peer", key)

    plain, saving.peer_copies = saving.peer_copies, peer_copies
    try:
        yield
    finally:
        saving.peer_copies = plain
        ours.close()  # the process waits for it
        process.join()


def receive(folder: Path, key: bytes, connection: Connection) -> None:
    """Receive parts until the other side closes."""
    connection.send(PartReceiver(folder, key, "127.0.0.1", print).address)
    with contextlib.suppress(EOFError):
        connection.recv()


def main() -> None:
    """Run all ways of saving and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a model of a few thousand parameters: whether it works")
    parser.add_argument("--steps", type=int, default=17)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="folder on the file system to be measured")
    arguments = parser.parse_args()
    model = TINY_MODEL if arguments.small else {key: FIFTY_MILLION[key] for key in FIFTY_MILLION}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}  # DeepSpeed requires them
    results: dict[str, dict[str, float]] = {}
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as folder,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
        peer_process(Path(memory)),
    ):
        ranks = None
        for name, way in WAYS.items():
            spec = settings(model, arguments.steps, arguments.every, arguments.threads, way)
            context = replace(
                make_context(f"{folder}/{name}", spec, 0, 1), memory=Path(memory), store=Path(folder) / "store"
            )
            ranks = ranks or init_process_group(context)
            train_run(context, ranks)
            if way.get("memory") == "peer" and not list((Path(memory) / PEER / "parts").iterdir()):
                raise RuntimeError("no copy came to the peer")
            results[name] = measured(list(read_models(context.restart_dir.metrics, MetricsLine)), arguments.every)
    synchronous = results["waiting"]["wait"]
    print("| checkpoints | step | waited | of the synchronous | of it in the queue | written in | steps and waits |")
    print("|---|---|---|---|---|---|---|")
    for name, one in results.items():
        wait, write = (
            ("-", "-") if name == "none" else (f"{one['wait']:.3f} s", f"{one.get('write', one['wait']):.2f} s")
        )
        share = "-" if name == "none" else f"{one['wait'] / synchronous:.1%}"
        queued = "-" if name == "none" else f"{one['queued']:.3f} s"
        print(f"| {name} | {one['step']:.3f} s | {wait} | {share} | {queued} | {write} | {one['sum']:.1f} s |")


if __name__ == "__main__":
    main()
