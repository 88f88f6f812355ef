"""Lengths in epochs: counted by the loader of training, and stored as steps."""

import json
import math
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from site_files import options

from rlhf_core.cli.main import execute
from rlhf_core.config import loading as config
from rlhf_core.config.site import load_site
from rlhf_core.control.epochs import with_steps_of_epochs
from rlhf_core.control.new_run import new_run
from rlhf_core.errors import BadConfig
from rlhf_core.schemas.changes import with_changes
from rlhf_core.schemas.loops import LoopSpec, WarmStartSpec
from rlhf_core.schemas.run import RunSpec
from rlhf_core.training.data.order import row_indices

LOOP: dict[str, Any] = {"algorithm": {"name": "sft", "batch_size": 8}, "optimizer": {"learning_rate": 1e-3}}


@pytest.mark.parametrize(
    ("epochs", "num_rows", "batch_size", "steps"),
    [
        (1, 16, 8, 2),
        (1, 17, 8, 3),  # the rest of the data is a step as well
        (2, 17, 8, 5),  # the second epoch begins in the third step
        (0.5, 16, 8, 1),
        (0.001, 100, 8, 1),
        (0.7, 10, 7, 1),  # exactly one step: in binary, 0.7 * 10 / 7 may be more
        (1.1, 100, 11, 10),
        (3, 7473, 64, 351),
    ],
)
def test_every_row_is_taken_at_least_that_often(epochs: float, num_rows: int, batch_size: int, steps: int) -> None:
    loop = LoopSpec(**(LOOP | {"algorithm": {"name": "sft", "batch_size": batch_size}}), epochs=epochs)
    assert loop.steps_of_epochs(num_rows) == steps
    taken = Counter(row_indices(num_rows, 0, 0, steps * batch_size))
    assert sum(taken.values()) >= Fraction(str(epochs)) * num_rows
    assert all(taken[row] >= math.floor(epochs) for row in range(num_rows))


@pytest.mark.parametrize(
    ("length", "problem"),
    [
        ({"num_steps": 3, "epochs": 1}, "num_steps = 3 and epochs = 1, which both set the length"),
        ({}, "neither num_steps nor epochs"),
        ({"num_steps": 0}, "neither num_steps nor epochs"),
        ({"epochs": 0}, "neither num_steps nor epochs"),
        ({"epochs": -1}, "greater than or equal to 0"),
        ({"epochs": math.nan}, "finite number"),
    ],
)
def test_a_loop_has_one_length(length: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        LoopSpec(**LOOP, **length)


def test_only_a_warm_start_of_0_steps_is_none() -> None:
    assert WarmStartSpec(**LOOP, num_steps=0)
    with pytest.raises(ValidationError, match="neither num_steps nor epochs"):
        WarmStartSpec(**LOOP)
    spec = config.load("quickstart", ["loops.warm_start.num_steps=0", "loops.warm_start.epochs=1"])
    assert spec.loops.warm_start is not None


@pytest.fixture
def sft(tmp_path: Path) -> Path:
    """A config with 40 good rows, 3 malformed ones and 5 whose prompt is too long."""
    good = [{"prompt": f"{n}+1=", "answer": f"{n + 1}"} for n in range(40)]
    long = [{"prompt": "1" * 100, "answer": "no"}] * 5
    malformed: list[dict[str, Any]] = [{"prompt": "no answer"}] * 3
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (*malformed, *good, *long)))
    (tmp_path / "held.jsonl").write_text(json.dumps(good[0]) + "\n")
    path = tmp_path / "sft.toml"
    path.write_text(
        f"""
name = "sft"
[model]
tokenizer = "char"
config = {{ model_type = "qwen3" }}
[data]
train = "{tmp_path}/rows.jsonl"
eval = "{tmp_path}/held.jsonl"
max_prompt_tokens = 8
malformed_rows = "drop"
[loops.main]
epochs = 3
[loops.main.algorithm]
name = "sft"
batch_size = 16
[loops.main.optimizer]
learning_rate = 1e-3
schedule = "cosine"
"""
    )
    return path


def written_out(path: Path, steps: int) -> RunSpec:
    return config.load(path, ["loops.main.epochs=0", f"loops.main.num_steps={steps}"])


@pytest.mark.training
def test_a_new_run_is_the_one_with_its_steps_written_out(sft: Path, tmp_path: Path) -> None:
    """The spec is all that training depends on: equal specs are the same run, bit for bit."""
    site = load_site({"RLHF_HOME": str(tmp_path), "RLHF_RUNS": str(tmp_path / "runs")})
    stored = new_run(str(sft), [], site).read_spec().spec
    assert stored == written_out(sft, 8)  # 3 x 40 / 16 = 7.5; with the rows that are dropped, it would be 9


@pytest.mark.training
def test_check_and_plan_know_the_steps(sft: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = execute(["check", str(sft), "--json", *options("loops.main.optimizer.warmup_steps=9")])
    found = {one["id"]: one for one in json.loads(capsys.readouterr().out)}
    assert "loops.main.num_steps = 8" in found["steps.learning_rate_warmup"]["found"], code
    execute(["run", str(sft), "--dry-run", "--json"])
    assert json.loads(capsys.readouterr().out)["spec"]["loops"]["main"]["num_steps"] == 8


@pytest.mark.training
def test_rows_of_a_generator_and_both_loops_are_counted(tmp_path: Path) -> None:
    (tmp_path / "my_rows.py").write_text(
        "def make(split, seed, number):\n    return [{'prompt': f'{n}', 'answer': '1'} for n in range(number)]\n"
    )
    overrides = [f"loops.{name}.num_steps=0" for name in ("warm_start", "main")]
    overrides += ["loops.warm_start.epochs=2", "loops.main.epochs=0.5"]
    overrides += ["data.generator=my_rows:make", "data.generator_args.number=100"]
    spec = with_steps_of_epochs(config.load("quickstart", overrides), load_site(), tmp_path)
    assert [(loop.num_steps, loop.epochs) for loop in spec.loops.named.values()] == [(2, 0), (2, 0)]


@pytest.mark.training
def test_rows_that_cannot_be_counted_are_named(sft: Path, tmp_path: Path) -> None:
    spec = with_changes(config.load(sft), {"data.malformed_rows": "error"})
    with pytest.raises(BadConfig, match=r"cannot count the training rows for loops.main.epochs: .*rows.jsonl:1: "):
        with_steps_of_epochs(spec, load_site(), tmp_path)


def test_a_loop_is_not_endless(sft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_core.control.epochs.ask_worker", lambda *_, **__: {"num_rows": 1_000_000_000})
    with pytest.raises(BadConfig, match=r"found loops.main.epochs, which are 187500000\d* steps of 1000000000 rows"):
        with_steps_of_epochs(config.load(sft, ["loops.main.epochs=30"]), load_site(), tmp_path)


def test_steps_are_not_counted_again(sft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a program was started")

    monkeypatch.setattr("rlhf_core.control.epochs.ask_worker", fail)
    spec = written_out(sft, 5)
    assert with_steps_of_epochs(spec, load_site(), tmp_path) is spec
