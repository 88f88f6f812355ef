"""Runs that train an adapter, on two real processes: every loop and stage, exact resume, and what is promoted."""

import contextlib
import functools
import itertools
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from rank_launcher import (
    ONE_LAYER,
    TINY_MODEL,
    TrainingGroup,
    make_context,
    of_one_rank,
    tiny_spec,
)
from safetensors.torch import load_file
from test_loop_runs import final_state, metrics_of
from test_preference_runs import IPO, RANKER, WARM, report, spec_of
from test_promoted_model import origin

from rlhf_core.errors import PromotionFailed
from rlhf_core.launch.model_card import model_card
from rlhf_core.launch.promote import damage, model_source, write_model_directory
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.reports import Phase
from rlhf_core.schemas.run import RunSpec
from rlhf_core.training.types import NullReporter

pytestmark = [pytest.mark.training, pytest.mark.end_to_end]

LORA = {"rank": 4, "alpha": 8}
STAGES = (0, 1, 2, 3)
PPO = {"name": "ppo", "prompts_per_step": 8}
LAST = 4
"""Step of the last checkpoint of a run; the one before is of step 2, and in the main loop."""
SHORTER = {"warm": 3, "bf16": 2}
"""Last steps of runs that nothing goes on with: after a warm start and two updates, and after two updates."""
RANKED = {**WARM, "model": {"config": ONE_LAYER}, "evaluate": {"every_num_steps": 2}}


