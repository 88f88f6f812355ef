"""Confidence intervals of a mean score."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.training.evaluation.intervals import (
    effective_samples,
    mean_interval,
    mean_score,
    student_quantile,
    weighted_interval,
    weighted_mean,
    wilson_interval,
)


def test_an_interval_of_weighted_values_covers_their_mean_as_often_as_it_says() -> None:
    """Losses per token of completions of very different lengths, whose own losses depend on the length."""
    chance, mean, covered = random.Random(5), 0.0, 0
    lengths = [(length, length / 100) for length in range(1, 201)]
    mean = sum(length * loss for length, loss in lengths) / sum(length for length, _ in lengths)
    for _ in range(400):
        rows = chance.choices(lengths, k=150)
        losses = [chance.gauss(loss, 0.3) for _, loss in rows]
        low, high = weighted_interval(losses, [length for length, _ in rows], 0.9)
        covered += low <= mean <= high
    assert 0.86 < covered / 400 < 0.94


def test_an_interval_of_equal_weights_is_that_of_the_mean() -> None:
    values = [0.2, 1.5, 3.0, 0.7]
    expected = mean_interval([[value] for value in values], 0.95)
    assert weighted_interval(values, [7.0] * 4, 0.95) == pytest.approx(expected)
    assert weighted_mean([1.0, 4.0], [2.0, 1.0]) == 2.0
    low, high = weighted_interval([2.0, 2.0, 2.0], [1.0, 5.0, 9.0], 0.95)
    assert low == high == 2.0, "the lengths of the rows do not widen it"
    assert weighted_interval([math.nan, 1.0], [1.0, 1.0], 0.95) == (-math.inf, math.inf)


def test_wilson_agrees_with_published_values() -> None:
    # Newcombe 1998, Statistics in Medicine 17, table I, method 3 (score without continuity correction).
    for successes, total, low, high in [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ]:
        found = wilson_interval(successes / total, total, 0.95)
        assert found == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(
    ("probability", "degrees", "expected"),
    [(0.975, 1, 12.706205), (0.975, 2, 4.302653), (0.975, 10, 2.228139), (0.995, 30, 2.749996), (0.95, 120, 1.657651)],
)
def test_student_quantile_agrees_with_tables(probability: float, degrees: int, expected: float) -> None:
    assert student_quantile(probability, degrees) == pytest.approx(expected, abs=1e-5)


def test_one_sample_per_prompt_is_plain_wilson() -> None:
    scores = [[1.0]] * 30 + [[0.0]] * 70
    assert mean_interval(scores, 0.95) == wilson_interval(0.3, 100, 0.95)


def test_all_right_or_all_wrong_still_has_a_width() -> None:
    low, high = mean_interval([[1.0, 1.0]] * 50, 0.95)
    assert high == 1.0
    assert low == pytest.approx(wilson_interval(1.0, 50, 0.95)[0])
    assert mean_interval([[0.0]] * 50, 0.95)[0] == 0.0


def test_samples_that_agree_with_each_other_count_once() -> None:
    agreeing = [[1.0] * 8] * 20 + [[0.0] * 8] * 30
    assert effective_samples([samples[0] for samples in agreeing], 400) == pytest.approx(50, rel=0.05)
    naive = wilson_interval(0.4, 400, 0.95)
    low, high = mean_interval(agreeing, 0.95)
    assert high - low > 2.5 * (naive[1] - naive[0])


def test_independent_samples_count_in_full() -> None:
    noise = random.Random(0)
    scores = [[float(noise.random() < 0.5) for _ in range(4)] for _ in range(500)]
    assert effective_samples(list(map(statistics.fmean, scores)), 2000) > 1700


def test_other_scores_get_students_interval_over_prompts() -> None:
    means = [0.1, 0.4, 0.35, 0.8, 0.55]
    low, high = mean_interval([[value - 0.05, value + 0.05] for value in means], 0.95)
    half = 2.776445 * statistics.stdev(means) / math.sqrt(5)
    assert (low, high) == pytest.approx((statistics.fmean(means) - half, statistics.fmean(means) + half), abs=1e-6)
    assert mean_interval([[0.5]], 0.95) == (-math.inf, math.inf)


@given(
    st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=3, max_size=3), min_size=2, max_size=40),
    st.floats(0.5, 0.999),
)
def test_the_interval_holds_the_mean_and_stays_between_0_and_1(scores: list[list[float]], confidence: float) -> None:
    low, high = mean_interval(scores, confidence)
    mean = statistics.fmean(value for samples in scores for value in samples)
    assert 0 <= low <= mean + 1e-12
    assert mean - 1e-12 <= high <= 1


@pytest.mark.parametrize("score", [0.1, -1.6, 1 / 3])
@pytest.mark.parametrize("samples_per_prompt", [1, 3])
def test_the_mean_of_equal_scores_is_in_its_interval(score: float, samples_per_prompt: int) -> None:
    """Such an interval has no width, and a plain sum of 512 tenths is not 51.2."""
    scores = [[score] * samples_per_prompt] * 512
    low, high = mean_interval(scores, 0.95)
    assert low <= mean_score(scores) <= high


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """Prompts differ in difficulty and have 4 samples each; treating samples as independent would cover too rarely."""
    noise = random.Random(1)
    covered = naive_covered = 0
    for _ in range(400):
        difficulties = [noise.choice([0.02, 0.95]) for _ in range(60)]
        scores = [[float(noise.random() < difficulty) for _ in range(4)] for difficulty in difficulties]
        truth = (0.02 + 0.95) / 2
        low, high = mean_interval(scores, 0.95)
        covered += low <= truth <= high
        mean = statistics.fmean(value for samples in scores for value in samples)
        naive = wilson_interval(mean, 240, 0.95)
        naive_covered += naive[0] <= truth <= naive[1]
    assert 0.92 <= covered / 400 <= 0.98
    assert naive_covered / 400 < 0.80


def test_uneven_scores_are_refused() -> None:
    with pytest.raises(ValueError, match="equally many scores for every prompt"):
        mean_interval([[1.0], [0.0, 1.0]], 0.95)
    with pytest.raises(ValueError, match="equally many scores for every prompt"):
        mean_interval([], 0.95)
