"""Rollouts over engines in separate processes: tokens per second, prefix caching, the tail, and several turns.

    make bench-rollout
    python tests/benchmarks/bench_rollout.py [--kinds transformers vllm] [--figures engines turns ahead caching]

Each engine has one core to itself, as far as this program, which sends and receives, and other work on the machine
permit. Rows that are compared are measured in turns, with other prompts in every turn, after a turn that does not
count; figures are medians. The load is the machine's average over a minute, before and after.

Share of the ideal: tokens/s with two engines divided by twice those with one. Prefix caching: groups of 8 completions
of prompts of 512 to 1024 tokens, with vLLM. Tail: the time in which the last tenth of the prompts is answered, divided
by that of the rollout, for prompts whose lengths have a heavy tail; longest first as in a run, and in the given order.
Several turns: 32 rollouts of four turns with an environment whose answers take unevenly long (``uneven_tools.py``), in
rounds and with each rollout going on by itself, over two engines. Steps ahead: 8 steps of 16 completions of very
different lengths, with weights sent at each and a training time in which the trainer only waits, as one on GPUs of its
own does; two vLLM engines.
"""

import argparse
import contextlib
import itertools
import os
import random
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from rollout_load import (
    MAX_NEW_TOKENS,
    MAX_PROMPT_TOKENS,
    TURNS,
    Load,
    OrderGivenDispatcher,
    Round,
    rollout,
    rollout_of_turns,
    running_engines,
    seconds_of_steps,
)

from rlhf_core.training.environments.pool import EnvironmentPool
from rlhf_core.training.rollouts.base import Sampling

GROUP_SIZE = 8
WINDOW = 32
"""Completions that an engine generates at once."""
TURNS_TOKENS = 260
"""Tokens of four turns and the observations between them, at most."""
TURN_ENDS = tuple("aeiou0123")
"""Strings that end a turn; of the random model, after a dozen tokens on average."""
STEPS, STEP_TOKENS, TRAINING_S = 8, 512, 0.5
"""Steps ahead: number of steps, longest completion, and seconds of an update. The random model ends a completion after
about 150 tokens on average."""
Measure = Callable[[int], Round]
"""Function that makes one rollout of the turn with this number."""


def load_of(lengths: Sequence[int], turn: int, max_new_tokens: int, group_size: int = GROUP_SIZE) -> Load:
    """Random prompts with these lengths, new ones in every turn."""
    draw = random.Random(turn)
    prompts = [[draw.randrange(33, 127) for _ in range(length)] for length in lengths]
    seeds = [[draw.getrandbits(60) for _ in range(group_size)] for _ in lengths]
    return Load(prompts, seeds, Sampling(max_new_tokens, temperature=1.0, batch_size=WINDOW))


def short_load(turn: int) -> Load:
    """Short prompts: nearly all of the work is decoding."""
    return load_of([random.Random(place).randrange(8, 33) for place in range(24)], turn, MAX_NEW_TOKENS)


def shared_prefix_load(turn: int) -> Load:
    """Long prompts and short completions: nearly all of the work is the prefix that a group shares."""
    return load_of([random.Random(place).randrange(512, MAX_PROMPT_TOKENS) for place in range(6)], turn, 8)


def ragged_load(turn: int) -> Load:
    """Lengths with a heavy tail (log-normal), in random order."""
    draw = random.Random(turn)
    lengths = [min(MAX_PROMPT_TOKENS, max(8, round(draw.lognormvariate(4.5, 1.2)))) for _ in range(80)]
    return load_of(lengths, turn, MAX_NEW_TOKENS, group_size=1)


def in_turns(measures: Mapping[str, Measure], repeats: int) -> dict[str, list[Round]]:
    """Measure each variant once per turn; the first turn does not count."""
    found: dict[str, list[Round]] = {name: [] for name in measures}
    for turn in range(repeats + 1):
        for name, measure in measures.items():
            made = measure(turn)
            if turn:
                found[name].append(made)
    return found


def median_of(rounds: Sequence[Round], figure: Callable[[Round], float]) -> float:
    """Median of one figure."""
    return statistics.median(map(figure, rounds))


def compare_engines(kind: str, cores: Sequence[int], repeats: int, root: Path) -> None:
    """Rows of one and two engines, and of both orders over two engines."""
    with running_engines(root, cores[:2], engine=kind) as engines:
        one, two = engines.trainer(1), engines.trainer(2)
        before = os.getloadavg()[0]
        speed = in_turns(
            {
                "1 engine": lambda turn: rollout(one, short_load(turn)),
                "2 engines": lambda turn: rollout(two, short_load(turn)),
            },
            repeats,
        )
        alone, both = (median_of(rounds, lambda made: made.tokens_per_s) for rounds in speed.values())
        ratio = f"{both / (2 * alone):.0%} of the ideal"
        row(kind, "tokens/s, 1 and 2 engines", f"{alone:.0f}", f"{both:.0f}", ratio, before)
        tail = in_turns(
            {
                "order given": lambda turn: rollout(two, ragged_load(turn), OrderGivenDispatcher),
                "longest first": lambda turn: rollout(two, ragged_load(turn)),
            },
            repeats,
        )
    given, longest = (median_of(rounds, lambda made: made.tail) for rounds in tail.values())
    row(kind, "tail, order given and longest first", f"{given:.1%}", f"{longest:.1%}", f"{longest / given:.2f}", before)
    given, longest = (median_of(rounds, lambda made: made.seconds) for rounds in tail.values())
    row(kind, "seconds of these", f"{given:.2f}", f"{longest:.2f}", f"{longest / given:.2f}", before)


