"""The memory model compared with hand counts and with tensors kept by torch, and its messages."""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from control_fakes import FakeScheduler
from test_preflight_checks import found, healthy, loops_of, with_spec

from rlhf_core.control import run_plan
from rlhf_core.preflight.facts import DataFile, Facts, ModelFolder, RewardModelFolder
from rlhf_core.preflight.memory.engines import token_cache_bytes, vllm_cache_budget, vllm_fixed_bytes, vllm_share_bytes
from rlhf_core.preflight.memory.formulas import (
    Zero,
    activation_bytes,
    cache_bytes,
    gradient_bytes,
    logit_bytes,
    main_memory_bytes,
    optimizer_bytes,
    own_weight_bytes,
)
from rlhf_core.preflight.memory.gpus import GIB, USABLE_SHARE, gpu_memory_bytes
from rlhf_core.preflight.memory.roles import (
    Estimate,
    engine_estimate,
    evaluator_estimate,
    longest_sequence,
    micro_batch_tokens,
    trainer_estimate,
    with_reward_models,
)
from rlhf_core.preflight.memory.shapes import Shape, part_of, shape_of, trained_shape
from rlhf_core.preflight.size_estimates import (
    checkpoint_bytes,
    decoder_parameters,
    num_parameters,
    shape_of_model,
)
from rlhf_core.preflight.step_time import step_time
from rlhf_core.schemas.changes import with_changes
from rlhf_core.schemas.checks import CheckResult, CheckStatus
from rlhf_core.schemas.cluster import ResourceSpec, SlurmSpec
from rlhf_core.schemas.content import ContentReport, SplitReport
from rlhf_core.schemas.model import LoraSpec
from rlhf_core.schemas.rollouts import uneven_heads
from rlhf_core.schemas.run import RunSpec
from rlhf_core.schemas.trainers import LIVE_ELEMENTS, REDUCE_BUCKET_ELEMENTS

QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}


def shape(config: Mapping[str, Any] = QWEN3_8B, parameters: int = 8_190_000_000, vocabulary: int = 0) -> Shape:
    found = shape_of(config, parameters, vocabulary)
    assert found is not None
    return found


def big(kind: str = "h100", ranks: int = 8, **sections: Any) -> Facts:
    """Qwen3-8B on GPUs of one kind."""
    settings: dict[str, Any] = {
        "resources": {"gpus_per_node": ranks, "ranks_per_node": ranks},
        "slurm": {"gpu_type": kind},
        "train": {"micro_batch_size": 1, "gradient_checkpointing": True},
        "grpo": {"prompts_per_step": 32},
        "rollout": {"max_new_tokens": 1024, "batch_size": 32},
    }
    for name, values in sections.items():
        settings[name] = {**settings.get(name, {}), **values}
    facts = with_spec(**settings)
    spec = with_changes(facts.spec, {"model.dtype": "bfloat16"})
    inventory = FakeScheduler(gpus_per_node=ranks).inventory()
    return replace(facts, spec=spec, model_config=QWEN3_8B, inventory=inventory)


def only(facts: Facts, id: str = "memory.trainer") -> CheckResult:
    (result,) = found(facts, id)
    return result


def blocked(facts: Facts, id: str = "memory.trainer") -> CheckResult:
    result = only(facts, id)
    assert result.status is CheckStatus.BLOCKED
    return result


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("h100", 80),
        ("NVIDIA H100 80GB HBM3", 80),
        ("NVIDIA H100 NVL 94GB", 94),
        ("a100", 40),
        ("a100-sxm4-80gb", 80),
        ("nvidia_a100_80gb_pcie", 80),
        ("Tesla V100-SXM2-32GB", 32),
        ("v100", 16),
        ("h100_1g.10gb", 10),
        ("a100_3g.20gb", 20),
        ("nvidia_h100_80gb_hbm3_2g.20gb", 20),
        ("1g.10gb", 10),
        ("NVIDIA A10", 24),
        ("l4", 24),
        ("l40s", 48),
        ("h200", 141),
        ("b200", 180),
        ("gb200", 186),
        ("NVIDIA GeForce RTX 4090", 24),
        ("NVIDIA RTX A6000", 48),
        ("rtx_a5000", 24),
    ],
)
def test_memory_of_gpus(kind: str, size: int) -> None:
    assert gpu_memory_bytes(kind) == int(size * GIB * USABLE_SHARE)


@pytest.mark.parametrize("kind", ["", "mi300x", "h1000"])
def test_a_gpu_that_is_not_in_the_table(kind: str) -> None:
    assert gpu_memory_bytes(kind) is None


def test_a_cache_is_as_large_as_published() -> None:
    """Qwen3-8B: 144 KiB per token in 16 bit."""
    one = cache_bytes(shape(), "bfloat16", 1, 1)
    assert one * 36 // 37 == 144 * 1024, "except for the layer that is copied while it grows"


def test_a_stored_copy_of_the_embedding_is_not_counted() -> None:
    """The file of Qwen3-0.6B has 751,632,384 weights in 16 bit, of a model of 596,049,920: transformers ties the output
    layer to the embedding."""
    config = {"vocab_size": 151936, "hidden_size": 1024, "dtype": "bfloat16", "tie_word_embeddings": True}
    folder = ModelFolder(Path("/m"), weight_bytes=2 * 751_632_384, matrices=frozenset({"q_proj", "lm_head"}))
    facts = replace(healthy(), model_config=config, model_folder=folder)
    assert num_parameters(facts) == 596_049_920
    untied = replace(facts, model_config={**config, "tie_word_embeddings": False})
    assert num_parameters(untied) == 751_632_384
    assert num_parameters(replace(facts, model_folder=replace(folder, matrices=frozenset({"q_proj"})))) == 751_632_384


def test_multi_head_latent_attention_caches_its_latent_alone() -> None:
    """DeepSeek-V3 (arXiv 2412.19437, table 1 of arXiv 2505.09343): 70 KB per token in 16 bit, on every GPU of an
    engine."""
    config = {
        **QWEN3_8B, "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "head_dim": 64,
        "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128,
    }  # fmt: skip
    found = shape(config, 671_000_000_000)
    assert token_cache_bytes(found, "bfloat16") == 61 * 576 * 2 == 70_272
    assert token_cache_bytes(part_of(found, 8), "bfloat16") == 70_272
    assert cache_bytes(found, "bfloat16", 3, 10) == 3 * 10 * 62 * 576 * 2
    assert found.query == 128 * 192


