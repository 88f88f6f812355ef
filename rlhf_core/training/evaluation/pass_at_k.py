"""pass@k: the probability that at least one of ``k`` sampled completions of a prompt is correct.

Pure functions of the scores.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from rlhf_core.schemas.evaluation import CORRECT_SCORE
from rlhf_core.training.evaluation.intervals import effective_samples, wilson_interval


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Estimate pass@k of one prompt without bias, from at least ``k`` independent completions.

    ``1 - C(n - c, k) / C(n, k)`` for ``c`` correct ones of ``n``, as a product without large numbers (Chen et al. 2021,
    arXiv 2107.03374, equation 1). ``1 - (1 - c / n) ** k`` would be too low: it draws with replacement.
    """
    num_wrong = num_samples - num_correct
    if num_wrong < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / count for count in range(num_wrong + 1, num_samples + 1))


def mean_pass_at_k(
    scores: Sequence[Sequence[float]], confidence: float
) -> Mapping[int, tuple[float, tuple[float, float]]]:
    """Estimate pass@k over all prompts for ``k`` = 1, 2, 4 ... up to the number of completions per prompt.

    Args:
        scores: one inner sequence per prompt, all of them equally long and none empty.
        confidence: level, between 0 and 1.

    Returns:
        For each ``k`` the mean over the prompts and its interval, as :func:`~.intervals.mean_interval` has it for
        shares. Empty for one completion per prompt, and if a score is not between 0 and 1: none is then right or wrong.
    """
    num_samples = len(scores[0])
    if num_samples < 2 or not all(0 <= score <= 1 for samples in scores for score in samples):
        return {}
    correct = [sum(score >= CORRECT_SCORE for score in samples) for samples in scores]
    found = {}
    for k in (2**power for power in range(num_samples.bit_length())):
        estimates = [pass_at_k(num_samples, num_correct, k) for num_correct in correct]
        share, independent = fmean(estimates), effective_samples(estimates, num_samples * len(scores))
        found[k] = share, wilson_interval(share, independent, confidence)
    return found
