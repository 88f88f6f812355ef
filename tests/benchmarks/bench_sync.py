"""Weight sync along a chain of engines, against one message and acknowledgement per parameter (OpenRLHF #533).

    make bench-sync
    python tests/benchmarks/bench_sync.py [--models small 0.5B] [--engines 1 2 4] [--rates 0 1000] [--repeats 3]
    python tests/benchmarks/bench_sync.py --senders 1 2 4 --sender-rate 250 --rates 1000 [--models small]
    python tests/benchmarks/bench_sync.py --changed 0.05 [--models small 0.5B]

A trainer and engines run as separate processes on one host (rate 0), over the loopback and through shared memory, or,
as root, each in a network namespace whose link passes this many Mbit/s in each direction. Wire is the time until the
last engine has all weights verified in staging; apply is that of the slowest engine to copy them into its model. The
baseline's time covers both together, because it handles one parameter after another. Every round has other weights, and
the sums of the engines' weights are compared with the trainer's. ``limit`` is bytes / rate: the share of it that the
wire reaches.

With ``--senders`` (as root), a trainer on this many hosts sends, each host a share over a link of its own that passes
``--sender-rate``; the limit is that of their links together, at most that of an engine's.

With ``--changed``, each version differs from the last one in this share of the elements of every weight, anywhere in
it, and is sent as a delta. The whole sync (comparing the weights, wire, verifying, apply) is compared with the
baseline, which sends every weight.
"""

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "infra" / "slurm"))

from node_space import Network, why_not
from sync_load import MODELS, num_bytes

LOAD = Path(__file__).with_name("sync_load.py")
PORT = 29_650
TIMEOUT_S = 900
MEMORY = "/dev/shm"


@contextlib.contextmanager
def hosts(rates_mbit: Sequence[int]) -> Iterator[tuple[list[str], Any]]:
    """Addresses of hosts with links of these rates, and the command prefix for each. Rate 0: all on the loopback."""
    if not all(rates_mbit):
        yield ["127.0.0.1"] * len(rates_mbit), lambda _, words: words
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "etc").mkdir()
        network = Network(Path(folder))
        nodes = [f"node{index}" for index, _ in enumerate(rates_mbit, 1)]
        try:
            _, addresses = network.make(nodes)
            for node, rate_mbit in zip(nodes, rates_mbit, strict=True):
                network.slow(node, rate_mbit)
            yield [addresses[node] for node in nodes], lambda index, words: network.inside(nodes[index], words)
        finally:
            network.remove()


