"""Runs on a mixture of sources: the same batches on any number of ranks, exact resumes, and metrics of each source."""

import json
from pathlib import Path
from typing import Any

import pytest
from rank_launcher import TrainingGroup, launch, tiny_spec, training_group, values

from rlhf_core.files.appended import read_models
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.evaluation import EvaluationReport
from rlhf_core.schemas.reports import MetricsLine, Phase
from rlhf_core.schemas.run import RunSpec
from rlhf_core.training.types import NullReporter

pytestmark = [pytest.mark.training, pytest.mark.end_to_end]


class Interrupting(NullReporter):
    """Ends the worker at one beat."""

    def beat(self, phase: Phase, step: int) -> None:
        if (phase, step) == (Phase.TRAIN, 5):
            raise InterruptedError("the test ends this worker here")


def right_by_source(
    *, completions: list[str], answer: list[str], data_source: list[str], **columns: Any
) -> list[float]:
    """1 for every completion of one source, 0 for those of the other, so that their means are known."""
    return [float(name == "ascending") for name in data_source]


def files(folder: Path) -> None:
    for split, count in (("train", 40), ("eval", 10)):
        for name, size in (("ascending", count), ("descending", count // 5)):
            first = 100 if split == "train" else 500
            rows = [{"digits": f"{first + n}", "sorted": "".join(sorted(f"{first + n}"))} for n in range(size)]
            if name == "descending":
                rows = [{"prompt": f"{row['digits']}<", "answer": row["sorted"][::-1]} for row in rows]
            path = folder / f"{name}_{split}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def mixed(folder: str, weight: float = 3.0, **sections: Any) -> dict[str, Any]:
    """A run on two sources with columns and templates of their own."""
    ascending = {"prompt_column": "digits", "answer_column": "sorted", "prompt_template": "{digits}>", "weight": weight}
    sources: dict[str, Any] = {"ascending": ascending, "descending": {"weight": 1.0}}
    for name, one in sources.items():
        one |= {split: f"{folder}/{name}_{split}.jsonl" for split in ("train", "eval")}
    spec = tiny_spec(
        reward={"functions": ["test_mixture_runs:right_by_source"]},
        evaluate={"num_prompts": 0, "every_num_steps": 3},
        **sections,
    )
    return {**spec, "data": {"sources": sources}}


def runs_of_mixture(rank: int, num_ranks: int, folder: str) -> dict[str, Any]:
    results = {}
    with training_group(rank, num_ranks, folder, tiny_spec()) as group:
        results["straight"] = group.train("straight", mixed(folder))
        if num_ranks == 2:
            results |= _further(group, folder)
    return results


def _further(group: TrainingGroup, folder: str) -> dict[str, Any]:
    spec = mixed(folder)
    results = {"killed": group.train("killed", spec, reporter=Interrupting())}
    group.copy("killed", "changed")
    results["resumed"] = group.train("killed", spec, restart=1)
    results["changed"] = group.train("changed", mixed(folder, weight=2.0), restart=1)
    results["other"] = group.train("other", mixed(folder, weight=2.0))
    sft = {"algorithm": {"name": "sft", "batch_size": 8}, "num_steps": 2, "optimizer": {"learning_rate": 1e-3}}
    supervised = {name: value for name, value in spec.items() if name not in ("sft", "train", "grpo")}
    results["supervised"] = group.train("supervised", {**supervised, "loops": {"main": sft}})
    return results


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[int, list[dict[str, Any]]]:
    found = {}
    for num_ranks in (1, 2):
        place = folder / str(num_ranks)
        place.mkdir()
        files(place)
        found[num_ranks] = values(launch(runs_of_mixture, num_ranks, place / "scratch", folder=str(place)))
    return found


def lines_of(place: Path, name: str, restart: int = 0) -> dict[int, dict[str, float]]:
    found = read_models(RunDir(place / name).attempt(1).restart(restart).metrics, MetricsLine)
    return {line.step: line.metrics for line in found}


def test_any_number_of_ranks_takes_the_same_rows(results: dict[int, Any], folder: Path) -> None:
    """Seeds follow from the step and the identity of the row, repetitions included."""
    assert [one["straight"] for of in results.values() for one in of] == ["done"] * 3
    digests = {
        (ranks, name): [lines_of(folder / str(ranks), name)[step]["rollout/seed_digest"] for step in range(3, 7)]
        for ranks, name in ((1, "straight"), (2, "straight"), (2, "other"))
    }
    assert digests[1, "straight"] == digests[2, "straight"]
    assert digests[2, "other"] != digests[2, "straight"], "control: with other weights, other rows"


def test_a_resumed_run_takes_every_row_as_often_as_an_uninterrupted_one(results: dict[int, Any], folder: Path) -> None:
    place = folder / "2"
    assert "InterruptedError" in results[2][0]["killed"]
    assert results[2][0]["resumed"] == "done"
    straight, resumed = lines_of(place, "straight"), lines_of(place, "killed", restart=1)
    assert resumed, "from the checkpoint of step 4"
    for step, metrics in resumed.items():
        same = {name for name in metrics if not name.startswith(("time/", "speed/"))}
        assert {name: metrics[name] for name in same} == {name: straight[step][name] for name in same}


def test_a_resume_with_other_weights_is_refused(results: dict[int, Any]) -> None:
    """The position of the checkpoint would be one in another order."""
    assert "data.sources.ascending.weight was 3.0 and is 2.0" in results[2][0]["changed"]


def test_each_source_has_metrics_of_its_own(results: dict[int, Any], folder: Path) -> None:
    lines = lines_of(folder / "2", "straight")
    for step, metrics in lines.items():
        shares = {name: metrics[f"data/share/{name}"] for name in ("ascending", "descending")}
        assert sum(shares.values()) == pytest.approx(1)
        if step > 2:
            present = [name for name, share in shares.items() if share]
            rewards = {name: metrics[f"reward/mean/{name}"] for name in present}
            assert rewards == {name: float(name == "ascending") for name in present}, "functions know the source"
            assert metrics["reward/mean"] == pytest.approx(shares["ascending"])
    taken = sum(lines[step]["data/share/ascending"] * (8 if step <= 2 else 4) for step in lines)
    assert taken > 16, "of 32 rows, with 3/4 of the weight"
    assert {"train/loss/ascending", "train/loss/descending"} <= lines[1].keys()
    assert lines[6]["data/epochs"] == 32 / 48
    evaluated = lines[3]
    both = (10 * evaluated["eval/greedy/ascending"] + 2 * evaluated["eval/greedy/descending"]) / 12
    assert evaluated["eval/greedy"] == pytest.approx(both)


def test_losses_of_the_sources_make_up_that_of_the_step(results: dict[int, Any], folder: Path) -> None:
    assert results[2][0]["supervised"] == "done"
    for metrics in lines_of(folder / "2", "supervised").values():
        losses = [metrics[f"train/loss/{name}"] for name in ("ascending", "descending")]
        share = metrics["data/share/ascending"]  # every completion has four tokens
        assert metrics["train/loss"] == pytest.approx(share * losses[0] + (1 - share) * losses[1], rel=1e-6)
        assert losses[0] != losses[1]
    path = RunDir(folder / "2" / "supervised").evaluation("before", "loss")
    report = EvaluationReport.model_validate_json(path.read_text())
    assert report.by_source.keys() == {"ascending", "descending"}
    weighted = (10 * report.by_source["ascending"] + 2 * report.by_source["descending"]) / 12
    assert report.value == pytest.approx(weighted, rel=1e-6)


def test_the_order_of_the_tables_does_not_matter(folder: Path) -> None:
    """A database may store the keys of an object in another order."""
    spec = mixed(str(folder))
    turned = {**spec, "data": {"sources": dict(reversed(spec["data"]["sources"].items()))}}
    found = [list(RunSpec.model_validate(one).data.of_split("train")) for one in (spec, turned)]
    assert found[0] == found[1] == ["ascending", "descending"]
