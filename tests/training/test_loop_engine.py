"""The DeepSpeed engine against plain torch: the same gradients and weights for every way of splitting a batch."""

import contextlib
import copy
import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from rank_launcher import TINY_MODEL, launch, make_context, tiny_spec, values

from rlhf_core.schemas.loops import OptimizerSpec

pytestmark = [pytest.mark.training, pytest.mark.end_to_end]

STEPS = 3
STAGES: dict[str, tuple[Any, Any, Any, int]] = {
    "0": (0, "none", "float32", 2),
    "1": (1, "none", "float32", 12),
    "2": (2, "none", "float32", 2),
    "3": (3, "none", "float32", 2),
    "1, optimizer": (1, "optimizer", "float32", 12),
    "2, optimizer": (2, "optimizer", "float32", 2),
    "3, parameters": (3, "parameters", "float32", 2),
    "1 in bfloat16": (1, "none", "bfloat16", 2),
    "2 in bfloat16": (2, "none", "bfloat16", 2),
    "3 in bfloat16": (3, "optimizer", "bfloat16", 2),
}
"""Stage of ZeRO, what lies in main memory, number format, and micro-batch size of a rank."""
OPTIMIZER = {"learning_rate": 3e-3, "max_grad_norm": 0.5, "weight_decay": 0.1, "warmup_steps": 2}


def batch_of_step(step: int) -> tuple[list[list[int]], list[list[int]]]:
    """12 prompts with targets of different lengths."""
    prompts = [[5 + (7 * i + step) % 90, 6 + i, 9] for i in range(12)]
    targets = [[20 + (3 * i + j + step) % 60 for j in range(1 + i % 5)] for i in range(12)]
    return prompts, targets


def tiny_policy(dtype: str = "float32") -> Any:
    import torch

    from rlhf_core.training.data.tokenizers import build_tokenizer
    from rlhf_core.training.models.causal_lm import PolicyModel, build_causal_lm

    return PolicyModel(build_causal_lm(TINY_MODEL, build_tokenizer("char", [], 0), 0).to(getattr(torch, dtype)))


def losses(policy: Any, step: int, part: slice, micro_batch_size: int) -> Any:
    """The losses of the micro-batches of a part of the batch, divided by the tokens of the whole batch."""
    from core_losses import sft_loss

    from rlhf_core.training.data.batches import collate

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

    from rlhf_core.errors import ResumeMismatch
    from rlhf_core.schemas.trainers import NativeTrainer
    from rlhf_core.training.distributed import init_process_group, leave_process_group
    from rlhf_core.training.trainers import engine as engine_module
    from rlhf_core.training.trainers.engine import LONG_SEQUENCE, Engine, learning_rate

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
    for name, long in (("with short sequences", LONG_SEQUENCE), ("with long sequences", 2)):
        with (
            mock.patch.object(engine_module, "return_free_memory") as returned,
            mock.patch.object(engine_module, "LONG_SEQUENCE", long),
        ):
            one_step(naive, 1, 4)
        results[f"returns of free memory {name}"] = returned.call_count
    naive.close()

    # Two steps, state into a new engine over the same weights, third step; and the same without the state.
    for dtype in ("float32", "bfloat16"):
        policy = tiny_policy(dtype)
        engine = Engine(policy, spec, dtype, ranks)
        norms = [one_step(engine, step, 4) for step in (1, 2)]
        torch.save(engine.state(), f"{run_dir}-state-{rank}.pt")
        torch.save(state_of_0_1(engine), f"{run_dir}-state-of-0-1-{rank}.pt")
        weights = copy.deepcopy(policy.state_dict())
        results[f"norms in {dtype}"] = [*norms, one_step(engine, 3, 4)]
        results[f"masters in {dtype}"] = [str(part["weight"].dtype) for part in engine.state()["parts"].values()]
        engine.close()
        for name, file in (("resumed", "state"), ("resumed from 0.1", "state-of-0-1"), ("forgetful", "")):
            twin = tiny_policy(dtype)
            twin.load_state_dict(weights)
            engine = Engine(twin, spec, dtype, ranks)
            if file:
                engine.load_state([torch.load(f"{run_dir}-{file}-{rank}.pt", weights_only=True)])
            one_step(engine, 3, 4)
            engine.close()
            straight = policy.state_dict()
            same = all(torch.equal(straight[key], value) for key, value in twin.state_dict().items())
            results[f"{name} in {dtype}"] = same
    split = Engine(tiny_policy(), spec, "float32", ranks, NativeTrainer(zero_stage=2))
    try:
        split.load_state([torch.load(f"{run_dir}-state-of-0-1-{rank}.pt", weights_only=True)])
    except ResumeMismatch as error:
        results["0.1 in stage 2"] = str(error)
    split.close()
    results["zero"] = every_zero_stage(ranks, Path(run_dir).parent, part) if num_ranks == 2 else {}
    results["third step"] = third_step_from_two_ranks(ranks, Path(run_dir).parent) if num_ranks == 1 else {}
    results["has imported MLflow"] = "mlflow" in sys.modules
    results["can import MLflow"] = importlib.util.find_spec("mlflow") is not None
    results["compiled"] = [path.name for path in Path(f"{run_dir}-extensions-{rank}").rglob("*.so")]
    results["sampling"] = sample_under_stage_3(ranks) if num_ranks == 2 else []
    leave_process_group(ranks)
    return results