@pytest.mark.parametrize(
    ("settings", "windowed"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"] * 18}, 18),
        ({"sliding_window_pattern": 6}, 30),
        ({"model_type": "mistral"}, 36),
        ({"model_type": "qwen2", "use_sliding_window": False, "layer_types": ["full_attention"] * 36}, 0),
        ({}, 0),
        ({"model_type": "mistral", "sliding_window": None}, 0),
    ],
)
def test_a_layer_with_a_sliding_window_keeps_no_more_tokens(settings: dict[str, Any], windowed: int) -> None:
    found = shape({**QWEN3_8B, "sliding_window": 100, **settings})
    token = 2 * 8 * 128 * 2
    largest = 1000 if windowed < 36 else 100
    assert cache_bytes(found, "bfloat16", 1, 1000) == token * ((36 - windowed) * 1000 + windowed * 100 + largest)
    assert cache_bytes(found, "bfloat16", 1, 50) == token * 37 * 50, "shorter than the window"


def test_states_are_those_of_zero_1() -> None:
    """Rajbhandari et al. 2020: 2 + 2 bytes and 12 / N; the gradients here are summed in float32."""
    estimate = trainer_estimate(big().spec, shape())
    parameters = shape().parameters
    assert estimate.resident["weights"] == 2 * parameters
    assert estimate.resident["gradients"] == 6 * parameters
    assert estimate.resident["optimizer (ZeRO 1 over 8 ranks)"] == pytest.approx(12 * parameters / 8, abs=1)


def test_states_are_those_of_every_stage_of_zero() -> None:
    """Rajbhandari et al. 2020, figure 1, with gradients in float32; offloaded parts are in main memory."""
    parameters = shape().parameters

    def resident(stage: int, offload: str = "none", dtype: str = "bfloat16") -> tuple[float, float, float]:
        zero = Zero(stage, offload, 8)
        optimizer = optimizer_bytes(shape(), zero) if offload == "none" else 0
        gradients = gradient_bytes(shape(), dtype, zero) - (stage >= 2) * REDUCE_BUCKET_ELEMENTS * 2
        parts = (own_weight_bytes(shape(), dtype, zero), gradients, optimizer)
        weights, gradients, optimizer = (round(part / parameters, 3) for part in parts)
        return weights, gradients, optimizer

    assert resident(0, dtype="float32") == (4, 4, 8)
    assert resident(1) == (2, 6, 1.5)
    assert resident(2) == (2, 0.5, 1.5)
    assert resident(3) == (0.25, 0.5, 1.5)
    assert resident(3, "optimizer") == (0.25, 0, 0)
    assert resident(3, "parameters") == (0, 0, 0)
    offloaded = main_memory_bytes(shape(), "bfloat16", Zero(3, "parameters", 8))
    assert sum(offloaded.values()) == pytest.approx(parameters * (12 + 12 + 2) / 8, abs=9)


def test_a_sampling_rank_has_whole_weights_in_every_stage() -> None:
    estimate = trainer_estimate(big(trainer={"zero_stage": 3}).spec, shape())
    assert estimate.moments["sample"]["gathered weights"] == 2 * shape().parameters
    assert estimate.moments["train"]["gathered weights"] == 2 * LIVE_ELEMENTS


def test_whole_weights_before_the_first_step_are_counted_without_what_training_adds() -> None:
    """Engines of their own sample, so nothing else needs whole weights; the evaluation before training does."""

    def before(resources: dict[str, Any] | None = None, **grpo: Any) -> tuple[int, Mapping[str, int]]:
        settings: dict[str, Any] = {"trainer": {"zero_stage": 3}, "rollout": {"engines": 4}}
        facts = big("h100", 64, grpo=grpo, resources=resources or {}, **settings)
        estimate = trainer_estimate(facts.spec, shape())
        assert "sample" not in estimate.moments
        return estimate.resident_bytes + estimate.moments["load"]["whole weights"], estimate.resident

    whole = 2 * shape().parameters
    for measures in (False, True):
        total, resident = before(measure_kl=measures)
        shares = resident["weights"] + resident.get("reference model", 0)
        assert total == whole + shares + resident["libraries"]
    total, resident = before({"gpus_per_node": 0}, measure_kl=True)
    assert total == whole + sum(resident.values()), "the reference is loaded into the same memory, beside what trains"
    assert "load" not in trainer_estimate(big().spec, shape()).moments, "below ZeRO 3, weights are always whole"


def test_a_model_as_large_as_a_gpu_is_refused_in_zero_3_with_engines_of_its_own() -> None:
    """70 billion weights take 130 GiB whole, though each of 64 GPUs keeps a small part of them."""
    config = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    settings: dict[str, Any] = {"trainer": {"zero_stage": 3, "offload": "optimizer"}, "rollout": {"engines": 4}}
    facts = big("h100", 64, **settings)
    model = shape({**config, "num_key_value_heads": 8}, 70_000_000_000, 128256)
    estimate = trainer_estimate(facts.spec, model)
    assert estimate.resident_bytes < 40 * GIB < 130 * GIB < estimate.peak_bytes
    assert estimate.largest[0][0] == "whole weights"


def test_a_bound_of_tokens_bounds_what_a_pass_needs() -> None:
    def needed(tokens: int) -> dict[str, int]:
        facts = big(
            train={"micro_batch_size": 8, "gradient_checkpointing": True}, trainer={"micro_batch_tokens": tokens}
        )
        return trainer_estimate(facts.spec, shape()).moments["train"]

    spec = big().spec
    length = spec.max_tokens
    assert needed(2 * length)["activations"] * 4 == needed(0)["activations"]
    assert needed(1) == needed(length), "a pass still contains a sequence of the full length"
    assert needed(100 * length) == needed(0)


def test_ranks_that_share_sequences_have_a_part_of_their_activations() -> None:
    """And only of those: weights and optimizer are split over all ranks in any case."""

    def estimate(size: int) -> Estimate:
        return trainer_estimate(big(trainer={"sequence_parallel": size}).spec, shape())

    alone, shared = estimate(1), estimate(4)
    assert shared.resident == alone.resident
    assert shared.moments["train"]["activations"] * 4 == pytest.approx(alone.moments["train"]["activations"], rel=1e-3)
    assert shared.moments["sample"] == alone.moments["sample"], "every rank samples for itself"


def test_a_sequence_too_long_for_a_gpu_is_advised_to_be_shared() -> None:
    """Sequences of 500 thousand tokens, after everything else that needs less memory."""
    long: dict[str, Any] = {
        "trainer": {"zero_stage": 3, "offload": "parameters"},
        "rollout": {"max_new_tokens": 500_000, "engines": 4, "engine": "vllm"},
    }
    result = blocked(big(**long))
    assert "trainer.sequence_parallel=" in result.advice
    odd = big(**long)
    odd = replace(odd, model_config={**odd.model_config, "num_attention_heads": 7})
    assert "trainer.sequence_parallel=" not in blocked(odd).advice
    long["trainer"]["sequence_parallel"] = 8
    assert only(big(**long)).status is not CheckStatus.BLOCKED