def adapted(content: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """The same run with an adapter."""
    changed = {name: {**content.get(name, {}), **section} for name, section in sections.items()}
    model = {**content["model"], "lora": LORA, **sections.get("model", {})}
    return {**content, **changed, "model": model}


def short(content: dict[str, Any], num_steps: int = LAST) -> dict[str, Any]:
    """The same run with fewer steps, the first of which is that of a warm start if it has one."""
    loops = {name: dict(loop) for name, loop in content["loops"].items()}
    if "warm_start" in loops:
        loops["warm_start"]["num_steps"] = 1
    loops["main"]["num_steps"] = num_steps - ("warm_start" in loops)
    return {**content, "loops": loops}


RUNS: dict[str, dict[str, Any]] = {
    **{f"stage-{stage}": adapted(short(spec_of({"name": "dpo"}, zero_stage=stage))) for stage in STAGES},
    "warm": adapted(short(spec_of(IPO, warm=True, zero_stage=3, **RANKED), SHORTER["warm"])),
    "ranker": adapted(short(spec_of(RANKER, warm=True, zero_stage=2, **RANKED)), promote={"when": "always"}),
    "grpo": adapted(
        tiny_spec(
            model={"config": ONE_LAYER},
            grpo={"kl_coefficient": 0.1},
            sft={"num_steps": 1},
            train={"num_steps": LAST - 1},
        ),
        trainer={"zero_stage": 3},
        promote={"when": "always"},
    ),
    "ppo": adapted(short(spec_of(PPO, data={"generator": "rlhf_core.training.tasks:sort_digits"}, zero_stage=1))),
    "bf16": adapted(
        short(spec_of({"name": "dpo"}, zero_stage=3), SHORTER["bf16"]),
        model={"config": TINY_MODEL, "dtype": "bfloat16"},
        trainer={"gradient_checkpointing": True},
    ),
}
EVALUATED = adapted(
    short(spec_of({"name": "dpo"}), 3),
    model={"lora": {**LORA, "dropout": 0.3}},
    evaluate={"every_num_steps": 1},
)
"""Trains with dropout, and ranks pairs after every step."""
RUNS["ppo"]["loops"]["main"]["algorithm"].pop("batch_size")
RESUMED = ("stage-0", "ranker", "grpo", "ppo")
"""One of each stage and loop."""


def runs_of(group: TrainingGroup) -> dict[str, Any]:
    from rlhf_core.training.evaluation import held_out
    from rlhf_core.training.trainers import models as models_module

    train = group.train
    results: dict[str, Any] = {}
    for name, spec in RUNS.items():
        results[name] = train(name, spec)
    for name in RESUMED:
        group.rewind(name, f"{name}-again", LAST)
        results[f"{name}-again"] = train(f"{name}-again", RUNS[name], restart=1)
    # Negative control: the adapter on another base model.
    group.copy("stage-1", "other-base")
    group.damage(RunDir(Path(group.folder) / "other-base").initial_model / "model.safetensors")
    results["other base"] = train("other-base", RUNS["stage-1"], restart=1)
    # Negative control: a resume that starts from a fresh adapter.
    group.rewind("stage-1", "forgetful", LAST)
    with mock.patch.object(models_module, "load_adapter"), mock.patch.object(models_module.Engine, "load_state"):
        results["forgetful"] = train("forgetful", RUNS["stage-1"], restart=1)
    train("evaluated", EVALUATED)
    train("not-evaluated", adapted(EVALUATED, evaluate={"every_num_steps": 0}, model=EVALUATED["model"]))
    # Negative control: pairs are ranked with dropout.
    with mock.patch.object(held_out, "in_evaluation_mode", contextlib.nullcontext):
        train("with-dropout", EVALUATED)
    group.rewind("stage-3", "for-one", LAST)
    return results


class LastBeat(NullReporter):
    """Knows the phase of the last beat, and the number of beats."""

    phase: Phase | None = None
    number = 0

    def beat(self, phase: Phase, step: int) -> None:
        self.phase, self.number = phase, self.number + 1


def beats_of_evaluator(rank: int, num_ranks: int, folder: str, name: str) -> tuple[str, list[tuple[Any, int]]]:
    """Result of role evaluator, and the phase and number of the last beat before each file of merged weights."""
    from rlhf_core.training.evaluation.run import run_evaluator
    from rlhf_core.training.models import gathering
    from rlhf_core.training.models.tensor_files import write_tensors

    last, beats = LastBeat(), list[tuple[Any, int]]()

    def saved(*arguments: Any, **options: Any) -> None:
        beats.append((last.phase, last.number))
        write_tensors(*arguments, **options)

    one_by_one = functools.partial(gathering.gathered_weights, bucket_elements=1)
    with mock.patch.multiple(gathering, SHARD_BYTES=1, write_tensors=saved, gathered_weights=one_by_one):
        return str(run_evaluator(make_context(f"{folder}/{name}", RUNS[name], rank, num_ranks, 0, last))), beats


def on_one_rank(rank: int, num_ranks: int, folder: str) -> dict[str, Any]:
    """The rest of a run of two ranks under stage 3, under stage 1; and role evaluator on others."""
    from rlhf_core.training.distributed import init_process_group, leave_process_group
    from rlhf_core.training.evaluation.run import run_evaluator
    from rlhf_core.training.trainers.run import train_run

    rest = make_context(f"{folder}/for-one", RUNS["stage-1"], rank, num_ranks, restart=1)
    ranks = init_process_group(rest)
    results: dict[str, Any] = {"for-one": str(train_run(rest, ranks))}
    leave_process_group(ranks)
    for name in ("grpo", "warm"):
        results[name] = str(run_evaluator(make_context(f"{folder}/{name}", RUNS[name], rank, num_ranks)))
    results["ranker"], results["beats"] = beats_of_evaluator(rank, num_ranks, folder, "ranker")
    return results


@pytest.fixture(scope="module")
def one_rank(results: list[dict[str, Any]], folder: Path) -> Any:
    return of_one_rank(on_one_rank, folder)


@pytest.mark.parametrize("name", RUNS)
def test_every_loop_trains_an_adapter(results: list[dict[str, Any]], folder: Path, name: str) -> None:
    assert [result[name] for result in results] == ["done", "done"]
    lines, last = metrics_of(folder, name), SHORTER.get(name, LAST)
    assert set(lines) == {*range(1, last + 1)}
    assert all(line["train/grad_norm"] > 0 for line in lines.values())
    assert all(line["train/changed_share"] > 0 for line in lines.values()), "nothing is called frozen"
    found = {path.name for path in RunDir(folder / name).checkpoint(last).model.iterdir()}
    assert found >= {"adapter_config.json", "adapter_model.safetensors", "base_model.json"}
    assert not any(file.startswith("model") for file in found), "the base model is not saved again"


@pytest.mark.parametrize("name", RESUMED)
def test_resume_is_bitwise(results: list[dict[str, Any]], folder: Path, name: str) -> None:
    assert [result[f"{name}-again"] for result in results] == ["done", "done"]
    lines = metrics_of(folder, name)
    assert metrics_of(folder, f"{name}-again", restart=1) == {step: lines[step] for step in (LAST - 1, LAST)}
    again, straight = (final_state(folder, run, LAST) for run in (f"{name}-again", name))
    for content in (again, straight):
        content.pop("model/adapter_config.json")  # it names the base model's folder
    assert again == straight


def test_a_resume_without_the_adapter_is_caught(results: list[dict[str, Any]], folder: Path) -> None:
    """Negative control of the test above."""
    assert [result["forgetful"] for result in results] == ["done", "done"]
    assert metrics_of(folder, "forgetful", restart=1)[LAST] != metrics_of(folder, "stage-1")[LAST]


def test_an_evaluation_changes_nothing_of_a_training_with_dropout(results: list[dict[str, Any]], folder: Path) -> None:
    """It draws no random number. The control ranks with dropout: from its second step on it is another training."""
    shares = {name: metrics_of(folder, name) for name in ("evaluated", "with-dropout", "not-evaluated")}
    for line in (*shares["evaluated"].values(), *shares["with-dropout"].values()):
        assert line.pop("eval/preference") >= 0
        assert line.pop("eval/loss") > 0
    assert shares["evaluated"] == shares["not-evaluated"]
    assert shares["with-dropout"][1] == shares["not-evaluated"][1]
    assert shares["with-dropout"][2] != shares["not-evaluated"][2]


def test_every_stage_of_zero_learns_the_same(results: list[dict[str, Any]], folder: Path) -> None:
    straight = metrics_of(folder, "stage-1")
    assert straight[1]["train/loss"] == pytest.approx(0.693147, abs=1e-5), "the reference is the base model"
    assert straight[LAST]["preference/margin"] > 0
    for stage in STAGES:
        for number, line in metrics_of(folder, f"stage-{stage}").items():
            assert line["train/loss"] == pytest.approx(straight[number]["train/loss"], rel=1e-3), (stage, number)


def test_a_warm_started_adapter_is_its_own_reference(results: list[dict[str, Any]], folder: Path) -> None:
    """At its first step the policy is the reference, bit for bit; against the base model it would not be."""
    assert metrics_of(folder, "warm")[2]["preference/margin"] == 0
    assert metrics_of(folder, "warm")[SHORTER["warm"]]["preference/margin"] != 0
    assert metrics_of(folder, "grpo")[2]["policy/kl"] == pytest.approx(0, abs=1e-6)


def test_an_adapter_on_another_base_model_is_refused(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["other base"].startswith("ResumeMismatch: the adapter in ")
        assert "model.safetensors differ by their fingerprints" in result["other base"]


def test_one_rank_goes_on_with_what_two_began(one_rank: dict[str, Any], folder: Path) -> None:
    assert one_rank["for-one"] == "done"
    straight = metrics_of(folder, "stage-1")
    lines = metrics_of(folder, "for-one", restart=1)
    assert set(lines) == {LAST - 1, LAST}
    for number, line in lines.items():
        for name in ("train/loss", "train/grad_norm"):
            assert line[name] == pytest.approx(straight[number][name], rel=2e-3, abs=2e-5), (number, name)


@pytest.mark.parametrize(("name", "kind"), [("grpo", "CausalLM"), ("ranker", "SequenceClassification")])
def test_what_is_promoted_is_whole(one_rank: dict[str, Any], folder: Path, name: str, kind: str) -> None:
    """The model that was evaluated, with the adapter beside it; and nothing where they do not fit each other."""
    import peft
    import torch
    import transformers

    assert one_rank[name] == "done"
    run_dir = RunDir(folder / name)
    spec = RunSpec.model_validate(RUNS[name])
    source, target = model_source(run_dir, LAST), folder / "promoted" / name
    provenance = origin(run_dir.run_id, spec)
    write_model_directory(source, target, model_card(provenance, spec), provenance, lambda: None)
    assert damage(target) == []
    loaded = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(target)
    base = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(run_dir.initial_model, num_labels=1)
    whole = peft.PeftModel.from_pretrained(base, str(target / "adapter"))
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, whole(ids).logits, rtol=1e-4, atol=1e-5)
    shutil.copytree(run_dir.root, folder / "mixed" / name)
    mixed = RunDir(folder / "mixed" / name)
    shutil.rmtree(mixed.merged(LAST).root)
    with pytest.raises(PromotionFailed, match=r"holds an adapter, and .* does not contain the merged model"):
        model_source(mixed, LAST)


def test_a_merged_model_is_written_as_a_checkpoint_with_signs_of_life(one_rank: dict[str, Any]) -> None:
    """Its weights take minutes: the silence that an evaluation may keep would judge the evaluator hung."""
    phases, numbers = zip(*one_rank["beats"], strict=True)
    assert len(numbers) > 2
    assert set(phases) == {Phase.CHECKPOINT}
    assert all(before < after for before, after in itertools.pairwise(numbers))


def test_a_reference_of_another_step_is_evaluated_against(one_rank: dict[str, Any], folder: Path) -> None:
    assert one_rank["warm"] == "done"
    assert report(folder, "warm", "before", "preference").value == 0.5, "every pair is a tie with its own reference"
    assert report(folder, "warm", "after", "preference").value != 0.5


def test_a_checkpoint_is_small(results: list[dict[str, Any]], folder: Path) -> None:
    """An adapter, with float32 weights and two moments of its own, each on one rank; no byte of the base model."""
    root = RunDir(folder / "stage-1").checkpoint(LAST).root
    weights = (root / "model" / "adapter_model.safetensors").stat().st_size
    base = (RunDir(folder / "stage-1").initial_model / "model.safetensors").stat().st_size
    assert weights < 0.5 * base
    adapter = load_file(root / "model" / "adapter_model.safetensors")
    files = [load_file(path) for path in (root / "trainer_state").glob("*.safetensors")]
    states = [one for file in files for one in file.items() if not one[0].startswith("/random/")]
    assert all("lora_" in name for name, _ in states)
    assert sum(state.nbytes for _, state in states) == 3 * 4 * sum(weight.numel() for weight in adapter.values())
