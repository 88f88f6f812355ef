"""`rlhf wrap` on the command line: from a launch line to a run in two commands."""

import sys
from functools import partial
from pathlib import Path

import pytest
from process_tools import Rlhf

from rlhf_core.config.loading import load
from rlhf_core.errors import BadConfig
from rlhf_core.schemas.command_trainer import CommandTrainer

LINE = ["torchrun", "--nproc_per_node", "2", "train.py", "--max_steps", "5", "--lr", "1e-6"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")  # a narrow terminal wraps the words of headers
    return tmp_path


@pytest.fixture
def wrap(rlhf: Rlhf) -> Rlhf:
    """Run ``rlhf wrap``."""
    return partial(rlhf, "wrap")


@pytest.mark.parametrize("dashes", [["--"], []])
def test_a_launch_line_becomes_a_config_that_loads(wrap: Rlhf, dashes: list[str], folder: Path) -> None:
    answer = wrap("-o", "my.toml", *dashes, *LINE)
    spec = load("my.toml")
    assert isinstance(spec.trainer, CommandTrainer)
    assert spec.trainer.num_steps == 5
    assert spec.trainer.working_dir == str(folder)
    assert spec.trainer.argv[-4:] == ("--max_steps", "{num_steps}", "--lr", "1e-6")
    printed = answer.stdout
    assert "rlhf run my.toml" in printed
    assert "resources.ranks_per_node" in printed
    assert "could not be read" in printed
    assert "GPUs on every node" in printed


def test_words_of_the_launch_line_are_never_options_of_rlhf(wrap: Rlhf) -> None:
    wrap("python", "t.py", "--name", "x", "--steps", "7", "-o", "y", "--", "--json")
    spec = load("wrapped.toml")
    assert isinstance(spec.trainer, CommandTrainer)
    assert spec.trainer.argv == ("python", "t.py", "--name", "x", "--steps", "{num_steps}", "-o", "y", "--", "--json")


def test_a_script_becomes_a_config(wrap: Rlhf, folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "go.sh").write_text('cd "$(dirname "$0")"\nNPROC_PER_NODE=${1:-8} swift sft --max_steps $2 ~/x\n')
    wrap("-o", "my.toml", "bash", "sub/go.sh", "4", "30")
    spec = load("my.toml")
    assert isinstance(spec.trainer, CommandTrainer)
    assert (spec.trainer.num_steps, spec.resources.ranks_per_node) == (30, 4)
    assert spec.trainer.working_dir == str(folder / "sub")
    assert str(Path.home() / "x") in spec.trainer.argv


def test_missing_steps_are_noted_in_the_file_and_can_be_given(folder: Path, wrap: Rlhf) -> None:
    answer = wrap("-o", "a.toml", "swift", "sft", "--num_train_epochs", "3")
    assert "the number of optimizer steps is missing" in answer.stdout
    with pytest.raises(BadConfig, match=r"trainer\.num_steps"):
        load("a.toml")
    wrap("-o", "b.toml", "--steps", "40", "swift", "sft", "--num_train_epochs", "3")
    assert load("b.toml").total_steps == 40
    # Removing the comment sign is enough.
    text = (folder / "a.toml").read_text().replace("# num_steps = ", "num_steps = 40")
    (folder / "a.toml").write_text(text)
    assert load("a.toml").total_steps == 40


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["trl.yaml"], "rlhf wrap -- trl grpo --config trl.yaml"),
        (["sub/zero.json", "--x"], "which is a config"),
        (["my train.py", "--lr", "1e-6"], "rlhf wrap -- python 'my train.py' --lr 1e-6"),
    ],
)
def test_a_file_that_cannot_be_started_is_no_launch_line(
    line: list[str], message: str, folder: Path, wrap: Rlhf
) -> None:
    (folder / "my train.py").write_text("print()")
    assert message in wrap(*line, code=2).stderr
    assert not (folder / "wrapped.toml").exists()
    (folder / "my train.py").chmod(0o755)
    wrap("my train.py", "--lr", "1e-6")