def test_a_model_that_one_gpu_cannot_train_is_advised_to_be_split() -> None:
    result = blocked(big("h100", grpo={"measure_kl": True}))
    assert "trainer.zero_stage=2" in result.advice
    assert only(big("h100", grpo={"measure_kl": True}, trainer={"zero_stage": 3})).status is CheckStatus.PASSED


def test_what_is_offloaded_must_fit_into_the_node() -> None:
    offload: dict[str, Any] = {"trainer": {"zero_stage": 3, "offload": "parameters"}}
    assert found(big(), "memory.offload") == [], "nothing is offloaded"
    assert only(big(**offload, resources={"memory_gb": 512}), "memory.offload").status is CheckStatus.PASSED
    result = blocked(big(**offload, resources={"memory_gb": 64}), "memory.offload")
    assert "offloaded optimizer" in result.found


def test_rows_that_every_rank_holds_must_fit_into_the_node() -> None:
    """A million rows of 24 kB in 8 ranks: 192 GB."""

    def results(memory_gb: float, bytes_per_row: int = 24_000) -> list[CheckResult]:
        split = SplitReport(split="train", num_rows=2000, is_whole=False, bytes_per_row=bytes_per_row)
        file = DataFile(Path("train.jsonl"), num_rows=1_000_000)
        facts = big(resources={"memory_gb": memory_gb})
        return found(
            replace(facts, files={"data.train": file}, content=ContentReport(splits=(split,))), "memory.offload"
        )

    (fits,), (too_small,) = results(256), results(192)
    assert (fits.status, too_small.status) == (CheckStatus.PASSED, CheckStatus.BLOCKED)
    assert "8 times the rows 22.4 GiB" in too_small.found
    assert "use fewer rows" in too_small.advice
    assert results(256, bytes_per_row=100) == [], "less than a gigabyte"


@pytest.mark.parametrize(
    ("rollout", "holds_gib"),
    [
        ({"engines": 4}, 4 * 15.3),
        ({"engines": 4, "sync": {"delta": True}}, 5 * 15.3),
        ({"engines": 4, "nodes": 1}, 4 * 15.3),
        ({"engines": 4, "engine": "sglang"}, 8 * 15.3),
        ({"engines": 2, "engine": "vllm", "vllm": {"tensor_parallel": 2}}, 2 * 15.3),
    ],
    ids=["beside trainers", "deltas", "nodes of their own", "sglang", "split"],
)
def test_weights_that_engines_receive_must_fit_into_the_node(rollout: dict[str, Any], holds_gib: float) -> None:
    """Each engine keeps the version that it received last in main memory: 15.3 GiB of Qwen3-8B in bfloat16."""
    num_nodes = 2 if "nodes" in rollout else 1

    def results(memory_gb: float) -> list[CheckResult]:
        resources = {"ranks_per_node": 4, "num_nodes": num_nodes, "memory_gb": memory_gb}
        return found(big("h200", rollout=rollout, resources=resources), "memory.offload")

    (fits,) = results(1.4 * holds_gib)
    (too_small,) = results(holds_gib)
    assert (fits.status, too_small.status) == (CheckStatus.PASSED, CheckStatus.BLOCKED)
    assert "an engine with the weights that it receives" in too_small.found
    assert "rollout.engines" in too_small.advice


def test_an_adapter_of_engines_is_given_alone_and_its_base_stays() -> None:
    """The next version is that of the adapter; vLLM's base model is kept in main memory, because syncs do not include
    it."""
    beside = with_spec(model={"lora": {}}, rollout={"engines": 2}).spec
    parts, whole = (engine_estimate(spec, shape()) for spec in (beside, with_spec(rollout={"engines": 2}).spec))
    assert parts.moments["sync"]["next weights"] < 0.02 * whole.moments["sync"]["next weights"]
    assert parts.resident["weights"] == whole.resident["weights"] + parts.moments["sync"]["next weights"]
    vllm: dict[str, Any] = {"rollout": {"engine": "vllm"}, "resources": {"memory_gb": 512}}
    assert found(big("h200", **vllm), "memory.offload") == [], "whole weights come with every version"
    assert only(big("h200", **vllm, model={"lora": {}}), "memory.offload").status is CheckStatus.PASSED
    result = blocked(big("h200", **{**vllm, "resources": {"memory_gb": 128}}, model={"lora": {}}), "memory.offload")
    assert "vLLM's base model" in result.found


def test_a_reference_model_is_counted_when_there_is_one() -> None:
    def resident(**grpo: Any) -> int:
        return trainer_estimate(with_spec(grpo=grpo).spec, shape()).resident_bytes

    assert resident(measure_kl=True) - resident() == 4 * shape().parameters
    assert resident(kl_coefficient=0.1) == resident(measure_kl=True)


def test_an_adapter_has_an_optimizer_of_its_own_and_no_second_model() -> None:
    """Trained parameters as peft counts them for Qwen2.5-7B with rank 16 on all linear layers: 40,370,176."""
    spec = with_changes(big().spec, {"loops.main.algorithm": {"name": "dpo"}})
    config = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    seven = shape({**config, "num_key_value_heads": 4}, 7_615_616_512, 152064)
    assert trained_shape(seven, LoraSpec()).parameters == 40_370_176
    parts = trainer_estimate(with_changes(spec, {"model.lora": {}}), shape()).resident
    all_weights = trainer_estimate(spec, shape()).resident
    assert parts["weights"] == pytest.approx(all_weights["weights"], rel=0.01)
    assert parts["gradients"] < 0.01 * all_weights["gradients"]
    assert parts["optimizer (ZeRO 1 over 8 ranks)"] < 0.01 * all_weights["optimizer (ZeRO 1 over 8 ranks)"]


def test_the_snapshot_of_an_adapter_needs_no_memory() -> None:
    """Adapters are written without one, as they are small."""
    memory_gb = {"memory_gb": 64.0}
    assert only(big(resources=memory_gb), "memory.snapshot").status is CheckStatus.WARNING
    assert found(big(resources=memory_gb, model={"lora": {}}), "memory.snapshot") == []


