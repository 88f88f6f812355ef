"""The contract of collectives: no collective may have a shape or an order that depends on a rank's own rows.

TRL's CPO, ORPO and SimPO gathered the raw logits of a batch for a metric (huggingface/trl#2474): ranks whose longest
rows differed contributed tensors of different shapes, and training hung (#3068). Two gloo processes reproduce it.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from rank_launcher import launch, make_context, tiny_spec, values

pytestmark = [pytest.mark.training]

LENGTHS = ((3, 9), (4, 5))
"""Tokens of the rows of each rank; the longest differ."""


def logits_of(rank: int) -> Any:
    """Logits of this rank's padded rows ``[B, T, V]``, and the mask of their tokens."""
    import torch
    from core_models import tiny_model

    lengths = torch.tensor(LENGTHS[rank])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    tokens = torch.arange(1, mask.numel() + 1).view(mask.shape) % 90
    with torch.no_grad():
        return tiny_model()(tokens).logits, mask


def gather_raw_logits(rank: int, num_ranks: int) -> float:
    """Gather the logits of all ranks and take their mean, as TRL did before #3069."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=4))
    logits, _ = logits_of(rank)
    found = [torch.empty_like(logits) for _ in range(num_ranks)]
    dist.all_gather(found, logits)
    return float(torch.cat(found).mean())


def test_negative_control_ranks_that_gather_raw_logits_do_not_come_through(tmp_path: Path) -> None:
    """Gloo aborts one rank or reaches its timeout; NCCL, which checks no sizes, hangs."""
    results = launch(gather_raw_logits, 2, tmp_path)
    assert any(result.exit_code != 0 for result in results)
    assert len([result for result in results if result.value is not None]) < 2


def keep_the_contract(rank: int, num_ranks: int, run_dir: str) -> dict[str, Any]:
    """Compute the same figure as a sum and a count, and issue two metric collectives in a different order on each
    rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    from rlhf_core.training import metrics as module
    from rlhf_core.training.algorithms.aggregation import masked_stat
    from rlhf_core.training.distributed import init_process_group

    module._DIAGNOSIS_WAIT_S = 1.0
    ranks = init_process_group(make_context(run_dir, tiny_spec(), rank, num_ranks))
    logits, mask = logits_of(rank)
    step = module.StepMetrics(1, ranks)
    step.mean("logits", *(float(part) for part in masked_stat(logits.mean(-1), mask)))
    found: dict[str, Any] = {"mean": step.reduced().values["logits"], "raised": []}

    order = ("loss", "reward") if rank == 0 else ("reward", "loss")
    for name in order:
        own = dataclasses.replace(ranks, store=PrefixStore(f"place {order.index(name)}", ranks.store))
        metrics = module.StepMetrics(2, own)
        metrics.mean(name, 1.0, 1)
        try:
            metrics.reduced()
        except module.MetricsMismatch as error:
            found["raised"].append(str(error))

    naive = {}
    for name in order:
        value = torch.tensor([0.25 if name == "loss" else 4.0])
        dist.all_reduce(value)
        naive[name] = value.item() / num_ranks
    found["naive"] = naive
    found["shared"] = in_a_sequence_group(ranks)
    ranks.barrier()
    return found


def in_a_sequence_group(ranks: Any) -> dict[str, Any]:
    """The collectives of ranks that share rows, with values of which each rank has another number."""
    import torch

    group = ranks.sharing_rows(2).sequence
    own = torch.arange(3 + 2 * ranks.rank, dtype=torch.float64) + 10 * ranks.rank
    parts = torch.arange(8, dtype=torch.bfloat16).view(2, 4) + 8 * ranks.rank
    swapped = group.swap(parts)
    return {
        "gathered": [part.tolist() for part in group.gather(own)],
        "swapped": swapped.tolist(),
        "swapped twice": torch.equal(group.swap(swapped), parts),
        "total": group.total(torch.tensor([1.5, float(ranks.rank)])).tolist(),
        "replica": ranks.sharing_rows(2).replica,
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("contract")
    return values(launch(keep_the_contract, 2, folder, run_dir=str(folder / "run")))


def test_the_same_figure_as_sum_and_count_is_exact_for_rows_of_any_length(results: list[dict[str, Any]]) -> None:
    parts = [logits_of(rank) for rank in range(2)]
    tokens = [float(value) for logits, mask in parts for value in logits.mean(-1)[mask]]
    means = [float(logits.mean(-1)[mask].mean()) for logits, mask in parts]
    for result in results:
        assert result["mean"] == pytest.approx(sum(tokens) / len(tokens), rel=1e-6)
    assert abs(sum(means) / 2 - sum(tokens) / len(tokens)) > 1e-4, "the mean of means is a different figure"


def test_ranks_that_share_rows_exchange_values_of_any_number(results: list[dict[str, Any]]) -> None:
    first, second = (result["shared"] for result in results)
    for found in (first, second):
        assert found["gathered"] == [[0, 1, 2], [10, 11, 12, 13, 14]]
        assert (found["swapped twice"], found["total"], found["replica"]) == (True, [3, 1], 0)
    assert first["swapped"] == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert second["swapped"] == [[4, 5, 6, 7], [12, 13, 14, 15]]


def test_collectives_in_another_order_are_named_on_every_rank(results: list[dict[str, Any]]) -> None:
    for result in results:
        first, second = result["raised"]
        assert "rank 0 has the metrics ['loss']; rank 1 has the metrics ['reward']" in first
        assert "rank 0 has the metrics ['reward']; rank 1 has the metrics ['loss']" in second
        assert "not on every rank: ['loss', 'reward']" in first


def test_negative_control_bare_collectives_in_another_order_mix_figures(results: list[dict[str, Any]]) -> None:
    assert [result["naive"] for result in results] == [{"loss": 2.125, "reward": 2.125}] * 2
