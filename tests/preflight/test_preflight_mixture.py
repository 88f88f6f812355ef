"""Mixtures of sources: their settings, and checks that name the source."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.cli.main import execute
from rlhf_core.schemas.changes import with_changes
from rlhf_core.schemas.data import DataSpec
from rlhf_core.schemas.run import RunSpec


def mixture(**sources: dict[str, Any]) -> DataSpec:
    return DataSpec.model_validate({"sources": sources})


def test_a_source_has_the_settings_of_data_unless_it_has_its_own() -> None:
    data = DataSpec.model_validate(
        {
            "answer_column": "solution",
            "chat": True,
            "sources": {"math": {"train": "m.jsonl"}, "code": {"train": "c.jsonl", "answer_column": "test"}},
        }
    )
    found = {name: (one.answer_column, one.chat) for name, one in data.sources.items()}
    assert found == {"math": ("solution", True), "code": ("test", True)}
    assert DataSpec.model_validate_json(data.model_dump_json()) == data, "a stored spec is complete"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"sources": {"a": {}}}, "neither train nor eval in data.sources.a"),
        ({"sources": {"a": {"eval": "e.jsonl"}}}, "no train in any of data.sources"),
        ({"sources": {"a": {"train": "t"}, "b": {"eval": "e", "weight": 1}}}, "data.sources.b.weight without train"),
        ({"sources": {"a": {"train": "t", "weight": 1}, "b": {"train": "t"}}}, "no weight in data.sources.b, but in a"),
        ({"sources": {"a": {"train": "t", "weight": -1}}}, "greater than or equal to 0"),
        ({"sources": {"a": {"train": "t", "answer_column": ""}}}, "expected answers in all sources or in none"),
        ({"sources": {"A b": {"train": "t"}}}, "should match pattern"),
        ({"sources": {"a": {"train": "t"}}, "eval": "e.jsonl"}, "data.sources and data.train, data.eval or"),
        ({"sources": {"a": {"train": "t"}}, "generator": "m:f"}, "data.sources and data.train, data.eval or"),
        ({"sources": {"a": {"train": "t", "messages_column": "m", "chat": True}}}, "messages_column and data.chat"),
    ],
)
def test_a_mixture_that_means_nothing_is_refused(content: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        DataSpec.model_validate(content)


def test_an_only_source_has_no_name() -> None:
    single = DataSpec(train="t.jsonl", eval="e.jsonl")
    assert (single.of_split("train"), single.weights) == ({"": single}, {"": 0.0})
    assert single.files == {"data.train": "t.jsonl", "data.eval": "e.jsonl"}
    several = mixture(b={"train": "t.jsonl"}, a={"eval": "e.jsonl"})
    assert [*several.of_split("train"), *several.of_split("eval")] == ["b", "a"]
    assert several.files == {"data.sources.b.train": "t.jsonl", "data.sources.a.eval": "e.jsonl"}


CONFIG = """
name = "mix"
[model]
tokenizer = "char"
config = { model_type = "qwen3" }
[data]
max_prompt_tokens = 8
[data.sources.math]
train = "math.jsonl"
eval = "math_eval.jsonl"
prompt_column = "question"
weight = 2
[data.sources.code]
train = "code.jsonl"
eval = "code_eval.jsonl"
weight = 1
[loops.main]
epochs = 2
algorithm = { name = "grpo", prompts_per_step = 8, samples_per_prompt = 4 }
optimizer = { learning_rate = 1e-4 }
"""


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> dict[str, list[str]]:
    """Findings that are not passed, by check."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "math.jsonl", [{"question": f"{n}+1", "answer": f"{n + 1}"} for n in range(60)])
    held = [{"question": f"{n}-1", "answer": f"{n - 1}"} for n in range(20)]
    write(tmp_path / "math_eval.jsonl", [*held, {"question": "print 3", "answer": "3"}])
    write(tmp_path / "code.jsonl", [{"prompt": f"print {n}", "answer": f"{n}"} for n in range(20)])
    write(tmp_path / "code_eval.jsonl", [{"prompt": "5+1", "gold": "6"}])
    (tmp_path / "mix.toml").write_text(CONFIG)
    execute(["check", "mix.toml", "--json"])
    findings: dict[str, list[str]] = {}
    for one in json.loads(capsys.readouterr().out):
        if one["status"] != "passed":
            findings.setdefault(one["id"], []).append(one["found"])
    return findings


@pytest.mark.training
def test_findings_name_the_source(checked: dict[str, list[str]]) -> None:
    assert checked["data.columns"] == [
        "data.sources.code.answer_column names 'answer', which data.sources.code.eval does not have"
    ]
    assert checked["data.overlap"] == [
        "1 of 21 held-out prompts of data.sources.math.eval are also in data.sources.code.train"
    ]
    assert "content.columns" not in checked, "a column that a static check has reported is not reported again"


def test_a_mixture_belongs_to_the_native_trainer() -> None:
    trainer = {"kind": "command", "framework": "trl", "algorithm": "grpo", "num_steps": 1, "argv": ["train"]}
    with pytest.raises(ValidationError, match="which mixes its data itself"):
        RunSpec.model_validate({"name": "t", "trainer": trainer, "data": {"sources": {"a": {"train": "t.jsonl"}}}})


def test_a_weight_is_a_setting_like_others() -> None:
    model = {"config": {"model_type": "qwen3"}, "tokenizer": "char"}
    data = {"sources": {"a": {"train": "t.jsonl", "weight": 1}, "b": {"train": "u.jsonl", "weight": 2}}}
    spec = RunSpec.model_validate({"name": "t", "model": model, "data": data, "train": {"num_steps": 1}})
    assert with_changes(spec, {"data.sources.a.weight": 5}).data.weights == {"a": 5, "b": 2}
