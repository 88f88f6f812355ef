"""Confidence intervals of a mean score.

Pure functions: the same scores give the same interval.
"""

import math
import operator
from collections.abc import Sequence
from statistics import NormalDist, fmean, variance


def mean_score(scores: Sequence[Sequence[float]]) -> float:
    """Mean over all samples of prompts with equally many of them.

    The centre of :func:`mean_interval`: a sum in another order may be rounded to a value outside a narrow interval.
    """
    return fmean(map(fmean, scores))


def mean_interval(scores: Sequence[Sequence[float]], confidence: float) -> tuple[float, float]:
    """Interval of the mean over all samples.

    Samples of one prompt are not independent: prompts are drawn at random, so they are the clusters
    (Miller 2024, arXiv 2411.00640, section 2.2). Scores of 0 and 1 get the interval of Wilson (1927), which keeps its
    coverage near 0 and 1 and for few samples (Brown, Cai, DasGupta 2001, Statistical Science 16(2)), with the number of
    samples replaced by the effective one if there are several per prompt (Franco et al. 2019, Journal of Survey
    Statistics and Methodology 7(3)). Other scores get Student's interval over the means of the prompts.

    Args:
        scores: one inner sequence per prompt, all of them equally long and none empty.
        confidence: level, between 0 and 1.

    Returns:
        Lower and upper bound. A single prompt with scores other than 0 and 1 gives minus and plus infinity.

    Raises:
        ValueError: no scores, or prompts with different numbers of samples.
    """
    samples_per_prompt = {len(samples) for samples in scores}
    if len(samples_per_prompt) != 1 or 0 in samples_per_prompt:
        raise ValueError(
            f"expected equally many scores for every prompt, at least one; found {sorted(samples_per_prompt)}"
        )
    means = [fmean(samples) for samples in scores]
    if all(score in (0, 1) for samples in scores for score in samples):
        return wilson_interval(fmean(means), effective_samples(means, sum(map(len, scores))), confidence)
    if len(means) < 2:
        return -math.inf, math.inf
    half = student_quantile((1 + confidence) / 2, len(means) - 1) * math.sqrt(variance(means) / len(means))
    return fmean(means) - half, fmean(means) + half


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Mean of the values of independent rows, each with a positive weight."""
    return math.fsum(map(operator.mul, values, weights)) / math.fsum(weights)


def weighted_interval(values: Sequence[float], weights: Sequence[float], confidence: float) -> tuple[float, float]:
    """Interval of :func:`weighted_mean`, a ratio of two means over the rows, by linearisation.

    The ratio varies as the mean of the residuals ``weight (value - ratio)``, divided by the mean weight (Cochran 1977,
    Sampling Techniques, section 6.4). With equal weights this is Student's interval.

    Args:
        confidence: level, between 0 and 1.

    Returns:
        Lower and upper bound; minus and plus infinity for a single row, and for a mean that is not finite.
    """
    mean = weighted_mean(values, weights)
    if len(values) < 2 or not math.isfinite(mean):
        return -math.inf, math.inf
    residuals = [weight * (value - mean) for value, weight in zip(values, weights, strict=True)]
    deviation = math.sqrt(variance(residuals) / len(values)) / fmean(weights)
    half = student_quantile((1 + confidence) / 2, len(values) - 1) * deviation
    return mean - half, mean + half


def wilson_interval(share: float, num_samples: float, confidence: float) -> tuple[float, float]:
    """Wilson's interval for a share of successes among ``num_samples`` (which need not be whole)."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    centre = (share + z**2 / (2 * num_samples)) / (1 + z**2 / num_samples)
    spread = math.sqrt(share * (1 - share) / num_samples + z**2 / (4 * num_samples**2))
    half = z / (1 + z**2 / num_samples) * spread
    # At the ends the bound is the share itself; rounding must not exceed it.
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def effective_samples(shares: Sequence[float], num_samples: int) -> float:
    """Number of independent samples that would estimate the share of successes as precisely as these clustered ones.

    Between the number of prompts (all samples of a prompt agree) and the number of samples (they are independent); the
    number of prompts if the scores do not vary at all, because the clustering is then unknown.

    Args:
        shares: share of successes of each prompt.
        num_samples: samples of all prompts.
    """
    num_prompts, share = len(shares), fmean(shares)
    if num_samples == num_prompts or num_prompts < 2 or share in (0, 1):
        return num_prompts
    squared_error = variance(shares) / num_prompts
    if squared_error == 0:
        return num_samples
    return min(max(share * (1 - share) / squared_error, num_prompts), num_samples)


def student_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t distribution, to about six digits, for probabilities from 0.5 up to, but not including,
    1.

    With ``t = sqrt(degrees) * tan(angle)`` the density becomes ``cos(angle) ** (degrees - 1)`` on a finite range; it is
    summed up by the midpoint rule until the probability is reached.
    """
    norm = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)
    limit = math.pi / 2 if degrees < 100 else 40 / math.sqrt(degrees)
    num_slices = 20_000
    width = limit / num_slices
    missing = (probability - 0.5) / (norm * width)
    for index in range(num_slices):
        height = math.cos((index + 0.5) * width) ** (degrees - 1)
        if missing <= height:
            return math.sqrt(degrees) * math.tan((index + missing / height) * width)
        missing -= height
    return math.inf