def measure(
    model: str,
    sender_rates: Sequence[int],
    engine_rates: Sequence[int],
    repeats: int,
    baseline: bool,
    changed: float = 0.0,
) -> dict[str, float]:
    """Seconds and bytes of one row.

    Args:
        sender_rates, engine_rates: Mbit/s of each link.
        changed: share of the elements that a version changes, to send deltas; 0 to send whole weights.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": ""}
    environment.pop("GLOO_SOCKET_IFNAME")
    with hosts([*sender_rates, *engine_rates]) as (addresses, inside), contextlib.ExitStack() as running:
        folder = "" if all(engine_rates) else running.enter_context(tempfile.TemporaryDirectory(dir=MEMORY))
        engines = []
        for index in range(len(sender_rates), len(addresses)):
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
            "addresses": addresses[: len(sender_rates)],
            "repeats": repeats,
            "baseline": baseline,
            "folder": folder,
            "changed": changed,
        }
        for place in range(1, len(sender_rates)):
            words = inside(place, [sys.executable, str(LOAD), "sender", json.dumps(settings), str(place)])
            process = subprocess.Popen(words, env=environment)
            running.callback(process.wait)
            running.callback(process.kill)
        words = inside(0, [sys.executable, str(LOAD), "trainer", json.dumps(settings)])
        done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(model: str, link: str, number: int, rate_mbit: int, found: dict[str, float]) -> str:
    """One line of the table."""
    size = num_bytes(MODELS[model])
    limit = size * 8 / (rate_mbit * 1e6) if rate_mbit else None
    both = found["wire"] + found["apply"]
    return " | ".join(
        [
            f"| {model} ({size / 1e6:.0f} MB)",
            link,
            f"{number}",
            f"{found['wire']:.3f}",
            f"{found['apply']:.3f}",
            f"{size / found['wire'] / 1e9:.2f}",
            f"{limit / found['wire']:.0%}" if limit else "-",
            f"{found['baseline']:.2f}" if "baseline" in found else "-",
            f"{found['baseline'] / both:.1f} |" if "baseline" in found else "- |",
        ]
    )


def sender_row(model: str, number: int, rates_mbit: tuple[int, int], senders: int, found: dict[str, float]) -> str:
    """One line of the table of several senders.

    Args:
        rates_mbit: rate of the link of a trainer's host, and of an engine's.
    """
    size = num_bytes(MODELS[model])
    limit = size * 8 / (min(senders * rates_mbit[0], rates_mbit[1]) * 1e6)
    return " | ".join(
        [
            f"| {model} ({size / 1e6:.0f} MB)",
            f"{number}",
            f"{senders}",
            f"{limit:.2f}",
            f"{found['wire']:.2f}",
            f"{limit / found['wire']:.0%}",
            f"{found['total']:.2f} |",
        ]
    )


def delta_row(model: str, link: str, number: int, found: dict[str, float]) -> str:
    """One line of the table of deltas."""
    size = num_bytes(MODELS[model])
    return " | ".join(
        [
            f"| {model} ({size / 1e6:.0f} MB)",
            link,
            f"{number}",
            f"{found['bytes'] / size:.1%}",
            f"{found['wire']:.3f}",
            f"{found['apply']:.3f}",
            f"{found['total']:.3f}",
            f"{found['baseline']:.2f}" if "baseline" in found else "-",
            f"{found['baseline'] / found['total']:.1f} |" if "baseline" in found else "- |",
        ]
    )


DELTA_HEAD = """| model | link | engines | bytes | wire, s | apply, s | whole sync, s | baseline, s | baseline / sync |
|---|---|---|---|---|---|---|---|---|"""
SENDERS_HEAD = """| model | engines | senders | limit, s | wire, s | of limit | whole sync, s |
|---|---|---|---|---|---|---|"""
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
    parser.add_argument("--senders", nargs="+", type=int, default=[], help="measure this many senders")
    parser.add_argument("--sender-rate", type=int, default=250, help="Mbit/s of the link of each of them")
    parser.add_argument("--changed", type=float, default=0.0, help="share of the elements that a version changes")
    chosen = parser.parse_args(arguments)
    if chosen.senders and not all((chosen.sender_rate, chosen.rates[-1])):
        parser.error("several senders are measured over limited links: give --sender-rate and --rates above 0")
    if any(chosen.rates) and (reason := why_not()):
        parser.error(f"{reason}; only --rates 0, the loopback and shared memory, is measured without")
    if chosen.senders:
        compare_senders(chosen)
        return
    print(DELTA_HEAD if chosen.changed else HEAD, flush=True)
    for model, rate, number in itertools.product(chosen.models, chosen.rates, chosen.engines):
        baseline = not chosen.no_baseline
        found = measure(model, [rate], [rate] * number, chosen.repeats, baseline, chosen.changed)
        links = {f"{rate} Mbit/s" if rate else "loopback": found}
        if not rate:
            measures = ("wire", "apply", "total", "bytes")
            links["shared memory"] = found | {name: found[f"memory_{name}"] for name in measures}
        for link, seconds in links.items():
            is_delta = chosen.changed > 0
            line = delta_row(model, link, number, seconds) if is_delta else row(model, link, number, rate, seconds)
            print(line, flush=True)


def compare_senders(chosen: argparse.Namespace) -> None:
    """Print the table of several senders, at the last of ``--rates`` for engines."""
    rates = (chosen.sender_rate, chosen.rates[-1])
    print(f"links: {rates[0]} Mbit/s of each trainer, {rates[1]} Mbit/s of each engine\n\n{SENDERS_HEAD}", flush=True)
    for model, number, senders in itertools.product(chosen.models, chosen.engines, chosen.senders):
        found = measure(model, [rates[0]] * senders, [rates[1]] * number, chosen.repeats, baseline=False)
        print(sender_row(model, number, rates, senders, found), flush=True)


if __name__ == "__main__":
    main()