def turns_load(turn: int) -> Load:
    """Prompts of 32 rollouts of several turns."""
    load = load_of([16] * 16, turn, TURNS_TOKENS, group_size=2)
    return replace(load, sampling=replace(load.sampling, stop=TURN_ENDS))


def compare_turns(kind: str, cores: Sequence[int], repeats: int, root: Path) -> None:
    """Row of rollouts of several turns in rounds, and with each going on by itself."""
    with (
        running_engines(root, cores[:2], engine=kind) as engines,
        contextlib.closing(EnvironmentPool(TURNS)) as pool,
    ):
        two = engines.trainer(2)
        pool.describe(lambda: None)
        before = os.getloadavg()[0]
        found = in_turns(
            {
                "rounds": lambda turn: rollout_of_turns(two, turns_load(turn), pool, in_rounds=True),
                "continuous": lambda turn: rollout_of_turns(two, turns_load(turn), pool, in_rounds=False),
            },
            repeats,
        )
    slow, quick = (median_of(rounds, lambda made: made.seconds) for rounds in found.values())
    row(
        kind,
        "seconds of several turns, in rounds and continuous",
        f"{slow:.2f}",
        f"{quick:.2f}",
        f"{slow / quick:.1f} x faster",
        before,
    )


def compare_bounds(cores: Sequence[int], repeats: int, root: Path) -> None:
    """Rows of steps with engines in step, one step ahead, and several."""
    with running_engines(root, cores[:2], engine="vllm", max_new_tokens=STEP_TOKENS) as engines:
        before = os.getloadavg()[0]
        found: dict[int, list[float]] = {bound: [] for bound in (0, 1, 2, 4)}
        starts = itertools.count()
        for turn in range(repeats + 1):
            for bound, seconds in found.items():
                loads = [load_of([16] * 8, turn * STEPS + step, STEP_TOKENS, 2) for step in range(STEPS)]
                trainer = engines.trainer(2, next(starts), max_staleness=bound)
                measured = seconds_of_steps(trainer, bound, loads, TRAINING_S)
                if turn:
                    seconds.append(measured)
    medians = {bound: statistics.median(seconds) for bound, seconds in found.items()}
    for bound in (1, 2, 4):
        base = medians[min(1, bound - 1)]
        row(
            "vllm",
            f"seconds of a step, rollout.max_staleness {min(1, bound - 1)} and {bound}",
            f"{base:.2f}",
            f"{medians[bound]:.2f}",
            f"{base / medians[bound]:.2f} x faster",
            before,
        )


def compare_caching(cores: Sequence[int], repeats: int, root: Path) -> None:
    """Row of one vLLM engine without and one with prefix caching."""
    with contextlib.ExitStack() as stack:
        off, on = (
            stack.enter_context(
                running_engines(root / name, [core], engine="vllm", vllm={"prefix_caching": name == "on"})
            )
            for name, core in zip(("off", "on"), cores, strict=False)
        )
        without, cached = off.trainer(1), on.trainer(1)
        before = os.getloadavg()[0]
        found = in_turns(
            {
                "off": lambda turn: rollout(without, shared_prefix_load(turn)),
                "on": lambda turn: rollout(cached, shared_prefix_load(turn)),
            },
            repeats,
        )
    slow, quick = (median_of(rounds, lambda made: made.seconds) for rounds in found.values())
    row(
        "vllm",
        "seconds, prefix caching off and on",
        f"{slow:.2f}",
        f"{quick:.2f}",
        f"{slow / quick:.1f} x faster",
        before,
    )


def row(kind: str, what: str, first: str, second: str, ratio: str, load_before: float) -> None:
    """Print one line of the table."""
    load = f"{load_before:.1f} - {os.getloadavg()[0]:.1f}"
    print(f"| {kind} | {what} | {first} | {second} | {ratio} | {load} |", flush=True)


FIGURES = ["engines", "turns", "ahead", "caching"]
HEAD = """| engine | figure | first | second | ratio | load |
|---|---|---|---|---|---|"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", nargs="+", default=["transformers", "vllm"], choices=["transformers", "vllm"])
    parser.add_argument("--figures", nargs="+", default=FIGURES, choices=FIGURES)
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args(arguments)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        parser.error(f"found {len(cores)} core for this process; expected two, one for each engine")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for kind in chosen.kinds:
            if "engines" in chosen.figures:
                compare_engines(kind, cores, chosen.repeats, Path(folder) / kind)
            if "turns" in chosen.figures:
                compare_turns(kind, cores, chosen.repeats, Path(folder) / f"{kind}-turns")
        if "vllm" in chosen.kinds and "ahead" in chosen.figures:
            compare_bounds(cores, chosen.repeats, Path(folder) / "ahead")
        if "vllm" in chosen.kinds and "caching" in chosen.figures:
            compare_caching(cores, chosen.repeats, Path(folder) / "caching")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
