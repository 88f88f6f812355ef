"""Runs that learn from pairs, on two real processes: resuming is exact, frozen weights are found, pairs are ranked."""

import dataclasses
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from rank_launcher import (
    ONE_LAYER,
    TINY_MODEL,
    TrainingGroup,
    launch,
    make_context,
    of_one_rank,
    tiny_spec,
    training_group,
    values,
)
from test_loop_runs import assert_resumed_bitwise, metrics_of

from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.evaluation import EvaluationReport

pytestmark = [pytest.mark.training, pytest.mark.end_to_end]

DATA = {
    "generator": "test_preference_runs:pairs",
    "generator_args": {"num_digits": 3, "num_train": 40, "num_eval": 11},
}


def pairs(split: str, seed: int, **arguments: Any) -> list[dict[str, str]]:
    """Pairs without reference answers."""
    from rlhf_core.training.tasks import sorted_pairs

    return [
        {name: row[name] for name in ("prompt", "chosen", "rejected")} for row in sorted_pairs(split, seed, **arguments)
    ]


def ragged(split: str, seed: int, **arguments: Any) -> list[dict[str, str]]:
    """Pairs of very different lengths."""
    return [
        {"prompt": "7" * (1 + i % 4) + ">", "chosen": "1" * (1 + i * 7 % 6), "rejected": "2" * (1 + i * 5 % 3)}
        for i in range(40)
    ]


def as_they_come(weights: list[int], num_parts: int) -> list[list[int]]:
    """Deal rows without regard to their length."""
    size = len(weights) // num_parts
    return [list(range(part * size, (part + 1) * size)) for part in range(num_parts)]


def spec_of(algorithm: dict[str, Any], warm: bool = False, zero_stage: int = 1, **sections: Any) -> dict[str, Any]:
    """Six steps on pairs; with a warm start, two of supervised training followed by four."""
    content = tiny_spec(**{"model": {"config": ONE_LAYER}, **sections})
    content = {name: value for name, value in content.items() if name not in ("sft", "train", "grpo")}
    optimizer = {"learning_rate": 3e-3, **sections.get("optimizer", {})}
    content.pop("optimizer", None)
    main = {"num_steps": 4 if warm else 6, "algorithm": {"batch_size": 8, **algorithm}, "optimizer": optimizer}
    loops: dict[str, Any] = {"main": main}
    if warm:
        loops["warm_start"] = {"num_steps": 2, "algorithm": {"name": "sft", "batch_size": 8}, "optimizer": optimizer}
    data = {**content["data"], **DATA} if "data" not in sections else content["data"]
    return {**content, "data": data, "loops": loops, "trainer": {"micro_batch_size": 6, "zero_stage": zero_stage}}


OTHERS = ("cpo", "simpo", "orpo")
DPO = {"name": "dpo"}
RANKER = {"name": "reward_model", "centring_coefficient": 0.01}
IPO = {"name": "dpo", "loss": "ipo"}
WARM: Any = {
    "model": {"config": TINY_MODEL},
    "data": {"generator": "rlhf_core.training.tasks:sorted_pairs"},
    "evaluate": {"every_num_steps": 3},
}


KTO = spec_of(
    {"name": "kto"},
    data={"generator": "rlhf_core.training.tasks:sorted_or_not", "completion_template": "{completion}"},
    evaluate={"every_num_steps": 3},
)


SHARED: dict[str, dict[str, Any]] = {
    "stage-3": spec_of(DPO, zero_stage=3, evaluate={"every_num_steps": 3}),
    "kto": KTO,
    "ranker": spec_of(RANKER, warm=True, **WARM),
}
"""Runs that are made with rows that both ranks share, too."""


def shared(spec: dict[str, Any]) -> dict[str, Any]:
    """The same run, in which both ranks share each row."""
    return {**spec, "trainer": {**spec["trainer"], "sequence_parallel": 2}}


