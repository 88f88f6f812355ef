"""Predicted memory and step time: compared with hand counts, for the presets for real hardware, and in a dry run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from control_fakes import FakeScheduler
from test_preflight_checks import healthy, with_spec

from rlhf_core.allocation.planner import plan
from rlhf_core.config import loading as config
from rlhf_core.preflight.facts import Baseline, DataFile, Facts
from rlhf_core.preflight.memory.gpus import GIB
from rlhf_core.preflight.memory.shapes import shape_of
from rlhf_core.preflight.predictions import predict
from rlhf_core.preflight.registry import run_checks
from rlhf_core.preflight.size_estimates import decoder_parameters
from rlhf_core.preflight.step_time import LAUNCH_S, MATMUL_SHARE, gpu_rates, step_time
from rlhf_core.schemas.changes import with_changes
from rlhf_core.schemas.checks import CheckStatus

WEIGHTS = {"qwen2.5-7b-gsm8k": 7_615_616_512, "qwen2.5-32b": 32_763_876_352}
"""Parameters according to the model cards' checkpoints."""


TRANSFORMERS: dict[str, Any] = {"rollout.engine": "transformers", "rollout.batch_size": 64}


def on_a_cluster(name: str, num_nodes: int) -> Facts:
    """Facts of a preset on nodes with the requested GPUs, and vLLM."""
    spec = config.load(name)
    compute = healthy().compute
    nodes = tuple(f"n{number}" for number in range(num_nodes))
    scheduler = FakeScheduler(
        nodes=nodes,
        cpus_per_node=96,
        memory_gb=1000,
        gpus_per_node=8,
        node_gpus=dict.fromkeys(nodes, 8),
        node_gpu_types=dict.fromkeys(nodes, spec.slurm.gpu_type),
    )
    columns = frozenset({"question", "answer"})
    file = DataFile(Path("/d/train.jsonl"), num_rows=7473, columns=columns, prompt_hashes=frozenset({b"a"}))
    return replace(
        healthy(),
        spec=spec,
        compute=replace(compute, packages={**compute.packages, "vllm": "0.27.0"}),
        inventory=scheduler.inventory(),
        scheduler="slurm",
        files={
            "data.train": file,
            "data.eval": replace(file, path=Path("/d/test.jsonl"), prompt_hashes=frozenset({b"b"})),
        },
        model_config=spec.model.config,
        disk=replace(healthy().disk, free_bytes=10_000 * GIB),
    )


@pytest.mark.parametrize(("name", "num_nodes"), [("qwen2.5-7b-gsm8k", 1), ("qwen2.5-32b", 4)])
def test_presets_for_real_hardware_pass_preflight_and_fit(name: str, num_nodes: int) -> None:
    facts = on_a_cluster(name, num_nodes)
    results = run_checks(facts)
    assert [result for result in results if result.status is CheckStatus.BLOCKED] == []
    assert {result.id for result in results if result.status is CheckStatus.PASSED} >= {
        "memory.trainer",
        "memory.evaluator",
        "resources.duration",
    }
    assert decoder_parameters(facts.model_config) == pytest.approx(WEIGHTS[name], rel=1e-3)
    assert plan(facts.spec, facts.inventory, attempt=1).num_nodes == num_nodes
    small = replace(facts, spec=with_changes(facts.spec, {"slurm.gpu_type": "l4"}))
    (blocked,) = [result for result in run_checks(small) if result.id == "memory.trainer"]
    assert blocked.status is CheckStatus.BLOCKED


def test_a_step_is_the_sum_of_hand_counted_parts() -> None:
    """Qwen2.5-7B on one node: 8 operations per weight and token with recomputed activations, at 0.4 of 989 TFLOP/s.

    Attention to the 1536 tokens of a sequence counts as 28 layers x 3584 x 1536 more weights.
    """
    facts = on_a_cluster("qwen2.5-7b-gsm8k", 1)
    facts = replace(facts, spec=with_changes(facts.spec, TRANSFORMERS))
    step = predict(facts).step
    assert step is not None
    weights, tokens = WEIGHTS["qwen2.5-7b-gsm8k"], 64 * 8 / 8 * (512 + 1024)
    rate = MATMUL_SHARE * 989e12
    assert step.parts["training"] == pytest.approx(8 * (weights + 28 * 3584 * 1536) * tokens / rate, rel=1e-3)
    reading = 2 * (weights + 28 * 3584 * 512) * 64 / 8 * 512 / rate
    assert step.parts["sampling"] == pytest.approx(reading + 1024 * 28 * LAUNCH_S, rel=1e-3)
    lighter = predict(replace(facts, spec=with_changes(facts.spec, {"model.lora": {}}))).step
    assert lighter is not None
    without = 2 * weights * tokens / rate
    assert lighter.parts["training"] == pytest.approx(step.parts["training"] - without, rel=1e-3)
    assert lighter.parts["communication"] < step.parts["communication"]


