"""The DeepSpeed engine against plain torch: the same gradients and weights for every way of splitting a batch."""

import contextlib
import copy
import importlib.util
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from rank_launcher import TINY_MODEL, launch, make_context, tiny_spec, values

from rlhf_core.schemas.algorithms import OptimizerSpec

pytestmark = [pytest.mark.training, pytest.mark.end_to_end]

STEPS = 3
ZERO_STAGES = (1, 2, 3)
OPTIMIZER = {"learning_rate": 3e-3, "max_grad_norm": 0.5, "weight_decay": 0.1, "warmup_steps": 2}


def batch_of_step(step: int) -> tuple[list[list[int]], list[list[int]]]:
    """12 prompts with targets of different lengths."""
    prompts = [[5 + (7 * i + step) % 90, 6 + i, 9] for i in range(12)]
    targets = [[20 + (3 * i + j + step) % 60 for j in range(1 + i % 5)] for i in range(12)]
    return prompts, targets


def tiny_policy(dtype: str = "float32") -> Any:
    import torch

    from rlhf_core.training.models import PolicyModel, build_causal_lm
    from rlhf_core.training.tokenizers import build_tokenizer

    return PolicyModel(build_causal_lm(TINY_MODEL, build_tokenizer("char", [], 0), 0).to(getattr(torch, dtype)))


def losses(policy: Any, step: int, part: slice, micro_batch_size: int) -> Any:
    """The losses of the micro-batches of a part of the batch, divided by the tokens of the whole batch."""
    from rlhf_core.training.algorithms.sft import sft_loss
    from rlhf_core.training.batches import collate

    prompts, targets = batch_of_step(step)
    num_tokens = sum(map(len, targets))
    prompts, targets = prompts[part], targets[part]
    for start in range(0, len(prompts), micro_batch_size):
        end = start + micro_batch_size
        batch = collate(prompts[start:end], targets[start:end], 0)
        logprobs, _ = policy(batch.input_ids, target_mask=batch.target_mask)
        yield sft_loss(logprobs, batch.target_mask, num_tokens)[0]


