"""pass@k of sampled completions: without bias, and from the scores that are gathered anyway."""

import itertools
import math
import random
from statistics import fmean

import pytest

from rlhf_core.schemas.evaluation import display_order
from rlhf_core.training.evaluation.intervals import mean_interval, mean_score
from rlhf_core.training.evaluation.pass_at_k import mean_pass_at_k, pass_at_k


def expected_over_draws(chance: float, num_samples: int, k: int, estimate: str) -> float:
    """Expected value of an estimate from completions that are each correct with this chance."""
    total = 0.0
    for correct in range(num_samples + 1):
        probability = math.comb(num_samples, correct) * chance**correct * (1 - chance) ** (num_samples - correct)
        naive = 1 - (1 - correct / num_samples) ** k
        total += probability * (pass_at_k(num_samples, correct, k) if estimate == "unbiased" else naive)
    return total


@pytest.mark.parametrize("num_samples", range(1, 9))
def test_it_is_the_share_of_the_choices_of_k_completions_with_a_correct_one(num_samples: int) -> None:
    for correct, k in itertools.product(range(num_samples + 1), range(1, num_samples + 1)):
        completions = [index < correct for index in range(num_samples)]
        choices = list(itertools.combinations(completions, k))
        assert pass_at_k(num_samples, correct, k) == pytest.approx(fmean(map(any, choices)), abs=1e-12)


def test_many_completions_give_the_binomial_coefficients_of_the_formula() -> None:
    for correct, k in [(1, 1), (1, 512), (3, 100), (700, 256), (1000, 1), (0, 1000)]:
        exact = 1 - math.comb(1000 - correct, k) / math.comb(1000, k)
        assert pass_at_k(1000, correct, k) == pytest.approx(exact, rel=1e-9, abs=1e-12)
        assert 0 <= pass_at_k(1000, correct, k) <= 1


@pytest.mark.parametrize("chance", [0.03, 0.2, 0.6])
@pytest.mark.parametrize(("num_samples", "k"), [(4, 2), (8, 8), (16, 8)])
def test_it_has_no_bias_and_the_naive_estimate_has(chance: float, num_samples: int, k: int) -> None:
    truth = 1 - (1 - chance) ** k
    assert expected_over_draws(chance, num_samples, k, "unbiased") == pytest.approx(truth, abs=1e-12)
    assert expected_over_draws(chance, num_samples, k, "naive") < truth - 1e-3, "control"


def test_scores_of_0_and_1_have_their_mean_and_interval_at_1() -> None:
    noise = random.Random(2)
    scores = [[float(noise.random() < 0.3) for _ in range(6)] for _ in range(40)]
    found = mean_pass_at_k(scores, 0.95)
    assert list(found) == [1, 2, 4]
    value, interval = found[1]
    assert value == pytest.approx(mean_score(scores), abs=1e-12)
    assert interval == pytest.approx(mean_interval(scores, 0.95), abs=1e-12)
    assert found[4][0] == pytest.approx(fmean(pass_at_k(6, int(sum(samples)), 4) for samples in scores))


def test_graded_scores_are_correct_from_the_middle_on() -> None:
    """As in the table of samples in the report. Scores on another scale, and single completions, have no pass@k."""
    assert mean_pass_at_k([[0.5, 0.49], [0.1, 0.2]], 0.95)[1][0] == 0.25
    assert mean_pass_at_k([[0.5, 0.49], [0.1, 0.2]], 0.95)[2][0] == 0.5
    for scores in ([[1.0, -1.0]], [[0.0, 7.5]], [[1.0, math.nan]], [[1.0], [0.0]]):
        assert mean_pass_at_k(scores, 0.95) == {}


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """Prompts differ in difficulty and have 8 completions each."""
    noise, covered = random.Random(4), 0
    difficulties = [0.0, 0.05, 0.3, 0.9]
    truth = fmean(1 - (1 - chance) ** 4 for chance in difficulties)
    for _ in range(400):
        chances = noise.choices(difficulties, k=60)
        scores = [[float(noise.random() < chance) for _ in range(8)] for chance in chances]
        low, high = mean_pass_at_k(scores, 0.95)[4][1]
        assert 0 <= low < high <= 1
        covered += low <= truth <= high
    assert 0.92 <= covered / 400 <= 0.98


def test_names_are_in_the_order_of_k() -> None:
    names = ["pass@16", "loss", "pass@2", "sampled", "greedy", "pass@1"]
    assert sorted(names, key=display_order) == ["greedy", "sampled", "loss", "pass@1", "pass@2", "pass@16"]