MIXTURES = {
    "Qwen3-30B-A3B": (
        {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
         "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "mlp_only_layers": [],
         "decoder_sparse_step": 1},
        30.53e9, 3.35e9,
    ),
    "Mixtral-8x7B": (
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_local_experts": 8, "num_experts_per_tok": 2},
        46.7e9, 12.88e9,
    ),
    "DeepSeek-V2-Lite": (
        {"hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27, "num_attention_heads": 16,
         "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 1408,
         "first_k_dense_replace": 1},
        15.71e9, 2.66e9,
    ),
}  # fmt: skip
"""Mixtures of experts: dimensions, parameters, and those that a token passes through, as transformers builds them."""


@pytest.mark.parametrize(("config", "parameters", "active"), MIXTURES.values(), ids=MIXTURES)
def test_a_token_of_a_mixture_passes_through_few_of_its_weights(
    config: dict[str, Any], parameters: float, active: float
) -> None:
    facts = on_a_cluster("qwen2.5-7b-gsm8k", 1)
    shape = shape_of(config, int(parameters), 151936)
    assert shape is not None
    assert shape.active == pytest.approx(active, rel=0.01)
    mixture = step_time(facts.spec, shape, "h100")
    dense = step_time(facts.spec, replace(shape, parameters=shape.active, idle=0), "h100")
    assert mixture is not None
    assert dense is not None
    assert mixture.parts["training"] == dense.parts["training"]
    assert mixture.parts["communication"] > dense.parts["communication"], "all gradients are summed"


@pytest.mark.parametrize(("tokens", "engines"), [(1024, 2), (64, 8)], ids=["sampling is longer", "training is longer"])
def test_one_step_ahead_a_step_takes_as_long_as_the_longer_half(tokens: int, engines: int) -> None:
    facts = on_a_cluster("qwen2.5-7b-gsm8k", 1)
    changes = {"rollout.engines": engines, "rollout.max_new_tokens": tokens} | TRANSFORMERS
    in_turn, ahead = (
        predict(replace(facts, spec=with_changes(facts.spec, changes | more))).step
        for more in ({}, {"rollout.max_staleness": 1})
    )
    assert in_turn is not None
    assert ahead is not None
    halves = in_turn.parts["sampling"], in_turn.parts["training"] + in_turn.parts["communication"]
    assert ahead.seconds == pytest.approx(max(halves) + in_turn.parts["weight sync"])
    assert (ahead.parts["sampling"] > 0) == (tokens == 1024)


def test_ranks_that_share_sequences_compute_as_much_and_exchange_more() -> None:
    """Within a node faster than across nodes."""
    facts = on_a_cluster("qwen2.5-7b-gsm8k", 2)
    shape = shape_of(facts.model_config, WEIGHTS["qwen2.5-7b-gsm8k"], 0)
    assert shape is not None
    steps = [
        step_time(with_changes(facts.spec, {"trainer.sequence_parallel": size}), shape, "h100") for size in (1, 4, 16)
    ]
    alone, within, across = (step.parts for step in steps if step is not None)
    assert alone["training"] == pytest.approx(within["training"]) == pytest.approx(across["training"])
    assert alone["communication"] < within["communication"] < across["communication"]


def test_a_gpu_without_figures_and_a_run_without_gpus_are_not_predicted() -> None:
    facts = on_a_cluster("qwen2.5-7b-gsm8k", 1)
    shape = shape_of(facts.model_config, WEIGHTS["qwen2.5-7b-gsm8k"], 0)
    assert shape is not None
    assert step_time(facts.spec, shape, "gaudi3") is None
    assert step_time(healthy().spec, shape, "h100") is None
    assert gpu_rates("NVIDIA H100 80GB HBM3") == gpu_rates("h100") != gpu_rates("h200")
    assert predict(replace(facts, spec=with_spec().spec, model_config={})).memory is None


def test_a_predicted_duration_warns_as_a_measured_one_does() -> None:
    facts = on_a_cluster("qwen2.5-7b-gsm8k", 1)
    short = replace(facts, spec=with_changes(facts.spec, {"resources.time_limit_s": 3600}))
    (found,) = [result for result in run_checks(short) if result.id == "resources.duration"]
    assert found.status is CheckStatus.WARNING
    assert "as predicted from the dimensions" in found.found
    known = replace(short, baseline=Baseline(seconds_per_step=1.0, known=True))
    (found,) = [result for result in run_checks(known) if result.id == "resources.duration"]
    assert found.status is CheckStatus.PASSED
