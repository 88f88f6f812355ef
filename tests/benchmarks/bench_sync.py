"""Weight sync along a chain of engines, against one message and acknowledgement per parameter (OpenRLHF #533).

    make bench-sync
    python tests/benchmarks/bench_sync.py [--models small 0.5B] [--engines 1 2 4] [--rates 0 1000] [--repeats 3]

A trainer and engines as processes of their own, on the loopback (rate 0) or, as root, each in a network namespace whose
cable passes so many Mbit/s in each direction. Wire is the time until the last engine has all weights verified in
staging, apply that of the slowest engine to copy them into its model, both apart; the baseline's time is of both
together, as it does one parameter after the other. Every round has other weights, and the sums of what the engines have
are compared with the trainer's. ``limit`` is bytes / rate: the share of it that the wire reaches.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "infra" / "slurm"))

from node_space import Network
from sync_load import MODELS, num_bytes

LOAD = Path(__file__).with_name("sync_load.py")
PORT = 29_650
TIMEOUT_S = 900


@contextlib.contextmanager
def hosts(number: int, rate_mbit: int) -> Iterator[tuple[list[str], Any]]:
    """Addresses of the trainer and of ``number`` engines, and the way to run a command at each."""
    if not rate_mbit:
        yield ["127.0.0.1"] * (number + 1), lambda _, words: words
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "etc").mkdir()
        network = Network(Path(folder))
        nodes = [f"node{index}" for index in range(1, number + 2)]
        try:
            _, addresses = network.make(nodes)
            for node in nodes:
                network.slow(node, rate_mbit)
            yield [addresses[node] for node in nodes], lambda index, words: network.inside(nodes[index], words)
        finally:
            network.remove()


def measure(model: str, number: int, rate_mbit: int, repeats: int, baseline: bool) -> dict[str, float]:
    """Seconds of one row."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": ""}
    environment.pop("GLOO_SOCKET_IFNAME")
    with hosts(number, rate_mbit) as (addresses, inside), contextlib.ExitStack() as running:
        engines = []
        for index in range(1, number + 1):
            name, address, port = f"engine-{index}", addresses[index], PORT + index
            words = inside(index, [sys.executable, str(LOAD), "engine", address, str(port), name])
            process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
            running.callback(process.wait)
            running.callback(process.kill)
            engines.append((process, (name, address, port)))
        for process, _ in engines:
            assert process.stdout is not None
            process.stdout.readline()
        settings = {
            "model": model,
            "engines": [place for _, place in engines],
            "address": addresses[0],
            "repeats": repeats,
            "baseline": baseline,
        }
        words = inside(0, [sys.executable, str(LOAD), "trainer", json.dumps(settings)])
        done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(model: str, number: int, rate_mbit: int, found: dict[str, float]) -> str:
    """One line of the table."""
    size = num_bytes(MODELS[model])
    limit = size * 8 / (rate_mbit * 1e6) if rate_mbit else None
    both = found["wire"] + found["apply"]
    return " | ".join(
        [
            f"| {model} ({size / 1e6:.0f} MB)",
            f"{rate_mbit} Mbit/s" if rate_mbit else "loopback",
            f"{number}",
            f"{found['wire']:.3f}",
            f"{found['apply']:.3f}",
            f"{size / found['wire'] / 1e9:.2f}",
            f"{limit / found['wire']:.0%}" if limit else "-",
            f"{found['baseline']:.2f}" if "baseline" in found else "-",
            f"{found['baseline'] / both:.1f} |" if "baseline" in found else "- |",
        ]
    )


HEAD = """| model | link | engines | wire, s | apply, s | GB/s | of limit | baseline, s | baseline / (wire + apply) |
|---|---|---|---|---|---|---|---|---|"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["small", "0.5B"], choices=MODELS)
    parser.add_argument("--engines", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--rates", nargs="+", type=int, default=[0, 1000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-baseline", action="store_true")
    chosen = parser.parse_args(arguments)
    print(HEAD, flush=True)
    for model in chosen.models:
        for rate in chosen.rates:
            for number in chosen.engines:
                found = measure(model, number, rate, chosen.repeats, not chosen.no_baseline)
                print(row(model, number, rate, found), flush=True)


if __name__ == "__main__":
    main()