def runs_of(group: TrainingGroup) -> dict[str, Any]:
    from rlhf_core.training.data.examples import RowPasses, divide_examples
    from rlhf_core.training.trainers import context as trainers_context
    from rlhf_core.training.trainers import offline
    from rlhf_core.training.trainers.engine import Engine

    dpo = DPO
    train = group.train
    results: dict[str, Any] = {}

    def again(name: str, spec: dict[str, Any]) -> str:
        """Make the end of a run once more, from its last checkpoint but one."""
        group.rewind(name, f"{name}-again", 6)
        return train(f"{name}-again", spec, restart=1)

    results["straight"] = train("straight", spec_of(dpo))
    results["warm"] = train("warm", spec_of(IPO, warm=True, **WARM))
    with mock.patch.object(Engine, "step", return_value=1.0):
        results["frozen"] = train(
            "frozen", spec_of(dpo, health={"frozen_steps": 3}, checkpoint={"every_num_steps": 100})
        )
    for stage in (2, 3):
        spec = spec_of(dpo, zero_stage=stage, evaluate={"every_num_steps": 3})
        results[f"stage {stage}"] = train(f"stage-{stage}", spec)
        results[f"stage {stage} resumed"] = again(f"stage-{stage}", spec)
    results["cut"] = []

    def noted(examples: Any, *given: Any, **options: Any) -> Any:
        results["cut"].append(divide_examples(examples, given[3], **options))
        return RowPasses(examples, *given, **options)

    with (
        mock.patch.object(offline, "RowPasses", noted),
        mock.patch.object(trainers_context, "balanced", as_they_come),
    ):
        for bound in (0, 40):
            spec = spec_of(dpo, zero_stage=2, data={"generator": "test_preference_runs:ragged"})
            spec["trainer"] |= {"micro_batch_tokens": bound, "micro_batch_size": 64}
            results[f"bound {bound}"] = train(f"bound-{bound}", spec)
    results["not finite"] = train("not-finite", spec_of(dpo, optimizer={"learning_rate": 1e30}))
    for name in OTHERS:
        results[name] = train(name, spec_of({"name": name}))
    results["kto"] = train("kto", KTO)
    results["resumed kto"] = again("kto", KTO)
    ranker = spec_of(RANKER, warm=True, **WARM)
    results["ranker"] = train("ranker", ranker)
    results["resumed ranker"] = again("ranker", ranker)
    for name, spec in SHARED.items():
        results[f"{name} shared"] = train(f"{name}-shared", shared(spec))
    results["stage-3 shared, resumed"] = again("stage-3-shared", shared(SHARED["stage-3"]))
    group.rewind("kto-shared", "kto-parted", 6)
    results["kto parted"] = train("kto-parted", KTO, restart=1)
    results["chunks"] = in_chunks_of_seven_tokens(group)
    return results


def evaluated_runs(rank: int, num_ranks: int, folder: str) -> list[str]:
    """Scenario: role evaluator on two of the runs, on the second with rows that both ranks share. Each has a rendezvous
    of its own: a port is not free at once."""
    from rlhf_core.training.evaluation.run import run_evaluator

    results = []
    for name, spec in (("warm", spec_of(IPO, warm=True, **WARM)), ("ranker", shared(SHARED["ranker"]))):
        context = make_context(f"{folder}/{name}", spec, rank, num_ranks)
        results.append(str(run_evaluator(dataclasses.replace(context, store=Path(folder) / f"{name}-store"))))
    return results


def on_one_rank(rank: int, num_ranks: int, folder: str) -> dict[str, Any]:
    """Scenario: the first step of a run above, and a reward model after a warm start."""
    first_step = spec_of(DPO)
    first_step["loops"]["main"]["num_steps"] = 1
    with training_group(rank, num_ranks, folder, first_step) as group:
        return {"one": group.train("one", first_step), "has weights": language_model_in_each_loop(group)}


@pytest.fixture(scope="module")
def evaluated(results: list[dict[str, Any]], folder: Path) -> None:
    launched = launch(evaluated_runs, 2, folder / "evaluated-launch", folder=str(folder))
    assert values(launched) == [["done", "done"]] * 2


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> Any:
    return of_one_rank(on_one_rank, folder)


