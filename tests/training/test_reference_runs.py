"""Runs with a reference model from a folder: distillation from a teacher, and the reference of preference losses."""

import math
from pathlib import Path
from typing import Any

import pytest
from rank_launcher import (
    ONE_LAYER,
    TINY_MODEL,
    TrainingGroup,
    flip_last_bit,
    of_one_rank,
    tiny_spec,
    training_group,
)
from test_loop_runs import assert_resumed_bitwise, metrics_of

from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.evaluation import EvaluationReport

pytestmark = [pytest.mark.training, pytest.mark.end_to_end]

OPTIMIZER = {"learning_rate": 3e-3}
WARM_START = {"num_steps": 2, "algorithm": {"name": "sft", "batch_size": 8}, "optimizer": {"learning_rate": 1e-2}}
PAIRS = {
    "generator": "rlhf_core.training.tasks:sorted_pairs",
    "generator_args": {"num_digits": 3, "num_train": 40, "num_eval": 11},
}
EXACT = {"functions": ["rlhf_core.training.rewards:exact_match"], "weights": [0], "timeout_s": 0}
"""Rewards that are only measured."""


def spec_of(algorithm: dict[str, Any], reference: object = "", num_steps: int = 6, **sections: Any) -> dict[str, Any]:
    content = tiny_spec(**{"model": {"config": ONE_LAYER}, "reward": EXACT, **sections})
    content = {name: value for name, value in content.items() if name not in ("sft", "train", "grpo")}
    main = {"num_steps": num_steps, "reference": str(reference), "algorithm": algorithm, "optimizer": OPTIMIZER}
    trainer = {"micro_batch_size": 6, **sections.get("trainer", {})}
    return {**content, "loops": {"main": main, **sections.get("loops", {})}, "trainer": trainer}


def on_one_rank(rank: int, num_ranks: int, folder: str) -> dict[str, str]:
    """Scenario: a teacher, students of another size, and runs that name the reference that they have anyway."""
    with training_group(rank, num_ranks, folder, tiny_spec()) as group:
        return {**students_of(group), **named_and_own(group)}


def students_of(group: TrainingGroup) -> dict[str, str]:
    runs = Path(group.folder)
    taught = spec_of({"name": "sft", "batch_size": 32}, num_steps=12, model={"config": TINY_MODEL})
    results = {"teacher": group.train("teacher", taught)}
    teacher = RunDir(runs / "teacher").checkpoint(12).model
    algorithm = {"name": "distillation", "prompts_per_step": 32}
    spec = spec_of(algorithm, teacher)
    results["student"] = group.train("student", spec)
    variants: dict[str, dict[str, Any]] = {
        "split": {"trainer": {"zero_stage": 3}},
        "adapted": {"model": {"config": ONE_LAYER, "lora": {"rank": 4}}},
    }
    for name, sections in variants.items():
        results[name] = group.train(name, spec_of(algorithm, teacher, **sections))
    larger = {"config": {**ONE_LAYER, "vocab_size": 5000}}
    results["more tokens"] = group.train("more-tokens", spec_of(algorithm, teacher, model=larger))
    for name in ("student-again", "student-misled"):
        group.rewind("student", name, 6)
    results["student again"] = group.train("student-again", spec, restart=1)
    flip_last_bit(teacher / "model.safetensors")
    results["misled"] = group.train("student-misled", spec, restart=1)
    return results


def named_and_own(group: TrainingGroup) -> dict[str, str]:
    """Pairs of runs: in the second one, the config names the folder of the initial model of the first."""
    results = {}
    for name, algorithm, sections in (
        ("dpo", {"name": "dpo", "batch_size": 8}, {"data": PAIRS}),
        ("grpo", {"name": "grpo", "prompts_per_step": 4, "samples_per_prompt": 4, "kl_coefficient": 0.1}, {}),
        (
            "lora",
            {"name": "dpo", "batch_size": 8},
            {"data": PAIRS, "model": {"config": ONE_LAYER, "lora": {"rank": 4}}},
        ),
    ):
        own = spec_of(algorithm, num_steps=3, **sections)
        results[name] = group.train(name, own)
        initial = RunDir(Path(group.folder) / name).initial_model
        results[f"{name} named"] = group.train(f"{name}-named", spec_of(algorithm, initial, num_steps=3, **sections))
    warm = {"data": PAIRS, "loops": {"warm_start": WARM_START}}
    initial = RunDir(Path(group.folder) / "dpo").initial_model
    results["dpo after"] = group.train("dpo-after", spec_of({"name": "dpo", "batch_size": 8}, initial, 3, **warm))
    return results


