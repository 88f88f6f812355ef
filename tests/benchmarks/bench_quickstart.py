"""Does the quickstart learn, how long does it take, and does a meaningless reward fail to teach?

    python tests/benchmarks/bench_quickstart.py [--seeds 0 1 2]
    python tests/benchmarks/bench_quickstart.py --modes [NAME ...]    seed 0, and places where completions are sampled

Runs the whole preset through the command line, one run after the other, in a home of its own. Prints accuracy before
and after for each seed, the gain against the target (ratio), the wall time against the limit (ratio), and the same for
a shuffled reward, which must not learn.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

TARGETS = {"greedy": 0.10, "sampled": 0.30}
LIMIT_S = 300.0
ENGINES = ("rollout.engines=2",)
AHEAD = (*ENGINES, "rollout.max_staleness=1", "loops.main.algorithm.correction=token_truncate")
STEPS_AHEAD = (*AHEAD, "rollout.max_staleness=3")
VLLM = ("rollout.engine=vllm",)
MODES = {
    "in the trainers": (),
    "in the trainers, vLLM": VLLM,
    "engines": ENGINES,
    "engines, vLLM": ENGINES + VLLM,
    "one step ahead": AHEAD,
    "one step ahead, vLLM": AHEAD + VLLM,
    "three steps ahead": STEPS_AHEAD,
    "three steps ahead, vLLM": STEPS_AHEAD + VLLM,
}
HERE = Path(__file__).parent
CONTROL = "shuffled reward"
COMMAND = (sys.executable, "-m", "rlhf_core.cli.main")


def environment_of(home: Path) -> dict[str, str]:
    """Variables with which everything of a run is in this home, whatever site the user has set."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("RLHF_")}
    return others | {"RLHF_HOME": str(home)}


@contextlib.contextmanager
def running(home: Path, environment: Mapping[str, str], *words: str) -> Iterator["subprocess.Popen[bytes]"]:
    """``rlhf run`` with these words, in a home of its own; waits for its end, or cancels it if the block raises.

    It is in a session of its own: Ctrl-C would reach it twice, upon which it leaves its workers as they are.
    """
    path = home.with_suffix(".out")
    with path.open("wb") as output:
        process = subprocess.Popen(
            [*COMMAND, "run", *words, "--no-prefect"],
            cwd=HERE,
            env={**environment_of(home), **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
        if process.wait():
            raise SystemExit(f"rlhf run ended with {process.returncode}:\n{path.read_text(errors='replace')[-4000:]}")
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait()


def run(home: Path, *overrides: str) -> tuple[dict[str, tuple[float, float]], float]:
    """One quickstart run: mapping from name to (before, after), and the seconds it took."""
    started = time.monotonic()
    with running(home, {}, "quickstart", *(word for override in overrides for word in ("--set", override))):
        pass
    seconds = time.monotonic() - started
    shown = subprocess.run(
        [*COMMAND, "show", "last", "--json"], env=environment_of(home), check=True, capture_output=True, text=True
    )
    values = {(row["name"], row["when"]): row["value"] for row in json.loads(shown.stdout)["evaluations"]}
    return {name: (values[name, "before"], values[name, "after"]) for name in TARGETS}, seconds


def main() -> int:
    """Run all and print the table; return 1 if a seed misses a target or the control learns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--modes", nargs="*", choices=MODES, help="places to sample in; by default all")
    options = parser.parse_args()
    good = True
    print(
        f"{'run':<22} {'greedy':>16} {'gain/target':>12} {'sampled':>16} {'gain/target':>12} {'wall':>7} {'/limit':>7}"
    )
    with tempfile.TemporaryDirectory() as folder:
        control = ("seed=0", 'reward.functions=["shuffled_reward:shuffled_exact_match"]')
        cases: list[tuple[str, tuple[str, ...]]] = [(f"seed {seed}", (f"seed={seed}",)) for seed in options.seeds] + [
            (CONTROL, control)
        ]
        if options.modes is not None:
            cases = [(name, MODES[name]) for name in options.modes or MODES]
        for number, (name, overrides) in enumerate(cases):
            measured, seconds = run(Path(folder) / str(number), *overrides)
            gains = {key: after - before for key, (before, after) in measured.items()}
            cells = [
                f"{measured[key][0]:.3f} -> {measured[key][1]:.3f} {gains[key] / target:12.2f}"
                for key, target in TARGETS.items()
            ]
            print(f"{name:<22} {cells[0]} {cells[1]} {seconds:6.0f}s {seconds / LIMIT_S:7.2f}", flush=True)
            learned = all(gains[key] >= target for key, target in TARGETS.items())
            good &= gains["greedy"] < 0 if name == CONTROL else learned
    print("all that should learn do, and nothing else" if good else "FAILED: see the table")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
