"""Health signals of a sampling step, as metrics in the packed vector.

Both sampling seeds and completions are checked for duplicates: two completions of one prompt under one seed are the
same whatever the policy, so seeds prove what completions only suggest, even if only some of a group are the same (verl
under ``full_determinism`` seeds every request with the index of its replica).
"""

from collections.abc import Sequence

from torch import Tensor

from rlhf_core.diagnosis.health.state import LENGTH_CORRELATION, LENGTH_SLOPE, SEEDS_ACROSS_PROMPTS, SEEDS_IN_GROUPS
from rlhf_core.training.metrics import StepMetrics


def add_signals(metrics: StepMetrics, seeds: Sequence[Sequence[int]], lengths: Sequence[int], rewards: Tensor) -> None:
    """Add the signals of this rank's completions.

    Args:
        seeds: sampling seeds, ``P`` groups of ``G``.
        lengths: number of sampled tokens of each of the ``P*G`` completions, group by group.
        rewards: ``[P, G]``.
    """
    in_groups, across = seed_repeats(seeds)
    metrics.each(SEEDS_IN_GROUPS, in_groups)
    metrics.each(SEEDS_ACROSS_PROMPTS, across)
    length = rewards.new_tensor(lengths).view_as(rewards)
    longer, better = (values - values.mean(-1, keepdim=True) for values in (length, rewards))
    products, squares, other_squares = (
        float(found.sum()) for found in (longer * better, longer.square(), better.square())
    )
    metrics.mean(LENGTH_SLOPE, products, squares)
    metrics.correlation(LENGTH_CORRELATION, products, squares, other_squares)


def seed_repeats(seeds: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Count repetitions among the sampling seeds of one rank.

    Args:
        seeds: seeds by group.

    Returns:
        Number of completions with the seed of an earlier one in their group, and number of seeds that a group shares
        with an earlier group, so that two prompts are sampled with the same noise.
    """
    in_groups, across, used = 0, 0, set[int]()
    for group in seeds:
        own = set(group)
        in_groups += len(group) - len(own)
        across += len(own & used)
        used |= own
    return in_groups, across
