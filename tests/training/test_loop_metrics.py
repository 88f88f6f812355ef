"""The packed metric reduction on two real gloo processes, and what it catches that nothing else does."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_launcher import launch, make_context, tiny_spec, values

pytestmark = [pytest.mark.training]


def every_scenario(rank: int, num_ranks: int, run_dir: str) -> dict[str, Any]:
    """All cases in one process group; what a case raises is its result."""
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    from rlhf_core.training import metrics as module
    from rlhf_core.training.distributed import init_process_group

    module._DIAGNOSIS_WAIT_S = 1.0
    ranks = init_process_group(make_context(run_dir, tiny_spec(), rank, num_ranks))
    results: dict[str, Any] = {}

    def reduce(case: str, step: int, names: dict[str, float], request: str = "") -> None:
        own = dataclasses.replace(ranks, store=PrefixStore(case, ranks.store))
        metrics = module.StepMetrics(step, own)
        for name, value in names.items():
            metrics.mean(name, value, 1)
        try:
            reduced = metrics.reduced(request)
            results[case] = [reduced.values, reduced.stop, reduced.save_failed]
        except module.MetricsMismatch as error:
            results[case] = str(error)

    kinds = module.StepMetrics(1, ranks)
    kinds.mean("mean", 3 + rank, 2 + 2 * rank)
    kinds.mean("nothing", 0, 0)
    kinds.total("total", 2**51 + rank)
    kinds.shared("shared", 0.1 if rank == 0 else 99)
    kinds.digest("digest", [f"text {index}" for index in range(rank, 10, num_ranks)])
    lone_rank: Any = SimpleNamespace(is_first=True, gather_numbers=lambda vector: [vector])
    alone = module.StepMetrics(1, lone_rank)
    alone.digest("digest", [f"text {index}" for index in reversed(range(10))])
    results["kinds"] = kinds.reduced().values
    results["digest alone"] = alone.reduced().values["digest"]

    own = module.StepMetrics(1, ranks)
    own.each("each", 10 + rank)
    own.highest("highest", -1 - rank)
    own.lowest("lowest", -1 - rank)
    reduced = own.reduced()
    results["by rank"] = [reduced.values, reduced.by_rank]

    reduce("same", 7, {"a": rank, "b": 1.0})
    reduce("order", 7, {"a": 1.0, "b": 2.0} if rank == 0 else {"b": 2.0, "a": 1.0})
    reduce("votes", 7, {"a": 0.0}, request="failed" if rank == 1 else "")
    reduce("stop", 7, {"a": 0.0}, request="stop" if rank == 0 else "")
    reduce("not a number", 7, {"a": float("nan") if rank == 1 else 1.0, "b": 1.0})
    reduce("other name", 7, {"loss": 1.0, ("reward" if rank == 0 else "kl"): 2.0})
    reduce("one metric more", 7, {"loss": 1.0} if rank == 0 else {"loss": 1.0, "kl": 2.0})
    reduce("skipped a step", 7 + rank, {"loss": 1.0})

    # What goes on without the fingerprint: shapes match, so gloo adds rank 0's loss to rank 1's entropy.
    naive = torch.tensor([0.25 if rank == 0 else 4.0])
    dist.all_reduce(naive)
    results["naive"] = naive.item() / num_ranks

    if rank == 0:
        reduce("another collective", 9, {"loss": 1.0})
    else:
        other = torch.zeros(module.VECTOR_SIZE, dtype=torch.float64)
        dist.all_gather([torch.empty_like(other) for _ in range(num_ranks)], other)
    ranks.barrier()
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("metrics")
    return values(launch(every_scenario, 2, folder, run_dir=str(folder / "run")))


def test_metrics_are_reduced_by_their_kind(results: list[dict[str, Any]]) -> None:
    for result in results:
        found = result["kinds"]
        assert found["mean"] == 7 / 6
        assert "nothing" not in found
        assert found["total"] == 2**52 + 1
        assert found["shared"] == 0.1
        assert found["digest"] == result["digest alone"]


def test_what_every_rank_has_its_own_of_comes_with_the_same_reduction(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["by rank"] == [{"highest": -1, "lowest": -2}, {"each": [10, 11]}]


def test_all_ranks_get_the_same(results: list[dict[str, Any]]) -> None:
    assert results[0]["same"] == results[1]["same"] == [{"a": 0.5, "b": 1.0}, False, False]
    assert results[0]["order"] == results[1]["order"] == [{"a": 1.0, "b": 2.0}, False, False]


def test_one_vote_is_enough_and_reaches_everybody(results: list[dict[str, Any]]) -> None:
    assert [result["votes"][1:] for result in results] == [[False, True]] * 2
    assert [result["stop"][1:] for result in results] == [[True, False]] * 2


def test_a_value_that_is_not_finite_spoils_only_itself(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["not a number"][0]["b"] == 1.0
        assert result["not a number"][0]["a"] != result["not a number"][0]["a"]


def test_another_metric_name_is_caught_on_every_rank(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert "rank 0 has the metrics ['loss', 'reward']" in result["other name"]
        assert "rank 1 has the metrics ['kl', 'loss']" in result["other name"]
        assert "not on every rank: ['kl', 'reward']" in result["other name"]
        assert "not on every rank: ['kl']" in result["one metric more"]


def test_a_skipped_step_is_caught_though_the_shapes_match(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert "steps: rank 0 at 7, rank 1 at 8" in result["skipped a step"]


def test_without_the_fingerprint_metrics_are_mixed_silently(results: list[dict[str, Any]]) -> None:
    """Negative control: the mean of a loss and an entropy, unnoticed."""
    assert [result["naive"] for result in results] == [2.125, 2.125]


def test_a_rank_in_another_collective_of_equal_shape_is_named(results: list[dict[str, Any]]) -> None:
    assert "not in the metric collective but in another one: ranks [1]" in results[0]["another collective"]


@given(st.lists(st.integers(0, 3) | st.integers(0, (1 << 40) - 1), min_size=1, max_size=6))
def test_the_verdict_is_exact_for_any_number_of_ranks(fingerprints: list[int]) -> None:
    from rlhf_core.training.metrics import odd_ranks

    odd = odd_ranks([float(found) for found in fingerprints])
    assert bool(odd) == (len(set(fingerprints)) > 1)
    even = [found for rank, found in enumerate(fingerprints) if rank not in odd]
    assert len(set(even)) <= 1
    assert all(fingerprints.count(found) < len(even) for found in {fingerprints[rank] for rank in odd} if even)


def odd_scenario(rank: int, num_ranks: int, run_dir: str) -> dict[str, str]:
    """Rank 2 of three is odd, in its step or in its metrics; and, as a control, in nothing."""
    from torch.distributed.distributed_c10d import PrefixStore

    from rlhf_core.training import metrics as module
    from rlhf_core.training.distributed import init_process_group

    ranks = init_process_group(make_context(run_dir, tiny_spec(), rank, num_ranks))
    found = {}
    for case, step, name in (("step", 4 + (rank == 2), "a"), ("name", 4, "b" if rank == 2 else "a"), ("none", 4, "a")):
        own = dataclasses.replace(ranks, store=PrefixStore(case, ranks.store))
        metrics = module.StepMetrics(step, own)
        metrics.mean(name, 1.0, 1)
        metrics.shared_share("shared", ["same", f"of {rank}"])
        try:
            found[case] = str(metrics.reduced().values)
        except module.MetricsMismatch as error:
            found[case] = str(error)
    ranks.barrier()
    return found


def test_the_odd_rank_is_named_and_none_where_all_agree(tmp_path: Path) -> None:
    for found in values(launch(odd_scenario, 3, tmp_path, run_dir=str(tmp_path / "run"))):
        assert "rank 2 differs from the other 2 (brought step 5)" in found["step"]
        assert "rank 2 differs from the other 2 (brought step 4)" in found["name"]
        assert "rank 2 has the metrics ['b']" in found["name"]
        assert found["none"] == "{'a': 1.0, 'shared': 0.25}", "one of four different texts is on several ranks"


@pytest.mark.parametrize(
    ("ranks", "share"),
    [
        ((range(500), range(500)), 1.0),
        ((range(500), range(500, 1000)), 0.0),
        ((range(4), range(2, 6)), 2 / 6),
        ((range(0), range(3)), 0.0),
        ((range(0), range(0)), 0.0),
    ],
)
def test_a_sketch_tells_how_much_ranks_share(ranks: tuple[range, ...], share: float) -> None:
    from rlhf_core.training.metrics import share_of_shared, sketch_of

    sketches = [sketch_of(f"text {number}" for number in texts) for texts in ranks]
    assert share_of_shared(sketches) == share


def test_too_many_metrics_are_refused(tmp_path: Path) -> None:
    import torch
    from torch.distributed import HashStore

    from rlhf_core.training.distributed import Ranks
    from rlhf_core.training.metrics import CAPACITY, StepMetrics
    from rlhf_core.training.types import NullReporter

    ranks = Ranks(0, 1, torch.device("cpu"), NullReporter(), HashStore())
    metrics = StepMetrics(1, ranks)
    for index in range(CAPACITY + 1):
        metrics.shared(f"group/{index}", 0.0)
    with pytest.raises(ValueError, match="found 129 metrics in one step, expected at most 128"):
        metrics.reduced()