def state_of_0_1(engine: Any) -> dict[str, Any]:
    """State as rlhf-flows 0.1 wrote it."""
    state = engine._engine.optimizer.state_dict()
    weights = [partition.detach() for partition in state["single_partition_of_fp32_groups"]]
    return {"adamw": state["base_optimizer_state"], "weights": weights}


def find_no_compiler(run_dir: str, rank: int) -> None:
    """Let this rank find no program, and nothing that another process has compiled."""
    os.environ["PATH"] = ""
    os.environ.pop("CXX", None)
    os.environ["TORCH_EXTENSIONS_DIR"] = f"{run_dir}-extensions-{rank}"


def every_zero_stage(ranks: Any, folder: Path, part: slice) -> dict[str, dict[str, Any]]:
    """Three steps in each stage of ZeRO, with and without offload (then with activation checkpointing).

    Rank 0 leaves the weights, each rank its share of the optimizer.
    """
    import torch

    from rlhf_core.schemas.trainers import NativeTrainer
    from rlhf_core.training.models.gathering import gathered_weights, is_split
    from rlhf_core.training.models.lean_layers import use_gradient_checkpointing
    from rlhf_core.training.trainers.engine import Engine, learning_rate

    spec = OptimizerSpec.model_validate(OPTIMIZER)
    found = {}
    for name, (stage, offload, dtype, micro_batch_size) in STAGES.items():
        policy = tiny_policy(dtype)
        if offload != "none":
            use_gradient_checkpointing(policy.causal_lm)
        engine = Engine(policy, spec, dtype, ranks, NativeTrainer(zero_stage=stage, offload=offload))
        norms, shares = [], []
        for step in range(1, STEPS + 1):
            for loss in losses(engine, step, part, micro_batch_size):
                engine.backward(loss)
            norms.append(engine.step(learning_rate(step, spec, STEPS)))
            shares.append(engine.changed_share())
            if step == STEPS - 1:
                torch.save(engine.state(), folder / f"share-{name}-{ranks.num_ranks}-{ranks.rank}.pt")
                earlier = [{key: value.clone() for key, value in part.items()} for part in gathered_weights(policy)]
        buckets = [{key: value.clone() for key, value in part.items()} for part in gathered_weights(policy, 3000)]
        weights = {key: value for bucket in buckets for key, value in bucket.items()}
        held = sum(parameter.numel() for parameter in policy.parameters())
        engine.close()
        if ranks.is_first:
            torch.save(weights, folder / f"weights-{name}-{ranks.num_ranks}.pt")
        if ranks.is_first and name == "1":
            torch.save({key: value for part in earlier for key, value in part.items()}, folder / "earlier.pt")
        found[name] = {
            "norms": norms,
            "changed": shares,
            "held": held,
            "buckets": [sum(value.numel() for value in bucket.values()) for bucket in buckets],
            "largest": max(value.numel() for value in weights.values()),
            "whole again": not is_split(policy)
            and all(torch.equal(value, weights[key]) for key, value in policy.named_parameters()),
        }
    return found