@pytest.mark.parametrize(
    ("config", "width"),
    [
        ({"intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2}, 28672),  # Mixtral-8x7B
        ({"intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts_per_tok": 8}, 6144),  # Qwen3-30B-A3B
        (
            {
                "intermediate_size": 18944,
                "moe_intermediate_size": 2560,
                "num_experts_per_tok": 8,
                "shared_expert_intermediate_size": 20480,
            },
            40960,  # Qwen2-57B-A14B
        ),
        ({"intermediate_size": 14336}, 14336),
    ],
)
def test_a_token_passes_through_several_experts(config: dict[str, int], width: int) -> None:
    assert shape({**QWEN3_8B, **config}, 46_702_792_704).feed_forward == width


def test_completions_of_the_data_are_as_long_as_they_may_be() -> None:
    """An offline loop learns from completions of the data, independently of sampling in its evaluation."""
    sampled, taught = {"max_new_tokens": 64}, {"max_prompt_tokens": 100, "max_completion_tokens": 1000}
    offline = with_spec(train={"algorithm": "sft"}, sft={"num_steps": 0}, data=taught, rollout=sampled)
    assert longest_sequence(offline.spec) == 1100
    assert longest_sequence(with_spec(sft={"num_steps": 0}, data=taught, rollout=sampled).spec) == 164
    assert longest_sequence(with_spec(sft={"num_steps": 1}, data=taught, rollout=sampled).spec) == 1100


def test_the_reward_model_that_scores_evaluations_is_counted_wherever_it_scores() -> None:
    folder = RewardModelFolder(Path("/m"), config={**QWEN3_8B, "dtype": "bfloat16"}, weight_bytes=16_380_000_000)

    def gib(check: str = "memory.evaluator", **sections: Any) -> float:
        models = {"good": {"path": "/m", "dtype": "bfloat16", "batch_size": 1}}
        facts = big("h200", reward={"models": models}, **sections)
        facts = replace(facts, reward_models=dict.fromkeys(facts.spec.scoring_models, folder))
        (result,) = found(facts, check)
        return float(result.found.partition("about ")[2].partition(" GiB")[0])

    by_model = {"scorer": "reward.models.good"}
    assert gib(evaluate=by_model) - gib() == pytest.approx(16.38e9 / GIB, abs=0.2)
    sft: dict[str, Any] = {"train": {"algorithm": "sft"}, "sft": {"num_steps": 0}}
    of_trainer = gib("memory.trainer", evaluate=by_model, **sft) - gib("memory.trainer", **sft)
    assert of_trainer == pytest.approx(16.38e9 / GIB, abs=0.2), "also where nothing is sampled in training"


def test_a_reward_model_is_counted_where_it_lives() -> None:
    def counted(device: str, memory_gb: int = 512) -> tuple[CheckResult, list[CheckResult]]:
        models = {"good": {"path": "/m", "dtype": "bfloat16", "device": device, "batch_size": 1}}
        facts = big("h200", reward={"models": models}, resources={"memory_gb": memory_gb})
        folder = RewardModelFolder(Path("/m"), config={**QWEN3_8B, "dtype": "bfloat16"}, weight_bytes=16_380_000_000)
        facts = replace(facts, reward_models={"good": folder})
        return only(facts), found(facts, "memory.offload")

    def gib(result: CheckResult) -> float:
        return float(result.found.partition("about ")[2].partition(" GiB")[0])

    without = gib(only(big("h200", resources={"memory_gb": 512})))
    beside, nothing = counted("rank")
    assert gib(beside) - without == pytest.approx(16.38e9 / GIB, abs=0.2)
    assert nothing == []
    apart, (fits,) = counted("cpu")
    assert gib(apart) == without
    assert fits.status is CheckStatus.PASSED
    _, (too_large,) = counted("cpu", memory_gb=64)
    assert too_large.status is CheckStatus.BLOCKED
    assert "reward model good 15.3" in too_large.found


def test_few_logits_are_all_there_at_once() -> None:
    assert logit_bytes(shape(), 10) == 10 * 151936 * 12


def test_traits_are_counted_whatever_the_algorithm_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = with_spec().spec
    algorithm = spec.loops.main.algorithm
    before, sequences = trainer_estimate(spec, shape()).resident, algorithm.sequences_per_step
    assert "critic" not in before
    monkeypatch.setattr(type(algorithm), "critic", True)
    monkeypatch.setattr(type(algorithm), "pairs", True)
    after = trainer_estimate(spec, shape()).resident
    trained = sum(taken for part, taken in before.items() if part.startswith(("weights", "gradients", "optimizer")))
    assert after == {**before, "critic": trained}
    assert algorithm.sequences_per_step == 2 * sequences


@pytest.mark.training
def test_of_many_logits_one_chunk_of_the_trainer_is_there_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in the trainer's own loop over a vocabulary of this size, without the layer itself."""
    import torch

    from rlhf_core.training.models import causal_lm as models

    rows: list[int] = []

    def counted(hidden: Any, labels: Any, head: Any, temperature: float, entropy_gradient: bool) -> Any:
        rows.append(len(hidden))
        return hidden[:, 0], hidden[:, 0]

    head = torch.nn.Linear(1, shape().vocabulary, bias=False, device="meta")
    trainer: Any = SimpleNamespace(causal_lm=SimpleNamespace(get_output_embeddings=lambda: head))
    trainer.chunk_elements = inspect.signature(models.PolicyModel).parameters["chunk_elements"].default
    monkeypatch.setattr(models, "_score_chunk", counted)
    models.PolicyModel._score(trainer, torch.zeros(5000, 1), torch.zeros(5000, dtype=torch.int64), 1.0, False)
    assert sum(rows) == 5000
    assert len(rows) > 1
    seen = max(rows) * shape().vocabulary * 12
    assert seen <= logit_bytes(shape(), 5000) < seen + shape().vocabulary * 12
    assert logit_bytes(shape(), 10**6) == logit_bytes(shape(), 5000)


def test_an_8b_model_on_eight_h100_is_too_much_for_zero_1_alone_with_a_reference() -> None:
    result = blocked(big(grpo={"measure_kl": True}))
    assert "gradients 45." in result.found
    assert "a GPU has 74.4" in result.found


def test_a_large_micro_batch_is_named_with_one_that_fits() -> None:
    facts = big("h200", train={"micro_batch_size": 64, "gradient_checkpointing": False})
    result = blocked(facts)
    assert "trainer.micro_batch_size=4 (" in result.advice, result
    assert "activations" in result.found


def test_a_large_rollout_batch_is_named_with_one_that_fits() -> None:
    result = blocked(big("h200", rollout={"batch_size": 1024, "max_new_tokens": 8192}, grpo={"samples_per_prompt": 64}))
    assert "rollout.batch_size=" in result.advice
    assert result.found.index("KV cache") < result.found.index("gradients")


def test_a_shortage_that_no_setting_can_help_is_reported() -> None:
    result = blocked(big("v100"))
    assert "no setting makes it fit" in result.advice


def test_an_unknown_gpu_is_not_judged() -> None:
    assert "slurm.gpu_type" in only(big("")).found
    assert "mi300x" in only(big("mi300x")).found
    assert found(big(""), "memory.evaluator") == []


def test_the_type_may_come_from_the_nodes() -> None:
    inventory = FakeScheduler(nodes=("a", "b"), gpus_per_node=8, node_gpu_types={"a": "h200", "b": "l4"}).inventory()
    assert "a GPU has 22.3" in only(replace(big(""), inventory=inventory)).found, "the smallest has to do"


def test_the_evaluator_has_its_own_estimate() -> None:
    facts = big("l40s", evaluate={"num_prompts": 0}, rollout={"batch_size": 512, "max_new_tokens": 8192})
    blocked(facts, "memory.evaluator")
    assert only(big("h200"), "memory.evaluator").status is CheckStatus.PASSED


def test_few_long_completions_of_an_evaluation_are_counted_as_few() -> None:
    """Training samples 32 completions of a rank at once, with at most 1024 tokens."""
    held_out, prompt = {"num_prompts": 16, "max_new_tokens": 8192}, big().spec.data.max_prompt_tokens

    def caches(num_prompts: int) -> list[int]:
        evaluate = {**held_out, "num_prompts": num_prompts}
        alone, apart = (big(evaluate=evaluate, rollout=rollout).spec for rollout in ({}, {"engines": 8}))
        found = (trainer_estimate(alone, shape()), evaluator_estimate(alone, shape()), engine_estimate(apart, shape()))
        return [one.moments["sample"]["KV cache"] for one in found]

    trained = cache_bytes(shape(), "bfloat16", 32, prompt + 1024)
    evaluated = cache_bytes(shape(), "bfloat16", 2, prompt + 8192)
    assert caches(2 * 8) == [trained, evaluated, trained]
    assert caches(8 * 8) == [4 * evaluated] * 3


def test_a_reward_model_reads_long_completions_only_if_it_scores_evaluations() -> None:
    def scoring(**evaluate: Any) -> int:
        models = {"good": {"path": "/m", "dtype": "bfloat16", "batch_size": 1}}
        spec = big(reward={"models": models}, evaluate={"max_new_tokens": 8192, **evaluate}).spec
        estimate = with_reward_models(trainer_estimate(spec, shape()), spec, {"good": shape()})
        return estimate.moments["reward"]["scoring"]

    longest, trained = (big().spec.data.max_prompt_tokens + new for new in (8192, 1024))
    assert scoring(scorer="reward.models.good") * trained == scoring() * longest


@pytest.mark.parametrize(("algorithm", "scores"), [("sft", True), ("dpo", True), ("grpo", False)])
def test_the_evaluator_counts_passes_over_held_out_rows(algorithm: str, scores: bool) -> None:
    spec = with_spec(train={"algorithm": algorithm}, evaluate={"completions": False}).spec
    scoring = evaluator_estimate(spec, shape()).moments.get("score", {})
    assert (sum(scoring.values()) > 0) == scores


@pytest.mark.parametrize(
    ("algorithm", "num_prompts", "together"), [("sft", 64, 8), ("sft", 0, 8), ("sft", 17, 3), ("dpo", 17, 6)]
)
def test_passes_over_held_out_rows_do_not_depend_on_the_rows_of_a_step(
    algorithm: str, num_prompts: int, together: int
) -> None:
    """Each of 8 ranks trains on one row, and evaluates as many at once as it has, up to ``micro_batch_size``."""
    changes: dict[str, Any] = {
        "loops.main.algorithm": {"name": algorithm, "batch_size": 8},
        "loops.warm_start": None,
        "evaluate.num_prompts": num_prompts,
        "evaluate.completions": False,
        "trainer.micro_batch_size": 8,
    }
    spec = with_changes(big().spec, changes)
    assert micro_batch_tokens(spec) == (2 if algorithm == "dpo" else 1) * spec.max_tokens
    assert micro_batch_tokens(spec, evaluates=True) == together * spec.max_tokens
    one, all_ = (
        evaluator_estimate(with_changes(spec, {"trainer.micro_batch_size": size}), shape()).moments["score"]
        for size in (1, 8)
    )
    assert all_["activations"] == together * one["activations"]


def test_whole_weights_are_counted_if_only_the_loss_is_evaluated() -> None:
    """Weights split over ranks are whole while they are evaluated before the main loop; the optimizer, which would need
    as much memory later, is in main memory."""
    loops, evaluate = loops_of("sft", batch_size=32), {"completions": False}
    spec = big(loops=loops, evaluate=evaluate, trainer={"zero_stage": 3, "offload": "optimizer"}).spec
    assert spec.row_evaluations == ("loss",)
    assert trainer_estimate(spec, shape()).moments["load"]["whole weights"] > 0


def test_on_cpu_the_ranks_share_the_memory_of_their_node() -> None:
    fits = only(healthy())
    assert fits.status is CheckStatus.PASSED
    assert "a rank of a node has 16.0" in fits.found
    assert only(with_spec(resources={"memory_gb": 1})).status is CheckStatus.BLOCKED


def vllm(kind: str = "h100", **rollout: Any) -> Facts:
    """Qwen3-8B with vLLM in the process of every rank."""
    return big(kind, trainer={"zero_stage": 3}, rollout={"engine": "vllm", "max_new_tokens": 1024, **rollout})


def test_vllm_takes_its_share_of_the_gpu_while_it_samples() -> None:
    """0.4 of an H100 is 32 GiB, including weights; ZeRO 3 gathers some layers at a time to verify the first version."""
    gpu = gpu_memory_bytes("h100")
    parts = trainer_estimate(vllm().spec, shape(), gpu).moments["sample"]
    assert parts["vLLM (40% of the GPU)"] == pytest.approx(32 * GIB, rel=1e-6)
    assert parts["gathered weights"] == 2 * LIVE_ELEMENTS
    assert only(vllm()).status is CheckStatus.PASSED
    greedy = blocked(vllm(vllm={"gpu_memory_share": 0.95}))
    assert "vLLM (95% of the GPU) 76.0" in greedy.found
    assert "rollout.vllm.gpu_memory_share=" in greedy.advice


def test_steps_of_vllm_are_smaller_on_a_gpu_with_less_memory() -> None:
    """In vLLM 0.32, of 8,192 tokens and 256 sequences instead of 16,384 and 1,024."""
    spec, weights = vllm().spec, 2 * shape().parameters
    small, large = (vllm_fixed_bytes(spec, shape(), gpu_memory_bytes(kind)) - weights for kind in ("l40s", "h100"))
    logits = 4 * shape().vocabulary
    assert small - 256 * logits == pytest.approx((large - 1024 * logits) / 2, rel=0.01)


def test_a_share_that_does_not_hold_one_sequence_is_refused_with_one_that_does() -> None:
    small = blocked(vllm(vllm={"gpu_memory_share": 0.15}), "memory.rollout")
    assert "vLLM has 12.0 GiB per rank, " in small.found
    least = float(small.advice.partition("share=")[2].partition(" ")[0])
    enough = only(vllm(vllm={"gpu_memory_share": least}), "memory.rollout")
    assert enough.status is CheckStatus.PASSED
    assert enough.found.endswith(" of them at once")
    less = only(vllm(vllm={"gpu_memory_share": round(least - 0.01, 2)}), "memory.rollout")
    assert less.status is CheckStatus.WARNING, "an H100 with 94 GB has enough"


@pytest.mark.parametrize(("share", "status"), [(0.8, CheckStatus.PASSED), (1.0, CheckStatus.WARNING)])
def test_sglang_takes_its_share_however_many_sequences_there_are(share: float, status: CheckStatus) -> None:
    """It fills its cache up to the share and queues the rest, as vLLM does."""
    rollout = {"engine": "sglang", "engines": 4, "max_new_tokens": 16000, "batch_size": 256}
    resources = {"gpus_per_node": 8, "ranks_per_node": 4}
    facts = big(resources=resources, rollout={**rollout, "sglang": {"gpu_memory_share": share}})
    result = only(facts, "memory.rollout")
    assert result.status is status
    if status is CheckStatus.WARNING:
        assert "lower rollout.sglang.gpu_memory_share" in result.advice


def test_an_engine_that_is_split_takes_a_part_of_each_gpu() -> None:
    """Half of the weights on each of two GPUs; without GPUs, all parts are in the same main memory."""
    one, two = (vllm(engines=2, vllm={"tensor_parallel": width}).spec for width in (1, 2))
    gpu = gpu_memory_bytes("h100")
    part = part_of(shape(), 2)
    assert engine_estimate(two, shape(), gpu) == engine_estimate(one, part, gpu)
    fixed = vllm_fixed_bytes(one, shape(), gpu) - vllm_fixed_bytes(two, part, gpu)
    assert fixed >= 0.95 * shape().parameters, "bytes of half the weights in bfloat16"
    whole, split = (
        engine_estimate(spec.model_copy(update={"resources": ResourceSpec()}), shape()) for spec in (one, two)
    )
    assert split.resident["vLLM's weights"] == pytest.approx(whole.resident["vLLM's weights"], rel=0.1)
    assert split.resident["libraries"] == 3 * whole.resident["libraries"], "of two parts, and of the process that leads"
    assert split.moments["sync"] == whole.moments["sync"]


def test_evaluators_whose_samples_engines_make_hold_the_weights_alone() -> None:
    """Controls: each with its own vLLM engine; with transformers if an adapter is merged and vLLM is split."""
    gpu = gpu_memory_bytes("h100")
    split: dict[str, Any] = {"engines": 2, "vllm": {"tensor_parallel": 2}}
    apart, own = (evaluator_estimate(vllm(**rollout).spec, shape(), gpu) for rollout in (split, {}))
    assert apart.peak_bytes == own.resident_bytes
    assert own.peak_bytes - own.resident_bytes == vllm_share_bytes(vllm().spec, gpu or 0)
    adapted = big("h100", model={"lora": {}}, rollout={"engine": "vllm", **split}).spec
    assert set(evaluator_estimate(adapted, shape(), gpu).moments["sample"]) == {"KV cache", "sampling"}


def test_a_cache_of_vllm_holds_as_many_sequences_as_counted() -> None:
    """Qwen3-8B has 144 KiB per token; the share without weights and a step is cache."""
    facts, gpu = vllm(), gpu_memory_bytes("h100")
    assert token_cache_bytes(shape(), "bfloat16") == 144 * 1024
    budget = vllm_cache_budget(facts.spec, shape(), gpu)
    assert budget == pytest.approx(32 * GIB - vllm_fixed_bytes(facts.spec, shape(), gpu), abs=2)
    length = facts.spec.data.max_prompt_tokens + 1024
    assert f"{budget // (length * 144 * 1024)} of them at once" in only(facts, "memory.rollout").found


def test_vllm_on_cpu_keeps_weights_and_cache_beside_the_trainer() -> None:
    plain = with_spec(resources={"memory_gb": 6})
    beside = with_spec(resources={"memory_gb": 6}, rollout={"engine": "vllm", "vllm": {"cpu_cache_gb": 4}})
    assert only(plain).status is CheckStatus.PASSED
    refused = blocked(beside)
    assert "vLLM's KV cache 4.0" in refused.found
    parts = trainer_estimate(beside.spec, shape()).resident
    head = shape().vocabulary * shape().hidden
    assert parts["vLLM's weights"] == 4 * (shape().parameters + head)
    assert only(beside, "memory.evaluator").status is CheckStatus.BLOCKED, "it has an engine too"


def test_copies_of_the_weights_for_engines_are_counted_where_main_memory_is_all_there_is() -> None:
    def copies(**sync: Any) -> int:
        spec = with_spec(rollout={"engines": 2, "sync": sync}).spec
        return trainer_estimate(spec, shape()).resident["weights to send"]

    weights = 4 * shape().parameters
    assert (copies(), copies(transport="files")) == (0, 0)
    assert (copies(delta=True), copies(transport="shared_memory")) == (weights, weights)
    assert copies(transport="shared_memory", delta=True) == 2 * weights


def test_the_evaluator_counts_the_reference_that_pairs_are_ranked_against() -> None:
    def weights(algorithm: str) -> int:
        resident = evaluator_estimate(with_spec(train={"algorithm": algorithm}).spec, shape()).resident
        return resident["weights"] + resident.get("reference model", 0)

    assert weights("dpo") == 2 * weights("grpo")
    assert weights("simpo") == weights("grpo"), "without a reference there is no second model"


def test_the_value_model_is_counted_in_a_checkpoint_on_the_disk() -> None:
    """Its weights and optimizer are written as well: a disk with room for the policy's part alone fills up."""
    plain = big()
    one = checkpoint_bytes(plain)
    assert one is not None
    spec = with_changes(plain.spec, {"loops.main.algorithm": {"name": "ppo"}})
    facts = replace(plain, spec=spec, disk=replace(plain.disk, free_bytes=int(1.5 * one)))
    assert checkpoint_bytes(facts) == 2 * one
    assert only(facts, "disk.space").status is CheckStatus.BLOCKED


def test_a_merged_model_is_counted_among_what_fills_the_disk() -> None:
    room = replace(healthy().disk, free_bytes=6 * GIB)
    adapter = replace(big(model={"lora": {}}), disk=room)
    assert only(adapter, "disk.space").status is not CheckStatus.BLOCKED, "the checkpoints alone have room"
    result = blocked(replace(adapter, spec=with_changes(adapter.spec, {"promote.when": "always"})), "disk.space")
    assert "the merged model of a promotion 1" in result.found


@pytest.mark.training
@pytest.mark.parametrize("lora", [None, LoraSpec(rank=32), LoraSpec(target_modules=("q_proj", "v_proj"))])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_what_torch_keeps(checkpointing: bool, lora: LoraSpec | None) -> None:
    """Every tensor kept for the backward pass of a small Qwen3, except the weights, is counted once."""
    import torch

    from rlhf_core.training.data.tokenizers import build_tokenizer
    from rlhf_core.training.models.adapters import add_adapter
    from rlhf_core.training.models.causal_lm import PolicyModel, build_causal_lm
    from rlhf_core.training.models.lean_layers import use_gradient_checkpointing, use_lean_layers

    config: dict[str, Any] = {
        "model_type": "qwen3",
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
    }
    causal_lm = build_causal_lm(config, build_tokenizer("char", (), 0), seed=0)
    use_lean_layers(causal_lm)
    if lora is not None:
        add_adapter(causal_lm, lora, seed=0)
    model = PolicyModel(causal_lm).train()
    if checkpointing:
        use_gradient_checkpointing(causal_lm)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = causal_lm.base_model(input_ids=torch.randint(0, 100, (4, 200)), use_cache=False).last_hidden_state
    shape = shape_of(config, 0, 128)
    assert shape is not None
    trained = sum(parameter.numel() for parameter in causal_lm.parameters() if parameter.requires_grad)
    assert lora is None or trained_shape(shape, lora).parameters == trained
    counted = activation_bytes(shape, "float32", 4 * 200, checkpointing, lora)
    if checkpointing:  # the layer that is recomputed is not in memory during the forward pass
        product = 4 * 200 * shape.feed_forward * 4
        counted -= activation_bytes(shape, "float32", 4 * 200, False, lora) // 6 + product
    assert hidden.requires_grad
    assert sum(kept.values()) == pytest.approx(counted, rel=0.25)


@pytest.mark.parametrize(
    ("id", "kind", "smallest"), [("memory.trainer", "a100", "a100_40gb"), ("memory.evaluator", "v100", "v100-16gb")]
)
def test_a_type_of_several_sizes_blocks_only_if_the_largest_is_too_small(id: str, kind: str, smallest: str) -> None:
    """The trainer needs an estimated 82 GiB, for which 80 GB may suffice; the evaluator needs 17 GiB."""
    in_doubt = only(big(kind), id)
    assert in_doubt.status is CheckStatus.WARNING
    assert in_doubt.advice.startswith("if the GPUs are of this size, ")
    assert only(big(smallest), id).status is CheckStatus.BLOCKED, "control"
    assert only(big("v100")).status is CheckStatus.BLOCKED, "control: the trainer does not fit into 32 GB either"
    offered = replace(big(""), inventory=FakeScheduler(gpus_per_node=8, node_gpu_types={"n1": kind}).inventory())
    assert only(offered, id).advice == in_doubt.advice, "the nodes report the type"


@pytest.mark.parametrize(
    "selection",
    [{"constraint": "h200"}, {"gres": "gpu:h200:8"}, {"extra": ("--nodelist=b",)}, {"reservation": "large"}],
)
def test_gpus_that_slurm_selects_are_in_doubt(selection: dict[str, Any]) -> None:
    """Only Slurm knows which of the two kinds of node these options select."""
    scheduler = FakeScheduler(nodes=("a", "b"), gpus_per_node=8, node_gpu_types={"a": "l4", "b": "h200"})
    facts = replace(big(kind=""), inventory=scheduler.inventory())
    assert only(facts).status is CheckStatus.BLOCKED, "control"
    selected = only(replace(facts, site_slurm=SlurmSpec(**selection)))
    assert selected.status is CheckStatus.WARNING
    assert "slurm.gpu_type to a larger type that the nodes have: h200" in selected.advice
    scheduler = FakeScheduler(nodes=("a", "b"), gpus_per_node=8, node_gpu_types={"a": "l4", "b": "l40s"})
    smaller = replace(facts, inventory=scheduler.inventory(), site_slurm=SlurmSpec(**selection))
    assert only(smaller).status is CheckStatus.BLOCKED, "it fits into none of them"


def test_the_evaluator_of_another_trainer_has_to_fit_too() -> None:
    content = {
        "name": "other",
        "model": {"path": "/m", "dtype": "bfloat16"},
        "trainer": {"kind": "command", "argv": ["python", "train.py"], "num_steps": 2},
        "resources": {"gpus_per_node": 8, "ranks_per_node": 8},
        "slurm": {"gpu_type": "t4"},
    }
    evaluated = RunSpec.model_validate({**content, "data": {"eval": "/d/eval.jsonl"}})
    result = only(replace(big("t4"), spec=evaluated), "memory.evaluator")
    assert (result.status, "reference" in result.found) == (CheckStatus.BLOCKED, False)
    assert found(replace(big("t4"), spec=RunSpec.model_validate(content)), "memory.evaluator") == [], "it has none"


def test_the_advice_for_an_evaluator_is_a_setting_only_if_one_helps() -> None:
    """The weights of Qwen3-8B alone, 15 GiB, do not fit into 15 GiB; with the cache, they do not fit into 22 GiB."""
    assert "an evaluator holds whole models" in only(big("t4"), "memory.evaluator").advice
    many = big("l4", evaluate={"num_prompts": 1024}, rollout={"batch_size": 128})
    assert only(many, "memory.evaluator").advice == "lower rollout.batch_size"


def test_main_memory_is_that_of_the_nodes_with_gpus() -> None:
    """A node without GPUs has 4 TiB, the one with GPUs 128 GiB; the optimizer of Qwen3-8B takes 183 GiB."""
    facts = big(resources={"gpus_per_node": 8, "ranks_per_node": 8}, trainer={"kind": "native", "offload": "optimizer"})
    inventory = FakeScheduler(nodes=("a", "b"), gpus_per_node=8, node_gpus={"a": 0, "b": 8}, memory_gb=4096).inventory()
    assert only(replace(facts, inventory=inventory), "memory.offload").status is CheckStatus.PASSED, "control"
    known = inventory.model_copy(update={"node_memory_gb": {"a": 4096.0, "b": 128.0}})
    assert only(replace(facts, inventory=known), "memory.offload").status is CheckStatus.BLOCKED


def test_the_plan_knows_no_memory_where_the_checks_know_none() -> None:
    """The largest of the nodes that the job may not get is no limit for it."""
    facts = healthy()
    assert run_plan.plan_run(facts, {}).limit, "control"
    none_left = replace(facts, site_slurm=SlurmSpec(exclude=facts.inventory.node_names))
    assert only(none_left).status is CheckStatus.SKIPPED
    assert run_plan.plan_run(none_left, {}).limit is None


@pytest.mark.parametrize(("share", "status"), [(0.85, CheckStatus.PASSED), (0.95, CheckStatus.WARNING)])
def test_an_engine_may_take_the_share_that_rlhf_plan_proposes(share: float, status: CheckStatus) -> None:
    assert run_plan.OWN_SHARE == 0.85
    engines = {"engine": "vllm", "engines": 4, "vllm": {"gpu_memory_share": share}}
    resources = {"gpus_per_node": 8, "ranks_per_node": 4}
    of_engine, of_cache = found(big(rollout=engines, resources=resources), "memory.rollout")
    assert (of_engine.status, of_cache.status) == (status, CheckStatus.PASSED)


@pytest.mark.parametrize(
    ("algorithm", "samples"), [("reward_model", False), ("kto", False), ("simpo", True), ("sft", True)]
)
def test_whole_weights_and_a_cache_are_counted_only_where_something_is_sampled(algorithm: str, samples: bool) -> None:
    """Held-out pairs (SimPO) may have answers; a reward model completes nothing, and a label tells no right answer."""
    facts = with_spec(loops=loops_of(algorithm, batch_size=32), trainer={"kind": "native", "zero_stage": 3})
    assert ("sample" in trainer_estimate(facts.spec, shape()).moments) is samples
    assert ("sample" in evaluator_estimate(facts.spec, shape()).moments) is samples


@pytest.mark.parametrize(("algorithm", "findings"), [("grpo", 1), ("sft", 1), ("reward_model", 0), ("kto", 0)])
def test_vllm_needs_no_room_for_its_cache_where_it_is_not_started(algorithm: str, findings: int) -> None:
    facts = big(rollout={"engine": "vllm", "vllm": {"gpu_memory_share": 0.1}})
    changes: dict[str, Any] = {"loops.main.algorithm": {"name": algorithm}, "loops.warm_start": None}
    facts = replace(facts, spec=with_changes(facts.spec, changes))
    assert [one.status for one in found(facts, "memory.rollout")] == [CheckStatus.BLOCKED] * findings


@pytest.mark.parametrize("source", ["file", "content"])
def test_pairs_without_answers_need_no_memory_to_sample(source: str) -> None:
    facts = big(rollout={"batch_size": 1024, "max_new_tokens": 32_000}, evaluate={"num_prompts": 8192})
    cpo: dict[str, Any] = {"loops.main.algorithm": {"name": "cpo", "batch_size": 32}, "loops.warm_start": None}
    facts = replace(facts, spec=with_changes(facts.spec, cpo))
    columns = {"prompt", "chosen", "rejected"}

    def with_columns(*more: str) -> Facts:
        if source == "file":
            file = DataFile(Path("eval.jsonl"), columns=frozenset({*columns, *more}))
            return replace(facts, files={"data.eval": file})
        split = SplitReport(split="eval", num_rows=100, columns=(*columns, *more))
        parquet = DataFile(Path("eval.parquet"), scanned=False)
        return replace(facts, files={"data.eval": parquet}, content=ContentReport(splits=(split,)))

    for check in ("memory.trainer", "memory.evaluator"):
        assert "KV cache" not in only(with_columns(), check).found
        assert "KV cache" in only(with_columns("answer"), check).found
    assert "KV cache" in only(replace(facts, files={}), "memory.trainer").found, "unknown"


def test_only_gpus_of_the_partition_count() -> None:
    """The default partition has small ones, and a node with too few large ones."""
    kinds = {"a": "l4", "b": "h200", "c": "h200"}
    partitions = {"a": ("small",), "b": ("large",), "c": ("small",)}
    gpus = {"a": 8, "b": 8, "c": 4}
    scheduler = FakeScheduler(
        nodes=tuple(kinds),
        gpus_per_node=8,
        node_gpus=gpus,
        node_gpu_types=kinds,
        node_partitions=partitions,
        default_partition="small",
    )
    facts = replace(big(kind=""), inventory=scheduler.inventory())
    assert only(facts).status is CheckStatus.BLOCKED
    assert "slurm.gpu_type" not in only(facts).advice
    large = replace(facts, site_slurm=SlurmSpec(partition="large"))
    assert only(large).status is CheckStatus.PASSED
    both = only(replace(facts, site_slurm=SlurmSpec(partition="large,small")))
    assert both.status is CheckStatus.BLOCKED, "it may get the small GPUs"
    assert both.advice.endswith("; or set slurm.gpu_type to a larger type that the nodes have: h200")


@pytest.mark.parametrize("name", ["num_key_value_heads", "head_dim", "sliding_window", "vocab_size"])
def test_a_dimension_that_is_no_number_is_unknown(name: str) -> None:
    """Configs of some models have a list, with a number for each layer."""
    config = {**QWEN3_8B, name: [8, 4]}
    assert shape_of(config, 8_190_000_000, 0) is None
    assert decoder_parameters(config) is None or name == "sliding_window"
    assert uneven_heads([8, 4], [8, 4], 2) == ""


def test_a_reference_of_another_size_takes_the_memory_of_its_own() -> None:
    """In a trainer whole or split, in an evaluator that ranks pairs; the policy itself takes what it did."""
    small, large = shape(), shape(parameters=32_000_000_000)
    both = replace(small, reference=large)
    algorithm = {"name": "dpo", "batch_size": 8}
    main = {"num_steps": 1, "algorithm": algorithm, "reference": "/r", "optimizer": {"learning_rate": 1e-6}}
    spec = with_changes(big().spec, {"loops.main": main, "trainer.zero_stage": 3})
    own, other = (trainer_estimate(spec, one) for one in (small, both))
    assert own.resident["reference model"] == 2 * small.parameters // 8
    assert other.resident["reference model"] == 2 * large.parameters // 8
    assert {name: size for name, size in own.resident.items() if name != "reference model"} == {
        name: size for name, size in other.resident.items() if name != "reference model"
    }
    assert other.moments["train"]["pass of the reference"] > 0
    assert evaluator_estimate(spec, both).resident["reference model"] == 2 * large.parameters
    adapted = with_changes(spec, {"model.lora": {}})
    assert trainer_estimate(adapted, both).resident["reference model"] == 2 * large.parameters // 8, "not the adapter"
    slower, faster = (step_time(spec, one, "h100") for one in (both, small))
    assert slower is not None
    assert faster is not None
    assert slower.parts["training"] > 1.5 * faster.parts["training"]


def test_the_shape_of_a_run_knows_its_reference() -> None:
    facts = big()
    config = {**QWEN3_8B, "torch_dtype": "bfloat16"}
    named = ModelFolder(Path("/r"), weight_bytes=2 * 32_000_000_000, config=config)
    with_reference = shape_of_model(replace(facts, references={"loops.main.reference": named}))
    alone = shape_of_model(facts)
    assert with_reference is not None
    assert with_reference.reference is not None
    assert with_reference.reference.parameters == 32_000_000_000
    assert alone is not None
    assert alone.reference is None