def every_scenario(rank: int, num_ranks: int, run_dir: str, micro_batch_sizes: list[int]) -> dict[str, Any]:
    import torch

    from rlhf_core.training.distributed import init_process_group, leave_process_group
    from rlhf_core.training.trainers.engine import Engine, learning_rate

    find_no_compiler(run_dir, rank)
    ranks = init_process_group(make_context(run_dir, tiny_spec(), rank, num_ranks))
    spec = OptimizerSpec.model_validate(OPTIMIZER)
    part = slice(12 * rank // num_ranks, 12 * (rank + 1) // num_ranks)
    results: dict[str, Any] = {}

    def one_step(engine: Any, step: int, micro_batch_size: int) -> float:
        for loss in losses(engine, step, part, micro_batch_size):
            engine.backward(loss)
        norm: float = engine.step(learning_rate(step, spec, STEPS))
        return norm

    for micro_batch_size in micro_batch_sizes:
        policy = tiny_policy()
        engine = Engine(policy, spec, "float32", ranks)
        norms = [one_step(engine, step, micro_batch_size) for step in range(1, STEPS + 1)]
        engine.close()
        results[f"norms {micro_batch_size}"] = norms
        if ranks.is_first:
            torch.save(policy.state_dict(), f"{run_dir}-{num_ranks}-{micro_batch_size}.pt")

    # The same without the compensation for DeepSpeed's averaging.
    naive = Engine(tiny_policy(), spec, "float32", ranks)
    for loss in losses(naive, 1, part, 4):
        naive._engine.backward(loss)
    results["naive norm"] = naive.step(0.0)
    naive.close()

    # Two steps, state into a new engine over the same weights, third step; and the same without the state.
    for dtype in ("float32", "bfloat16"):
        policy = tiny_policy(dtype)
        engine = Engine(policy, spec, dtype, ranks)
        norms = [one_step(engine, step, 4) for step in (1, 2)]
        torch.save(engine.state(), f"{run_dir}-state-{rank}.pt")
        weights = copy.deepcopy(policy.state_dict())
        results[f"norms in {dtype}"] = [*norms, one_step(engine, 3, 4)]
        results[f"masters in {dtype}"] = [str(partition.dtype) for partition in engine.state()["weights"]]
        engine.close()
        for name in ("resumed", "forgetful"):
            twin = tiny_policy(dtype)
            twin.load_state_dict(weights)
            engine = Engine(twin, spec, dtype, ranks)
            if name == "resumed":
                engine.load_state(torch.load(f"{run_dir}-state-{rank}.pt", weights_only=True))
            one_step(engine, 3, 4)
            engine.close()
            straight = policy.state_dict()
            same = all(torch.equal(straight[key], value) for key, value in twin.state_dict().items())
            results[f"{name} in {dtype}"] = same
    results["zero"] = step_of_every_zero_stage(ranks, part)
    results["has imported MLflow"] = "mlflow" in sys.modules
    results["can import MLflow"] = importlib.util.find_spec("mlflow") is not None
    results["compiled"] = [path.name for path in Path(f"{run_dir}-extensions-{rank}").rglob("*.so")]
    leave_process_group(ranks)
    return results


def find_no_compiler(run_dir: str, rank: int) -> None:
    """Let this rank find no program, and nothing that another process has compiled."""
    os.environ["PATH"] = ""
    os.environ.pop("CXX", None)
    os.environ["TORCH_EXTENSIONS_DIR"] = f"{run_dir}-extensions-{rank}"


def step_of_every_zero_stage(ranks: Any, part: slice) -> dict[str, tuple[float, float]]:
    """Share of the weights that a step in each stage of ZeRO moves, and the sum of all weights after it."""
    import deepspeed
    import torch

    from rlhf_core.training.trainers import engine

    moved = {}
    for stage in ZERO_STAGES:
        policy = tiny_policy()
        before = torch.cat([parameter.detach().flatten() for parameter in policy.parameters()])
        config = engine._config(OptimizerSpec.model_validate(OPTIMIZER), "float32")
        config["zero_optimization"]["stage"] = stage
        with engine._quick_and_quiet():
            wrapped = deepspeed.initialize(model=policy, model_parameters=policy.parameters(), config=config)[0]
        for loss in losses(wrapped, 1, part, 12):
            wrapped.backward(loss)
        wrapped.step()
        with deepspeed.zero.GatheredParameters(list(policy.parameters())):
            after = torch.cat([parameter.detach().flatten() for parameter in policy.parameters()])
        moved[str(stage)] = (float((after != before).float().mean()), float(after.double().sum()))
    return moved


def let_deepspeed_compile(rank: int, num_ranks: int, run_dir: str) -> None:
    """Import DeepSpeed and join a process group as it does by itself."""
    from rlhf_core.training.distributed import init_process_group
    from rlhf_core.training.trainers import engine

    find_no_compiler(run_dir, rank)
    engine._compile_nothing = lambda deepspeed: None
    engine._without = lambda module: contextlib.nullcontext()  # type: ignore[assignment]
    try:
        engine._join_deepspeed(init_process_group(make_context(run_dir, tiny_spec(), rank, num_ranks)))
    finally:
        print("has imported MLflow:", "mlflow" in sys.modules)


def plain_torch(folder: Path) -> tuple[list[float], dict[str, Any]]:
    """The same steps over the whole batch, in this process, without DeepSpeed."""
    import torch

    from rlhf_core.training.trainers.engine import learning_rate

    spec = OptimizerSpec.model_validate(OPTIMIZER)
    policy = tiny_policy()
    groups = [
        {"params": [p for p in policy.parameters() if p.dim() >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in policy.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(spec.adam_beta1, spec.adam_beta2))
    norms = []
    for step in range(1, STEPS + 1):
        (loss,) = losses(policy, step, slice(None), 12)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(policy.parameters(), spec.max_grad_norm)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, spec, STEPS)
        optimizer.step()
        optimizer.zero_grad()
    return norms, policy.state_dict()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> list[dict[str, Any]]:
    return values(launch(every_scenario, 2, folder / "two", run_dir=str(folder / "run"), micro_batch_sizes=[1, 4, 6]))


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> list[dict[str, Any]]:
    return values(launch(every_scenario, 1, folder / "one", run_dir=str(folder / "run"), micro_batch_sizes=[4, 12]))


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[list[float], dict[str, Any]]:
    return plain_torch(folder)


def test_gradient_norms_are_those_of_plain_torch(
    one_rank: list[dict[str, Any]], two_ranks: list[dict[str, Any]], expected: tuple[list[float], dict[str, Any]]
) -> None:
    norms = expected[0]
    assert max(norms) > OPTIMIZER["max_grad_norm"], "the clip must have something to do"
    for results in (*one_rank, *two_ranks):
        for name, found in results.items():
            if name.startswith("norms") and "bfloat16" not in name:
                assert found == pytest.approx(norms, rel=1e-6), name


def test_weights_are_those_of_plain_torch(
    folder: Path,
    one_rank: list[dict[str, Any]],
    two_ranks: list[dict[str, Any]],
    expected: tuple[list[float], dict[str, Any]],
) -> None:
    import torch

    for name in ("run-1-4", "run-1-12", "run-2-1", "run-2-4", "run-2-6"):
        weights = torch.load(folder / f"{name}.pt", weights_only=True)
        for key, value in expected[1].items():
            # Where a gradient is nearly zero, AdamW divides its rounding error by its size: a few weights differ more.
            difference = (weights[key] - value).abs()
            assert difference.mean() < 1e-7, (name, key)
            assert (difference > 2e-6).float().mean() < 0.005, (name, key)


def test_without_compensation_the_gradient_would_be_halved(
    one_rank: list[dict[str, Any]], two_ranks: list[dict[str, Any]]
) -> None:
    """Negative control: DeepSpeed averages over the ranks, and a loss that is normalised already shrinks with them."""
    assert two_ranks[0]["naive norm"] == pytest.approx(two_ranks[0]["norms 4"][0] / 2, rel=1e-6)
    assert one_rank[0]["naive norm"] == pytest.approx(one_rank[0]["norms 4"][0], rel=1e-6)


def test_state_goes_through_a_file_and_back_bitwise(
    one_rank: list[dict[str, Any]], two_ranks: list[dict[str, Any]]
) -> None:
    for results in (*one_rank, *two_ranks):
        for dtype in ("float32", "bfloat16"):
            assert results[f"resumed in {dtype}"]
            assert not results[f"forgetful in {dtype}"], "a fresh optimizer must not give the same weights"


def test_bfloat16_trains_with_float32_weights_behind_it(two_ranks: list[dict[str, Any]]) -> None:
    for results in two_ranks:
        assert results["norms in bfloat16"] == pytest.approx(results["norms in float32"], rel=0.1)
        assert results["norms in bfloat16"] != results["norms in float32"]
        assert set(results["masters in bfloat16"]) == {"torch.float32"}


def test_no_stage_of_zero_needs_a_compiler(two_ranks: list[dict[str, Any]]) -> None:
    """Two ranks that find no program at all train a step in each stage, and agree about the weights."""
    moved = two_ranks[0]["zero"]
    assert two_ranks[1]["zero"] == moved
    assert list(moved) == [str(stage) for stage in ZERO_STAGES]
    assert all(share > 0.9 for share, _ in moved.values())
    sums = [total for _, total in moved.values()]
    assert sums == pytest.approx([sums[0]] * len(sums), rel=1e-6), "each stage makes the same step"
    assert [results["compiled"] for results in two_ranks] == [[], []]


def test_no_rank_imports_mlflow_unasked(two_ranks: list[dict[str, Any]]) -> None:
    """DeepSpeed does where it is installed, as it is here; a reward function still may."""
    for results in two_ranks:
        assert not results["has imported MLflow"]
        assert results["can import MLflow"]


def test_deepspeed_by_itself_would_compile_and_import_mlflow(folder: Path) -> None:
    """Negative control."""
    (rank,) = launch(let_deepspeed_compile, 1, folder / "compiling", run_dir=str(folder / "compiling"))
    assert rank.exit_code == 1
    assert "Unable to JIT load the deepspeed_shm_comm op" in rank.error, rank.output
    assert "has imported MLflow: True" in rank.output


def test_learning_rate_is_a_function_of_the_step() -> None:
    from rlhf_core.training.trainers.engine import learning_rate

    def rates(schedule: str, warmup_steps: int = 0) -> list[float]:
        spec = OptimizerSpec.model_validate({"learning_rate": 8.0, "schedule": schedule, "warmup_steps": warmup_steps})
        return [learning_rate(step, spec, 8) for step in range(1, 9)]

    assert rates("constant") == [8.0] * 8
    assert rates("constant", 4) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0, 8.0, 8.0]
    assert rates("linear") == [7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    assert rates("linear", 4) == [2.0, 4.0, 6.0, 8.0, 6.0, 4.0, 2.0, 0.0]
    cosine = rates("cosine", 4)
    assert cosine[:4] == [2.0, 4.0, 6.0, 8.0]
    assert cosine[4:] == pytest.approx([4 + 4 * math.cos(math.pi * k / 4) for k in (1, 2, 3, 4)])
    assert rates("cosine", 8)[-1] == 8.0