def report(folder: Path, run: str, when: str, name: str = "preference") -> EvaluationReport:
    return EvaluationReport.model_validate_json(RunDir(folder / run).evaluation(when, name).read_bytes())


def test_pairs_are_learned(results: list[dict[str, Any]], folder: Path) -> None:
    assert [result["straight"] for result in results] == ["done", "done"]
    lines = metrics_of(folder, "straight")
    assert lines[1]["train/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert lines[1]["preference/margin"] == pytest.approx(0, abs=1e-6)
    assert lines[6]["preference/margin"] > 0
    assert lines[6]["train/loss"] < lines[1]["train/loss"]
    assert set(lines[6]) >= {f"preference/{name}" for name in ("accuracy", "chosen_reward", "rejected_reward")}
    assert lines[6]["preference/margin"] == pytest.approx(
        lines[6]["preference/chosen_reward"] - lines[6]["preference/rejected_reward"], abs=1e-6
    )


@pytest.mark.parametrize("stage", [2, 3])
def test_every_stage_of_zero_learns_the_same_and_resumes_bitwise(
    results: list[dict[str, Any]], folder: Path, stage: int
) -> None:
    for result in results:
        assert (result[f"stage {stage}"], result[f"stage {stage} resumed"]) == ("done", "done")
    assert_resumed_bitwise(folder, f"stage-{stage}")
    straight = metrics_of(folder, f"stage-{stage}")
    for number, line in metrics_of(folder, "straight").items():
        assert straight[number]["train/loss"] == pytest.approx(line["train/loss"], rel=1e-3), number


def test_one_rank_makes_the_first_step_of_two(
    results: list[dict[str, Any]], one_rank: dict[str, Any], folder: Path
) -> None:
    assert one_rank["one"] == "done"
    one, two = metrics_of(folder, "one"), metrics_of(folder, "straight")
    for name in ("train/loss", "train/grad_norm", "train/num_tokens", "preference/accuracy"):
        assert one[1][name] == pytest.approx(two[1][name], rel=1e-6), name


def test_what_learns_nothing_is_found(results: list[dict[str, Any]], folder: Path) -> None:
    for result in results:
        assert result["frozen"].startswith("DegenerateRl: Training no longer learns at step 3, since step 1 (fro")
        assert result["not finite"].startswith("NonFiniteLoss: train/")


def test_pairs_without_answers_are_ranked_alone(results: list[dict[str, Any]], folder: Path) -> None:
    before = report(folder, "straight", "before")
    assert (before.value, before.num_prompts, before.metric) == (0.5, 11, "accuracy"), "it is its own reference"
    assert not RunDir(folder / "straight").evaluation("before", "greedy").exists()


def test_held_out_pairs_are_ranked_before_and_after(
    results: list[dict[str, Any]], evaluated: None, folder: Path
) -> None:
    assert [result["warm"] for result in results] == ["done", "done"]
    before, after = report(folder, "warm", "before"), report(folder, "warm", "after")
    assert (before.value, before.checkpoint_step, after.checkpoint_step) == (0.5, 2, 6)
    assert after.value != 0.5
    assert after.ci_low <= after.value <= after.ci_high
    wrong = [sample for sample in after.samples if sample.completion != sample.answer]
    assert all(sample.score == 0 for sample in wrong)
    last = metrics_of(folder, "warm")[6]["eval/preference"]
    assert last == pytest.approx(after.value), "training measures the same as the evaluator"
    held_out = report(folder, "warm", "after", "loss")
    assert held_out.value == pytest.approx(metrics_of(folder, "warm")[6]["eval/loss"], rel=1e-5)
    assert report(folder, "warm", "before", "loss").value == pytest.approx(1 / (2 * 0.1) ** 2), "ipo without a margin"
    for when in ("before", "after"):
        assert report(folder, "warm", when, "greedy").metric == "exact_match", "pairs with answers are also completed"


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_loss_learns_pairs(results: list[dict[str, Any]], folder: Path, name: str) -> None:
    assert [result[name] for result in results] == ["done", "done"]
    lines = metrics_of(folder, name)
    assert lines[6]["train/loss"] < lines[1]["train/loss"]
    assert lines[6]["preference/margin"] > lines[1]["preference/margin"]
    assert report(folder, name, "before").value != 0.5, "without a reference the model prefers one completion at once"


def test_a_reward_model_is_made_of_the_warm_started_model(
    results: list[dict[str, Any]], evaluated: None, folder: Path
) -> None:
    from transformers import AutoModelForSequenceClassification

    assert [result["ranker"] for result in results] == ["done", "done"]
    run_dir = RunDir(folder / "ranker")
    model = AutoModelForSequenceClassification.from_pretrained(run_dir.checkpoint(6).model)
    assert model.config.architectures == ["Qwen3ForSequenceClassification"]
    assert report(folder, "ranker", "after").value == pytest.approx(metrics_of(folder, "ranker")[6]["eval/preference"])
    assert not run_dir.evaluation("after", "greedy").exists(), "it generates no text"


def test_a_reward_model_is_resumed_bitwise(results: list[dict[str, Any]], folder: Path) -> None:
    assert [result["resumed ranker"] for result in results] == ["done", "done"]
    assert_resumed_bitwise(folder, "ranker")


def test_labelled_completions_are_learned_and_resumed_bitwise(results: list[dict[str, Any]], folder: Path) -> None:
    assert [result["kto"] for result in results] == ["done", "done"]
    lines = metrics_of(folder, "kto")
    assert lines[1]["train/loss"] == pytest.approx(0.5, abs=1e-6), "the policy is its own reference"
    assert lines[6]["preference/chosen_reward"] > lines[6]["preference/rejected_reward"]
    assert 0 <= lines[6]["eval/preference"] <= 1
    before = report(folder, "kto", "before")
    assert before.value == 0.5
    assert report(folder, "kto", "before", "loss").value == pytest.approx(0.5)
    assert RunDir(folder / "kto").evaluation("before", "greedy").exists(), "the answer is not the completion"
    assert [result["resumed kto"] for result in results] == ["done", "done"]
    assert_resumed_bitwise(folder, "kto")


@pytest.mark.parametrize("name", SHARED)
def test_ranks_that_share_rows_learn_the_same(results: list[dict[str, Any]], folder: Path, name: str) -> None:
    """Losses, gradients, counts and evaluations: each of them counts once."""
    assert [result[f"{name} shared"] for result in results] == ["done", "done"]
    alone, shared = metrics_of(folder, name), metrics_of(folder, f"{name}-shared")
    for step, line in alone.items():
        assert shared[step] == pytest.approx(line, rel=1e-4, abs=1e-5), step


def test_a_run_with_shared_rows_is_resumed_bitwise_and_goes_on_without_them(
    results: list[dict[str, Any]], folder: Path
) -> None:
    for result in results:
        assert (result["stage-3 shared, resumed"], result["kto parted"]) == ("done", "done")
    assert_resumed_bitwise(folder, "stage-3-shared")
    shared, parted = metrics_of(folder, "kto-shared"), metrics_of(folder, "kto-parted", 1)
    assert set(parted) == {5, 6}
    for step, line in parted.items():
        assert line == pytest.approx(shared[step], rel=1e-4, abs=1e-5), step


def test_a_bound_of_tokens_changes_the_passes_and_not_the_training(results: list[dict[str, Any]], folder: Path) -> None:
    """Ranks with different numbers of micro-batches make equally many passes, because ZeRO 2 communicates in each. Rows
    that are dealt by length would give all ranks the same number."""
    assert [result[f"bound {bound}"] for result in results for bound in (0, 40)] == ["done"] * 4
    first, second = ([len(parts) for parts in result["cut"]] for result in results)
    assert max(first) > 1
    assert first != second, "the numbers of micro-batches differ between the ranks at times"
    whole, bounded = metrics_of(folder, "bound-0"), metrics_of(folder, "bound-40")
    for step, line in whole.items():
        for name in ("train/loss", "train/grad_norm", "train/num_tokens", "preference/margin"):
            assert bounded[step][name] == pytest.approx(line[name], rel=1e-4, abs=1e-6), (step, name)


def language_model_in_each_loop(group: TrainingGroup) -> dict[str, bool]:
    """A reward model after a warm start. Whether the language model has weights when a loop begins."""
    from rlhf_core.training.trainers import models as models_module
    from rlhf_core.training.trainers import offline

    models: list[Callable[[], Any]] = []
    found: dict[str, bool] = {}
    real_load, real_train = models_module.load_causal_lm, offline.train

    def load(*given: Any) -> Any:
        model = real_load(*given)
        models.append(weakref.ref(model))
        return model

    def train(training: Any, loop: Any, *rest: Any) -> bool:
        living = [model for one in models if (model := one()) is not None]
        found[loop.algorithm.name] = any(not weight.is_meta for model in living for weight in model.parameters())
        return real_train(training, loop, *rest)

    with mock.patch.object(models_module, "load_causal_lm", load), mock.patch.object(offline, "train", train):
        assert group.train("language-model", spec_of(RANKER, warm=True, data=WARM["data"])) == "done"
    return found


def test_a_reward_model_is_trained_without_the_language_model_beside_it(one_rank: dict[str, Any]) -> None:
    assert one_rank["has weights"] == {"sft": True, "reward_model": False}


def in_chunks_of_seven_tokens(group: TrainingGroup) -> dict[str, Any]:
    """Rows of very different lengths, whose logits take different numbers of chunks on the two ranks.

    Returns:
        How the trainings ended, and for each pass of the split model the chunks that this rank needs and makes.
    """
    from rlhf_core.training.models import causal_lm
    from rlhf_core.training.models.causal_lm import PolicyModel
    from rlhf_core.training.models.gathering import is_split
    from rlhf_core.training.trainers import context as trainers_context

    agree = causal_lm.most_on_any_rank
    chunks: list[tuple[int, int]] = []

    def noted(number: int, head: Any, device: Any) -> int:
        most = agree(number, head, device)
        if is_split(head):  # the reference model of the first passes is whole on every rank
            chunks.append((number, most))
        return most

    specs = {
        stage: spec_of(DPO, zero_stage=stage, data={"generator": "test_preference_runs:ragged"}) for stage in (1, 3)
    }
    for spec in specs.values():
        spec["loops"]["main"]["num_steps"] = 3
    with (
        mock.patch.object(PolicyModel.__init__, "__defaults__", (7 * 128,)),
        mock.patch.object(trainers_context, "balanced", as_they_come),
        mock.patch.object(causal_lm, "most_on_any_rank", noted),
    ):
        ended = [group.train(f"chunks-{stage}", spec) for stage, spec in specs.items()]
    return {"ended": ended, "chunks": chunks}


def test_ranks_with_different_numbers_of_chunks_of_logits_gather_as_often(
    results: list[dict[str, Any]], folder: Path
) -> None:
    """With a vocabulary of 150,000, a chunk is 440 tokens. Under ZeRO 3, each gathers the output layer on all ranks."""
    first, second = (result["chunks"] for result in results)
    assert first["ended"] == second["ended"] == ["done", "done"]
    passes = list(zip(first["chunks"], second["chunks"], strict=True))
    assert all(made == most == max(needed, other) for (needed, made), (other, most) in passes)
    assert any(needed != other for (needed, _), (other, _) in passes), "control: by themselves they would differ"
    split = metrics_of(folder, "chunks-3")
    for step, line in metrics_of(folder, "chunks-1").items():
        for name in ("train/loss", "train/grad_norm"):
            assert split[step][name] == pytest.approx(line[name], rel=1e-4, abs=1e-6), (step, name)