def third_step_from_two_ranks(ranks: Any, folder: Path) -> dict[str, Any]:
    """The last step on one rank in every stage, from what two ranks saved in every stage before it."""
    import torch

    from rlhf_core.schemas.trainers import NativeTrainer
    from rlhf_core.training.models.gathering import gathered_weights
    from rlhf_core.training.trainers.engine import Engine, learning_rate

    spec = OptimizerSpec.model_validate(OPTIMIZER)
    found = {}
    for saved, target in (
        ("0", "1"),
        ("1", "2"),
        ("2", "3"),
        ("3", "0"),
        ("3", "1"),
        ("1, optimizer", "3, parameters"),
    ):
        policy = tiny_policy()
        policy.load_state_dict(torch.load(folder / "earlier.pt", weights_only=True), strict=False)
        stage, offload, _, _ = STAGES[target]
        engine = Engine(policy, spec, "float32", ranks, NativeTrainer(zero_stage=stage, offload=offload))
        shares = [torch.load(folder / f"share-{saved}-2-{rank}.pt", weights_only=True) for rank in (0, 1)]
        try:
            engine.load_state(shares[:1])
            found[f"{saved} half"] = "taken"
        except Exception as error:  # noqa: BLE001 - what it raises is its result here
            found[f"{saved} half"] = f"{type(error).__name__}: {error}"
        engine.load_state(shares)
        for loss in losses(engine, STEPS, slice(None), 4):
            engine.backward(loss)
        engine.step(learning_rate(STEPS, spec, STEPS))
        weights = {key: value.clone() for part in gathered_weights(policy) for key, value in part.items()}
        torch.save(weights, folder / f"weights-{saved} to {target}-1.pt")
        engine.close()
    return found


def sample_under_stage_3(ranks: Any) -> list[Any]:
    """Greedy completions of ranks that end at different lengths, and log-probabilities of a probe with the number of
    weights in place: of whole weights, and of weights that are split over the ranks."""
    from rlhf_core.schemas.trainers import NativeTrainer
    from rlhf_core.training.data.tokenizers import build_tokenizer
    from rlhf_core.training.rollouts import transformers_engine
    from rlhf_core.training.rollouts.base import Sampling
    from rlhf_core.training.rollouts.weight_probe import probe_of
    from rlhf_core.training.trainers.engine import Engine, split_frozen

    rank = ranks.rank

    def completions(policy: Any) -> list[list[int]]:
        made = transformers_engine.generate(
            policy.causal_lm,
            build_tokenizer("char", [], 0),
            [[5, 6, 7], [8, 9]] if rank == 0 else [],
            [[1], [2]] if rank == 0 else [],
            Sampling(max_new_tokens=4 + 8 * rank, temperature=0.0, batch_size=1),
            lambda: None,
        )
        return [group[0].token_ids for group in made]

    def probe(policy: Any) -> tuple[tuple[float, ...], int]:
        in_place: list[int] = []

        def count(module: Any, given: Any) -> None:
            in_place.append(sum(one.numel() for one in policy.parameters()))

        hooks = [module.register_forward_pre_hook(count) for module in policy.causal_lm.modules()]
        logprobs = probe_of(policy.causal_lm, 32, "float32").logprobs
        for hook in hooks:
            hook.remove()
        return logprobs, max(in_place)

    whole, probed = completions(tiny_policy()), [probe(tiny_policy())]
    trainer = NativeTrainer(zero_stage=3)
    policy, frozen = tiny_policy(), tiny_policy()
    engine = Engine(policy, OptimizerSpec.model_validate(OPTIMIZER), "float32", ranks, trainer)
    split_frozen(frozen, "float32", ranks, trainer)
    probed += [probe(policy), probe(frozen)]
    found = [whole, completions(policy), completions(frozen)]
    for loss in losses(engine, 1, slice(6 * rank, 6 * rank + 6), 3):  # the hooks are there again
        engine.backward(loss)
    return [*found, engine.step(1e-3), probed]


def sample_naively(rank: int, num_ranks: int, run_dir: str) -> list[Any]:
    """The same, module by module."""
    from datetime import timedelta

    from rlhf_core.training import distributed
    from rlhf_core.training.rollouts import transformers_engine

    distributed.collective_timeout = lambda supervise: timedelta(seconds=4)
    transformers_engine.whole_model = lambda model: contextlib.nullcontext()
    return sample_under_stage_3(distributed.init_process_group(make_context(run_dir, tiny_spec(), rank, num_ranks)))


