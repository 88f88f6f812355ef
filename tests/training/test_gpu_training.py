"""Training on a GPU: the numbers of the CPU, the same bits in every run, and exact resumption."""

from pathlib import Path
from typing import Any

import pytest
import torch
from core_models import QWEN, tiny_model
from pydantic import JsonValue
from rank_launcher import of_one_rank, tiny_spec, training_group
from test_loop_runs import Interrupting, final_state, interrupt, metrics_of

from rlhf_core.schemas.reports import Phase
from rlhf_core.training.distributed import make_deterministic
from rlhf_core.training.models.causal_lm import PolicyModel
from rlhf_core.training.models.lean_layers import use_lean_layers

pytestmark = [pytest.mark.training, pytest.mark.gpu]

DTYPES = ("float32", "bfloat16")
LONG: dict[str, JsonValue] = {**QWEN, "num_attention_heads": 8, "head_dim": 64, "max_position_embeddings": 4096}
"""Sequences of many blocks of attention, whose parts of a gradient are added in an order that may vary."""


def policy(config: dict[str, JsonValue], dtype: torch.dtype, device: str) -> PolicyModel:
    """The same weights for every device and number format."""
    model = tiny_model(config).to(device, dtype)
    use_lean_layers(model)
    return PolicyModel(model)


def batch(lengths: list[int], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences ``[B, T+1]`` of these lengths with a common prefix, and their targets ``[B, T]``."""
    ids = torch.randint(3, 100, (len(lengths), max(lengths) + 1), generator=torch.Generator().manual_seed(1))
    ids[:, :4] = ids[0, :4]
    ends = torch.tensor(lengths)[:, None]
    places = torch.arange(max(lengths))
    mask = (places >= 2) & (places < ends)
    ids[:, 1:][~(places < ends)] = 0
    return ids.to(device), mask.to(device)


def gradients(model: PolicyModel, lengths: list[int], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the targets, and the gradient of their mean over all weights, in double precision."""
    ids, mask = batch(lengths, device)
    logprobs, _ = model(ids, target_mask=mask)
    model.zero_grad()
    (logprobs.sum() / mask.sum()).backward()
    parts = [weights.grad.flatten() for weights in model.parameters() if weights.grad is not None]
    return logprobs[mask].detach().double().cpu(), torch.cat(parts).double().cpu()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error in the norm."""
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-5), ("bfloat16", 3e-2)])
def test_log_probabilities_and_gradients_are_those_of_double_precision(dtype: str, most: float) -> None:
    lengths = [30, 9, 17, 30, 3]
    expected = gradients(policy(QWEN, torch.float64, "cpu"), lengths, "cpu")
    found = gradients(policy(QWEN, getattr(torch, dtype), "cuda"), lengths, "cuda")
    assert policy(QWEN, getattr(torch, dtype), "cuda").packs
    assert [error(one, other) < most for one, other in zip(found, expected, strict=True)] == [True, True]
    wrong = gradients(policy(QWEN, torch.float64, "cpu"), [29, *lengths[1:]], "cpu")
    assert error(wrong[1], expected[1]) > most


def num_equal(dtype: str, *, deterministic: bool) -> int:
    """Number of 10 repetitions that give the same gradient, bit for bit."""
    device = torch.device("cuda")
    make_deterministic(device, on_gpus=deterministic)
    try:
        model = policy(LONG, getattr(torch, dtype), "cuda")
        lengths = [4000, 3000, 3500, 4000]
        _, expected = gradients(model, lengths, "cuda")
        return sum(torch.equal(gradients(model, lengths, "cuda")[1], expected) for _ in range(10))
    finally:
        make_deterministic(device, on_gpus=False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_long_sequences_have_the_same_bits_every_time(dtype: str) -> None:
    assert num_equal(dtype, deterministic=True) == 10


def test_without_asking_they_differ() -> None:
    assert num_equal("bfloat16", deterministic=False) < 10


# ---------------------------------------------------------------------------------------------------------------------
# Runs


def spec_of(dtype: str, **sections: Any) -> dict[str, Any]:
    """Settings of a run of seconds on the first GPU."""
    model = {**tiny_spec()["model"], "dtype": dtype}
    trainer = {"deterministic": True, **sections.pop("trainer", {})}
    return tiny_spec(resources={"gpus_per_node": 1}, model=model, trainer=trainer, **sections)


TRAINERS: dict[str, dict[str, Any]] = {
    "1": {},
    "2": {"zero_stage": 2},
    "3": {"zero_stage": 3},
    "offloaded": {"zero_stage": 2, "offload": "optimizer"},
}
"""Stages of ZeRO."""


def every_run(rank: int, num_ranks: int, folder: str) -> dict[str, Any]:
    """Runs one after the other in one process: whole, again, and ended and resumed."""
    results: dict[str, Any] = {}
    with training_group(rank, num_ranks, folder, spec_of("float32")) as group:
        for dtype in DTYPES:
            results[f"{dtype} straight"] = group.train(f"{dtype}-straight", spec_of(dtype))
            results[f"{dtype} again"] = group.train(f"{dtype}-again", spec_of(dtype))
            results[f"{dtype} other seed"] = group.train(f"{dtype}-other-seed", spec_of(dtype, seed=4))
        # In the same process, as the memory of a snapshot must not count as pinned once it is released.
        for name, trainer in TRAINERS.items():
            spec = spec_of("bfloat16", trainer=trainer)
            results[f"{name} straight"] = group.train(f"{name}-straight", spec)
            ending = Interrupting(Phase.TRAIN, 5, interrupt)
            results[f"{name} ended"] = group.train(f"{name}-ended", spec, reporter=ending)
            results[f"{name} resumed"] = group.train(f"{name}-ended", spec, restart=1)
    return results


@pytest.fixture(scope="module")
def results(folder: Path) -> Any:
    return of_one_rank(every_run, folder)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_seed_gives_the_same_run(results: dict[str, Any], folder: Path, dtype: str) -> None:
    assert [results[f"{dtype} {name}"] for name in ("straight", "again", "other seed")] == ["done"] * 3
    assert metrics_of(folder, f"{dtype}-again") == metrics_of(folder, f"{dtype}-straight")
    assert final_state(folder, f"{dtype}-again") == final_state(folder, f"{dtype}-straight")
    assert metrics_of(folder, f"{dtype}-other-seed") != metrics_of(folder, f"{dtype}-straight")


@pytest.mark.parametrize("name", TRAINERS)
def test_resume_is_exact(results: dict[str, Any], folder: Path, name: str) -> None:
    assert results[f"{name} straight"] == results[f"{name} resumed"] == "done"
    assert results[f"{name} ended"].startswith("InterruptedError")
    straight, again = metrics_of(folder, f"{name}-straight"), metrics_of(folder, f"{name}-ended", restart=1)
    assert min(again) == 5
    assert again == {step: line for step, line in straight.items() if step in again}
    assert final_state(folder, f"{name}-ended") == final_state(folder, f"{name}-straight")
