"""Tokens of the busiest rank relative to the mean, with groups of samples dealt in the given order and by length.

    python tests/benchmarks/bench_balance.py [--draws 40]

Lengths have the heavy tail of the ragged comparisons of ``bench_train.py``. Ranks wait for the busiest one in every
update, so the first figure bounds the reduction of a step's training phase that exchanging samples could bring.
"""

import argparse
import random
from statistics import median

from rlhf_core.training.data.micro_batches import balanced

LONGEST, SAMPLES = 256, 8
SIZES = ((2, 8), (8, 32), (8, 64), (8, 128), (32, 128), (32, 512))
"""Ranks, and prompts of a step."""


def busiest(weights: list[int], parts: list[list[int]]) -> float:
    """Ratio of the largest part to the mean one."""
    return max(sum(weights[index] for index in part) for part in parts) * len(parts) / sum(weights)


def main() -> None:
    """Print one line per size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--draws", type=int, default=40)
    asked = parser.parse_args()
    for num_ranks, prompts in SIZES:
        draw, size = random.Random(0), prompts // num_ranks
        as_they_come, by_length = [], []
        for _ in range(asked.draws):
            tails = [[draw.lognormvariate(0, 1.0) for _ in range(SAMPLES)] for _ in range(prompts)]
            weights = [sum(min(LONGEST, max(1, round(tail * LONGEST / 12))) for tail in group) for group in tails]
            contiguous = [list(range(start, start + size)) for start in range(0, prompts, size)]
            as_they_come.append(busiest(weights, contiguous))
            by_length.append(busiest(weights, balanced(weights, num_ranks)))
        print(
            f"{num_ranks:>3} ranks, {prompts:>4} prompts of {SAMPLES} samples: busiest / mean "
            f"{median(as_they_come):.2f} as they come, {median(by_length):.2f} by length"
        )


if __name__ == "__main__":
    main()