@pytest.fixture(scope="module")
def results(folder: Path) -> Any:
    return of_one_rank(on_one_rank, folder)


def test_a_student_approaches_its_teacher_without_rewards(results: dict[str, str], folder: Path) -> None:
    assert (results["teacher"], results["student"]) == ("done", "done")
    steps = list(metrics_of(folder, "student").values())
    divergences = [metrics["policy/kl"] for metrics in steps]
    assert divergences[-1] < 0.9 * divergences[0], divergences
    assert {metrics["reward/mean"] for metrics in steps} == {0.0}


@pytest.mark.parametrize(("name", "tolerance"), [("split", 1e-4), ("adapted", 0.0)])
def test_a_teacher_judges_split_students_and_adapters(
    name: str, tolerance: float, results: dict[str, str], folder: Path
) -> None:
    """Under ZeRO 3 as below it; an adapter starts at the same policy, and learns something else."""
    assert results[name] == "done"
    whole, other = (metrics_of(folder, run) for run in ("student", name))
    assert other[1]["policy/kl"] == pytest.approx(whole[1]["policy/kl"], rel=1e-5)
    later = [abs(other[step]["policy/kl"] - whole[step]["policy/kl"]) for step in (2, 6)]
    assert max(later) < tolerance if tolerance else min(later) > 1e-4, later


def test_a_student_resumes_bitwise_and_only_with_the_same_teacher(results: dict[str, str], folder: Path) -> None:
    assert results["student again"] == "done"
    assert_resumed_bitwise(folder, "student")
    assert results["misled"].startswith("ResumeMismatch: ")
    assert (
        f"{folder}/teacher/checkpoints/step-000012/model: found other weights than those that step-000004 was"
        in results["misled"]
    )


def test_a_teacher_has_an_embedding_for_every_token_of_its_student(results: dict[str, str]) -> None:
    assert results["more tokens"].startswith("BadConfig: the reference ")
    assert "but the policy may sample 5000; expected a model with the tokenizer" in results["more tokens"]


@pytest.mark.parametrize("name", ["dpo", "grpo", "lora"])
def test_a_named_reference_is_used_like_the_policy_at_the_start(
    name: str, results: dict[str, str], folder: Path
) -> None:
    """The same bits; beside an adapter, a whole model computes the same in another order."""
    assert (results[name], results[f"{name} named"]) == ("done", "done")
    own, named = metrics_of(folder, name), metrics_of(folder, f"{name}-named")
    if name != "lora":
        assert own == named
        return
    for step, metrics in own.items():
        assert named[step]["train/loss"] == pytest.approx(metrics["train/loss"], abs=1e-5)


def test_held_out_pairs_are_compared_with_the_named_reference(results: dict[str, str], folder: Path) -> None:
    """Also before the main loop, where a policy that is its own reference prefers nothing."""
    assert results["dpo after"] == "done"

    def before(run: str) -> EvaluationReport:
        path = RunDir(folder / run).evaluation("before", "preference")
        return EvaluationReport.model_validate_json(path.read_bytes())

    assert {sample.score for sample in before("dpo").samples} == {0.5}
    assert {sample.score for sample in before("dpo-after").samples} - {0.5}
    (first, *_) = metrics_of(folder, "dpo-after").values()
    main = metrics_of(folder, "dpo-after")[3]
    assert "train/loss" in first
    assert not math.isclose(main["train/loss"], math.log(2), abs_tol=1e-6), "the warm start has left the reference"
