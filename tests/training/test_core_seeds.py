"""Seeds of completions: reproducible and diverse on every layout of the cluster."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rlhf_core.training.checkpoints.state import kept_random_state
from rlhf_core.training.rollouts.seeds import sample_seed, uniforms
from rlhf_core.training.trainers.run import _seed_everything

pytestmark = pytest.mark.training

SeedFormula = Callable[["Where", int, int, str, int], int]
"""Function (where, step, index of the prompt in the local batch, prompt uid, sample index) -> seed."""

UIDS = [f"{number:016x}-0" for number in range(4)] + ["0000000000000000-1"]
STEPS = (1, 2)


@dataclass(frozen=True)
class Where:
    """A process that samples."""

    rank: int
    tensor_parallel: int


def content_addressed(where: Where, step: int, local_index: int, uid: str, sample_index: int) -> int:
    """Our formula."""
    return sample_seed(7, step, uid, sample_index)


def ms_swift_3745(where: Where, step: int, local_index: int, uid: str, sample_index: int) -> int:
    """The formula behind ms-swift #3745: the engine's rank plus the prompt's index in its request; the step should have
    been added and was not."""
    return where.rank // where.tensor_parallel + local_index


def disjoint_ranges(where: Where, step: int, local_index: int, uid: str, sample_index: int) -> int:
    """The later formula of ms-swift: a range of seeds per engine."""
    return len(UIDS) * (where.rank // where.tensor_parallel) + local_index


def seeds_of(
    formula: SeedFormula, num_engines: int, tensor_parallel: int, num_samples: int
) -> dict[tuple[int, str, int], set[int]]:
    """Seeds that the processes of a layout assign to each (step, prompt, sample). Prompts are dealt to the engines in
    turn; every rank of an engine computes the seeds of everything that the engine samples."""
    seeds: dict[tuple[int, str, int], set[int]] = {}
    for rank in range(num_engines * tensor_parallel):
        local_uids = UIDS[rank // tensor_parallel :: num_engines]
        for step in STEPS:
            for local_index, uid in enumerate(local_uids):
                for sample_index in range(num_samples):
                    seed = formula(Where(rank, tensor_parallel), step, local_index, uid, sample_index)
                    seeds.setdefault((step, uid, sample_index), set()).add(seed)
    return seeds


def faults(formula: SeedFormula, num_engines: int, tensor_parallel: int, num_samples: int) -> set[str]:
    """Faults of a formula on a layout."""
    seeds = seeds_of(formula, num_engines, tensor_parallel, num_samples)
    alone = seeds_of(formula, 1, 1, num_samples)
    found = set()
    if any(len(given_seeds) > 1 for given_seeds in seeds.values()):
        found.add("ranks of one engine disagree")
    if max(Counter(seed for given_seeds in seeds.values() for seed in given_seeds).values()) > 1:
        found.add("two completions share a seed")
    if seeds != alone:
        found.add("depends on the layout")
    return found


layouts = st.tuples(st.integers(1, 6), st.sampled_from([1, 2, 4, 8]), st.integers(2, 5))


@given(layouts)
@example((2, 8, 4))
def test_every_completion_has_its_own_seed_on_every_layout(layout: tuple[int, int, int]) -> None:
    assert faults(content_addressed, *layout) == set()


@pytest.mark.parametrize("formula", [ms_swift_3745, disjoint_ranges])
def test_negative_control_seeds_from_ranks_are_caught(formula: SeedFormula) -> None:
    assert faults(formula, 2, 2, 4) == {"two completions share a seed", "depends on the layout"}


@given(st.integers(0, 2**40), st.integers(0, 10**9), st.text(max_size=20), st.integers(0, 10**6))
def test_seeds_fit_int64_and_depend_on_every_argument(run_seed: int, step: int, uid: str, index: int) -> None:
    seed = sample_seed(run_seed, step, uid, index)
    others = {
        sample_seed(run_seed + 1, step, uid, index),
        sample_seed(run_seed, step + 1, uid, index),
        sample_seed(run_seed, step, uid + "0", index),
        sample_seed(run_seed, step, uid, index + 1),
    }
    assert 0 <= seed < 2**63
    assert len(others | {seed}) == 5


def test_seeds_never_change_between_versions() -> None:
    assert sample_seed(0, 1, "a", 0) == 4764872242475154743
    assert uniforms(torch.tensor([0, 2**62]), 3).tolist() == [0.9708819781538285, 0.39328768242720713]


def splitmix64(seed: int, position: int) -> float:
    """Published generator in plain Python."""
    bits = (1 << 64) - 1
    state = (seed + 0x9E3779B97F4A7C15 * (position + 1)) & bits
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & bits
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & bits
    return ((state ^ (state >> 31)) >> 12) / 2**52


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=5), st.integers(0, 10**6))
def test_uniforms_are_splitmix64(seeds: list[int], position: int) -> None:
    expected = [splitmix64(seed, position) for seed in seeds]
    assert uniforms(torch.tensor(seeds), position).tolist() == expected


def test_uniforms_are_uniform_over_neighbouring_seeds_and_positions() -> None:
    by_seed = uniforms(torch.arange(100_000), 0)
    by_position = torch.cat([uniforms(torch.tensor([5]), position) for position in range(20_000)])
    for values in (by_seed, by_position):
        ranks = (torch.arange(len(values)) + 0.5) / len(values)
        distance = float((values.sort().values - ranks).abs().max())
        assert distance < 1.95 / len(values) ** 0.5  # Kolmogorov-Smirnov, 0.1 %
        assert abs(float(torch.corrcoef(torch.stack([values[:-1], values[1:]]))[0, 1])) < 4 / len(values) ** 0.5


def test_every_seed_that_a_run_accepts_seeds_all_generators() -> None:
    with kept_random_state(torch.device("cpu")):
        for seed in (0, 1_764_000_000_000_000_000, 2**63 - 1):  # the second: a time in nanoseconds
            _seed_everything(seed, rank=511)