def let_deepspeed_compile(rank: int, num_ranks: int, run_dir: str) -> None:
    """Join a process group as DeepSpeed does by itself."""
    from rlhf_core.training.distributed import init_process_group
    from rlhf_core.training.trainers import engine

    find_no_compiler(run_dir, rank)
    engine._compile_nothing = lambda deepspeed: None
    engine._join_deepspeed(init_process_group(make_context(run_dir, tiny_spec(), rank, num_ranks)))


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
def two_ranks(folder: Path) -> list[dict[str, Any]]:
    arguments: dict[str, Any] = {"run_dir": str(folder / "run"), "micro_batch_sizes": [1, 4, 6]}
    return values(launch(every_scenario, 2, folder / "two", **arguments))


@pytest.fixture(scope="module")
def one_rank(folder: Path, two_ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Later than two ranks, of which it takes over what they have saved."""
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
    for name in ("run-1-4", "run-1-12", "run-2-1", "run-2-4", "run-2-6"):
        assert_same_weights(folder / f"{name}.pt", expected[1])


def assert_same_weights(path: Path, expected: dict[str, Any]) -> None:
    """The weights of a file are those, but for rounding."""
    import torch

    weights = torch.load(path, weights_only=True)
    for key in weights:
        # Where a gradient is nearly zero, AdamW divides its rounding error by its size: a few weights differ more.
        difference = (weights[key] - expected[key]).abs()
        # The rest is rounding of weights around 1 (norms), which differs between processors.
        assert difference.mean() < 2 * torch.finfo(torch.float32).eps, (path.name, key)
        assert (difference > 2e-6).float().mean() < 0.005, (path.name, key)


def test_without_compensation_the_gradient_would_be_halved(
    one_rank: list[dict[str, Any]], two_ranks: list[dict[str, Any]]
) -> None:
    """Negative control: DeepSpeed averages over the ranks, and a loss that is normalised already shrinks with them."""
    assert two_ranks[0]["naive norm"] == pytest.approx(two_ranks[0]["norms 4"][0] / 2, rel=1e-6)
    assert one_rank[0]["naive norm"] == pytest.approx(one_rank[0]["norms 4"][0], rel=1e-6)


def test_free_memory_is_returned_around_every_pass_over_long_sequences_on_cpu(
    one_rank: list[dict[str, Any]], two_ranks: list[dict[str, Any]]
) -> None:
    for num_ranks, ranks in ((1, one_rank), (2, two_ranks)):
        num_micro_batches = math.ceil(12 / num_ranks / 4)
        for results in ranks:
            assert results["returns of free memory with long sequences"] == 2 * num_micro_batches + 1
            assert results["returns of free memory with short sequences"] == 0


def test_state_goes_through_a_file_and_back_bitwise(
    one_rank: list[dict[str, Any]], two_ranks: list[dict[str, Any]]
) -> None:
    for results in (*one_rank, *two_ranks):
        for dtype in ("float32", "bfloat16"):
            assert results[f"resumed in {dtype}"]
            assert results[f"resumed from 0.1 in {dtype}"]
            assert not results[f"forgetful in {dtype}"], "a fresh optimizer must not give the same weights"


def test_an_optimizer_of_0_1_is_refused_by_another_stage(two_ranks: list[dict[str, Any]]) -> None:
    for results in two_ranks:
        assert "resume it once that way" in results["0.1 in stage 2"]


def test_bfloat16_trains_with_float32_weights_behind_it(two_ranks: list[dict[str, Any]]) -> None:
    for results in two_ranks:
        assert results["norms in bfloat16"] == pytest.approx(results["norms in float32"], rel=0.1)
        assert results["norms in bfloat16"] != results["norms in float32"]
        assert set(results["masters in bfloat16"]) == {"torch.float32"}


@pytest.mark.parametrize("name", [name for name, (*_, dtype, _) in STAGES.items() if dtype == "float32"])
def test_every_stage_of_zero_makes_the_steps_of_plain_torch(
    folder: Path, two_ranks: list[dict[str, Any]], expected: tuple[list[float], dict[str, Any]], name: str
) -> None:
    for results in two_ranks:
        assert results["zero"][name]["norms"] == pytest.approx(expected[0], rel=1e-6)
        assert results["zero"][name]["changed"] == [1.0] * STEPS
        assert results["zero"][name]["whole again"]
    assert_same_weights(folder / f"weights-{name}-2.pt", expected[1])


def test_stages_agree_in_bfloat16(folder: Path, two_ranks: list[dict[str, Any]]) -> None:
    """All of them add up gradients in float32 and round the same weights, so they agree to a last bit here and there.

    In stage 0 DeepSpeed would add them up in bfloat16, whose norms differ by a tenth: the settings refuse it.
    """
    import torch

    names = [name for name in STAGES if "bfloat16" in name]
    norms = [two_ranks[0]["zero"][name]["norms"] for name in names]
    first = torch.load(folder / f"weights-{names[0]}-2.pt", weights_only=True)
    for name, other in zip(names[1:], norms[1:], strict=True):
        assert other == pytest.approx(norms[0], rel=1e-5)
        weights = torch.load(folder / f"weights-{name}-2.pt", weights_only=True)
        differing = sum(int((weights[key] != value).sum()) for key, value in first.items())
        assert differing <= 10, name


def test_weights_are_split_in_stage_3_and_gathered_bucket_by_bucket(two_ranks: list[dict[str, Any]]) -> None:
    for results in two_ranks:
        found = results["zero"]
        assert found["3"]["held"] < 0.1 * found["2"]["held"], "norms alone are whole"
        assert sum(found["3"]["buckets"]) == found["2"]["held"]
        assert max(found["3"]["buckets"]) <= max(3000, found["3"]["largest"])
        assert len(found["3"]["buckets"]) > 3


def test_no_stage_of_zero_needs_a_compiler(two_ranks: list[dict[str, Any]]) -> None:
    """Two ranks that find no program at all have trained in each stage, with and without offload."""
    assert all(list(results["zero"]) == list(STAGES) for results in two_ranks)
    assert [results["compiled"] for results in two_ranks] == [[], []]


def test_shares_of_two_ranks_fit_one_rank_and_another_stage(
    folder: Path, two_ranks: list[dict[str, Any]], one_rank: list[dict[str, Any]], expected: tuple[list[float], Any]
) -> None:
    assert two_ranks[0]["zero"]
    found = one_rank[0]["third step"]
    assert len(found) >= 5
    for name, outcome in found.items():
        assert outcome.startswith("CheckpointCorrupt: the optimizer shares of the checkpoint lack parts of"), name
    paths = list(folder.glob("weights-* to *-1.pt"))
    assert len(paths) == 6
    for path in paths:
        assert_same_weights(path, expected[1])


def test_ranks_of_stage_3_may_end_their_completions_at_different_lengths(two_ranks: list[dict[str, Any]]) -> None:
    found = [results["sampling"] for results in two_ranks]
    for whole, split, frozen, norm, _ in found:
        assert whole == split == frozen
        assert norm == pytest.approx(found[0][3])
    assert [len(tokens) for tokens in found[0][0]] == [4, 4]
    assert found[1][0] == []
    for *_, probed in found:
        (expected, size), *of_split = probed
        assert [logprobs for logprobs, _ in of_split] == [expected] * 2
        assert all(in_place < size / 2 for _, in_place in of_split), "a probe gathers module by module"


def test_sampling_from_split_weights_naively_blocks(folder: Path) -> None:
    """Negative control: module by module, one rank waits for weights that the other no longer gathers."""
    results = launch(sample_naively, 2, folder / "naive", run_dir=str(folder / "naive"))
    assert any("Timed out waiting" in result.error for result in results), [result.error for result in results]


def test_no_rank_imports_mlflow_unasked(two_ranks: list[dict[str, Any]]) -> None:
    """DeepSpeed does where it is installed, as it is here; a reward function still may."""
    for results in two_ranks:
        assert not results["has imported MLflow"]
        assert results["can import MLflow"]


def test_deepspeed_by_itself_imports_mlflow() -> None:
    """Negative control; in a process that nothing was imported into before."""
    command = [sys.executable, "-c", "import deepspeed, sys; print('mlflow' in sys.modules)"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert output.splitlines()[-1] == "True"


def test_deepspeed_by_itself_would_compile(folder: Path) -> None:
    """Negative control."""
    (rank,) = launch(let_deepspeed_compile, 1, folder / "compiling", run_dir=str(folder / "compiling"))
    assert rank.exit_code == 1
    assert "Unable to JIT load the deepspeed_shm_comm op" in rank.error, rank.output


def test_learning_rate_is_a_function_of_the_step() -> None:
    from rlhf_core.training.trainers.engine import learning_rate

    def rates(schedule: str, warmup_steps: int = 0, lowest: float = 0.0, num_steps: int = 8) -> list[float]:
        spec = {"learning_rate": 8.0, "schedule": schedule, "warmup_steps": warmup_steps}
        optimizer = OptimizerSpec.model_validate({**spec, "min_learning_rate_ratio": lowest})
        return [learning_rate(step, optimizer, num_steps) for step in range(1, num_steps + 1)]

    assert rates("constant") == [8.0] * 8
    assert rates("constant", 4) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0, 8.0, 8.0]
    assert rates("linear") == [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    assert rates("linear", 4) == [2.0, 4.0, 6.0, 8.0, 8.0, 6.0, 4.0, 2.0]
    assert rates("linear", 0, 0.5) == [8.0, 7.5, 7.0, 6.5, 6.0, 5.5, 5.0, 4.5]
    cosine = rates("cosine", 4)
    assert cosine[:4] == [2.0, 4.0, 6.0, 8.0]
    assert cosine[4:] == pytest.approx([4 + 4 * math.cos(math.pi * k / 4) for k in (0, 1, 2, 3)])
    assert rates("cosine", 8)[-1] == 8.0
    assert rates("linear", num_steps=1) == rates("cosine", num_steps=1) == [8.0], "the only step trains"


@pytest.mark.parametrize("warmup_steps", [0, 3])
@pytest.mark.parametrize(
    ("schedule", "lowest", "theirs"),
    [
        ("constant", 0.0, "constant_with_warmup"),
        ("linear", 0.0, "linear"),
        ("cosine", 0.0, "cosine"),
        ("cosine", 0.1, "cosine_with_min_lr"),
    ],
)
def test_learning_rates_are_those_of_transformers(schedule: str, lowest: float, theirs: str, warmup_steps: int) -> None:
    """The same in every step after the warm-up, and in the warm-up those of one step later."""
    import torch
    from transformers import get_scheduler

    from rlhf_core.training.trainers.engine import learning_rate

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    options = {"scheduler_specific_kwargs": {"min_lr_rate": lowest}} if lowest else {}
    scheduler = get_scheduler(theirs, optimizer, warmup_steps, 10, **options)
    expected = []
    for _ in range(10):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    spec = {"learning_rate": 0.5, "schedule": schedule, "warmup_steps": warmup_steps}
    settings = OptimizerSpec.model_validate({**spec, "min_learning_rate_ratio": lowest})
    found = [learning_rate(step, settings, 10) for step in range(1, 11)]
    assert found[warmup_steps:] == pytest.approx(expected[warmup_steps:], abs=1e-15)
    assert found[:warmup_steps] == pytest.approx(expected[1 : warmup_steps + 1], abs=1e-15)


def test_the_schedule_of_the_policy_begins_after_the_steps_of_the_value_model_alone() -> None:
    from rlhf_core.schemas.loops import LoopSpec
    from rlhf_core.training.trainers.context import Loop

    optimizer = {"learning_rate": 8.0, "schedule": "linear", "warmup_steps": 2}
    algorithm = {"name": "ppo", "critic_warmup_steps": 3}
    spec = LoopSpec.model_validate({"num_steps": 9, "algorithm": algorithm, "optimizer": optimizer})
    loop = Loop(spec, first_step=5, last_step=13)
    assert [loop.policy_rate(step) for step in range(8, 14)] == [4.0, 8.0, 8.0, 6.0, 4.0, 2.0]


def test_a_constant_rate_has_no_lowest_value() -> None:
    with pytest.raises(ValueError, match=r'found min_learning_rate_ratio = 0\.1 with schedule = "constant"'):
        OptimizerSpec.model_validate({"learning_rate": 1.0, "min_learning_rate_ratio": 0.1})