def test_an_existing_file_is_not_overwritten(wrap: Rlhf, folder: Path) -> None:
    (folder / "my.toml").write_text("mine")
    answer = wrap("-o", "my.toml", *LINE, code=2)
    assert (folder / "my.toml").read_text() == "mine"
    assert "already exists" in answer.stderr


def test_standard_output_and_json(wrap: Rlhf) -> None:
    text = wrap("-o", "-", *LINE).stdout
    found = wrap("--json", "-o", "my.toml", *LINE).json()
    assert Path("my.toml").read_text() == text
    assert found["num_steps"] == 5
    assert {"what": "optimizer steps", "found": "5", "place": "trainer.num_steps"} in found["read"]
    assert all(part["advice"] for part in found["unread"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read x.sh: No such file or directory"),
        (b"torchrun a.py\0", "cannot read x.sh: it is not a UTF-8 text file"),
        (b"\xff\xfe", "cannot read x.sh: it is not a UTF-8 text file"),
        (b"", "found no line in x.sh"),
        (b"torchrun 'a.py", "is not closed"),
        (b"#" * (2 << 20), "cannot read x.sh: found more than 1048576 bytes"),
    ],
)
def test_scripts_that_cannot_be_used(content: bytes | None, message: str, folder: Path, wrap: Rlhf) -> None:
    if content is not None:
        (folder / "x.sh").write_bytes(content)
    assert message in wrap("x.sh", code=2).stderr
    assert not (folder / "wrapped.toml").exists()


def test_a_line_in_quotes_is_not_taken_for_the_name_of_a_program(folder: Path, wrap: Rlhf) -> None:
    assert "leave out the quotes" in wrap("torchrun train.py --max_steps 5", code=2).stderr
    assert not (folder / "wrapped.toml").exists()


def test_a_line_without_a_program(wrap: Rlhf) -> None:
    assert "found no program" in wrap("torchrun", "--nnodes", "2", code=2).stderr
    wrap(code=2)


def test_an_unwritable_folder(folder: Path, wrap: Rlhf) -> None:
    (folder / "file").write_text("")
    assert "cannot write file/my.toml" in wrap("-o", "file/my.toml", *LINE, code=2).stderr


def test_the_environment_of_the_shell_is_that_of_the_program(
    wrap: Rlhf, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job does not start in this shell: otherwise it would train with the first torchrun on the nodes' PATH."""
    active = folder / "of-trl"
    (active / "bin").mkdir(parents=True)
    (active / "bin" / "torchrun").touch()
    monkeypatch.setenv("VIRTUAL_ENV", str(active))
    wrap("-o", "its.toml", *LINE)
    wrap("-o", "another.toml", "--steps", "3", "python", "train.py")
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    wrap("-o", "own.toml", *LINE)
    trainers = [load(f"{name}.toml").trainer for name in ("its", "another", "own")]
    assert [one.environment for one in trainers if isinstance(one, CommandTrainer)] == [str(active), "", ""]


def test_a_config_file_that_does_not_exist_is_reported_with_advice(folder: Path, wrap: Rlhf) -> None:
    line = ["accelerate", "launch", "--config_file", "there.yaml", "train.py", "--max_steps", "5"]
    unread = {part["what"]: part["advice"] for part in wrap("--json", "-o", "my.toml", *line).json()["unread"]}
    assert "correct the path" in unread[f"there.yaml: there is no such file in {folder}"]
    (folder / "there.yaml").write_text("num_processes: 2\n")
    assert "no such file" not in wrap("-o", "other.toml", *line).stdout


def test_a_file_of_nobody_is_missing(wrap: Rlhf) -> None:
    answer = wrap("-o", "my.toml", "--", *LINE, "--deepspeed", "~no-such-user/zero.json")
    assert "~no-such-user/zero.json: there is no such file" in answer.stdout
