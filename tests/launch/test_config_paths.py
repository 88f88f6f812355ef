"""Paths of a config: made absolute, and missed where they are not."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from control_fakes import make_spec

from rlhf_core.config import loading
from rlhf_core.errors import BadConfig
from rlhf_core.launch.config_paths import absolute_paths, load_spec, misplaced
from rlhf_core.schemas.command_trainer import CommandTrainer
from rlhf_core.schemas.run import RunSpec

CONFIG = """
name = "trial"
model = {path = "base", tokenizer = "words"}
data = {train = "rows/train.jsonl", eval = "rows/eval.jsonl"}
reward = {models = {good = {path = "judge"}, newest = {path = "promoted:good"}}}
code = {paths = ["helpers.py"]}
[loops.main]
num_steps = 3
reference = "teacher"
algorithm = {name = "grpo", measure_kl = true}
optimizer = {learning_rate = 1e-6}
"""
FILES = ("base", "words", "rows/train.jsonl", "rows/eval.jsonl", "judge", "teacher", "helpers.py")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "trial.toml").write_text(CONFIG)
    return folder / "trial.toml"


def make_files(folder: Path) -> None:
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def found(config: Path, folder: Path, overrides: Sequence[str] = ()) -> list[str]:
    return misplaced(loading.load(config, overrides), config, folder)


def test_files_beside_the_config_are_named_with_what_to_write(config: Path, tmp_path: Path) -> None:
    make_files(config.parent)
    problems = found(config, tmp_path)
    assert [problem.split(":")[0] for problem in problems] == [
        "model.path",
        "model.tokenizer",
        "data.train",
        "data.eval",
        "reward.models.good.path",
        "loops.main.reference",
        "code.paths",
    ]
    assert problems[2] == (
        f"data.train: found no rows/train.jsonl in {tmp_path}, where relative paths start, but "
        f'{config.parent}/rows/train.jsonl beside the config; write "configs/rows/train.jsonl", or call rlhf in '
        f"{config.parent}"
    )
    written = [f"data.{name}=configs/rows/{name}.jsonl" for name in ("train", "eval")]
    assert not [problem for problem in found(config, tmp_path, written) if problem.startswith("data.")]


def test_a_new_run_is_refused_for_them_and_a_plan_is_not(config: Path, tmp_path: Path) -> None:
    make_files(config.parent)
    with pytest.raises(BadConfig, match=rf"^{config}:\n  model\.path: found no base in {tmp_path}"):
        load_spec(config, (), tmp_path, refuse_misplaced=True)
    assert load_spec(config, (), tmp_path).data.train == str(tmp_path / "rows/train.jsonl")


def test_dots_lead_to_the_same_place_from_both_folders(config: Path, tmp_path: Path) -> None:
    """Also through a folder that does not exist, as the path is stored."""
    make_files(config.parent)
    make_files(tmp_path)
    dotted = ["data.train=none/../rows/train.jsonl"]
    assert found(config, tmp_path, dotted) == []
    assert load_spec(config, dotted, tmp_path).data.train == str(tmp_path / "rows/train.jsonl")


def test_what_is_where_its_path_leads_and_what_is_nowhere_is_loaded(config: Path, tmp_path: Path) -> None:
    """The latter is a finding of preflight, and a plan can be made without it."""
    assert found(config, tmp_path) == []
    make_files(config.parent)
    make_files(tmp_path)
    assert found(config, tmp_path) == found(config, config.parent) == []
    loaded = load_spec(config, (), config.parent)
    assert (loaded.model.path, loaded.main_loop.reference) == tuple(str(config.parent / n) for n in ("base", "teacher"))
    assert load_spec("quickstart", (), tmp_path, refuse_misplaced=True).name == "quickstart"


def test_relative_paths_start_at_the_current_folder(tmp_path: Path) -> None:
    spec = make_spec(
        model={"path": "models/a", "config": {}, "tokenizer": ""},
        data={"generator": "", "train": "data/train.jsonl", "eval": "/elsewhere/eval.jsonl"},
        code={"paths": ["../lib.py"]},
    )
    resolved = absolute_paths(spec, tmp_path / "work")
    assert resolved.model.path == str(tmp_path / "work" / "models" / "a")
    assert resolved.data.train == str(tmp_path / "work" / "data" / "train.jsonl")
    assert resolved.data.eval == "/elsewhere/eval.jsonl"
    assert resolved.code.paths == (str(tmp_path / "lib.py"),)


def test_the_home_folder_is_found_in_paths_with_placeholders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    trainer = CommandTrainer(argv=("x",), num_steps=2, working_dir="~/{run_id}", output_dir="~/out/{run_id}")
    resolved = absolute_paths(RunSpec(name="x", trainer=trainer), tmp_path).command_trainer
    assert (resolved.working_dir, resolved.output_dir) == ("/home/ada/{run_id}", "/home/ada/out/{run_id}")
    relative = trainer.model_copy(update={"working_dir": "", "output_dir": "out/{run_id}"})
    resolved = absolute_paths(RunSpec(name="x", trainer=relative), tmp_path).command_trainer
    assert (resolved.working_dir, resolved.output_dir) == (str(tmp_path), "out/{run_id}")


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe", ""])
def test_kinds_of_tokenizers_are_not_paths(tmp_path: Path, tokenizer: str) -> None:
    model = {"tokenizer": tokenizer} if tokenizer else {"path": "/m", "config": {}, "tokenizer": ""}
    assert absolute_paths(make_spec(model=model), tmp_path).model.tokenizer == tokenizer


def test_a_path_of_nobody_is_named(tmp_path: Path) -> None:
    spec = make_spec(promote={"folder": "~no-such-user/models"})
    with pytest.raises(BadConfig, match="~no-such-user/models, but there is no user"):
        absolute_paths(spec, tmp_path)
