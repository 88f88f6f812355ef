"""`rlhf wrap` on the command line: from a launch line to a run in two commands."""

import json
import sys
from pathlib import Path

import pytest

from rlhf_core.cli import main
from rlhf_core.config.loading import load
from rlhf_core.errors import BadConfig
from rlhf_core.schemas.command_trainer import CommandTrainer

Printed = pytest.CaptureFixture[str]
LINE = ["torchrun", "--nproc_per_node", "2", "train.py", "--max_steps", "5", "--lr", "1e-6"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")  # a narrow terminal wraps the words of headers
    return tmp_path


def rlhf(*arguments: str, expect: int = 0) -> None:
    assert main.execute(["wrap", *arguments]) == expect


@pytest.mark.parametrize("dashes", [["--"], []])
def test_a_launch_line_becomes_a_config_that_loads(dashes: list[str], folder: Path, capsys: Printed) -> None:
    rlhf("-o", "my.toml", *dashes, *LINE)
    spec = load("my.toml")
    assert isinstance(spec.trainer, CommandTrainer)
    assert spec.trainer.num_steps == 5
    assert spec.trainer.working_dir == str(folder)
    assert spec.trainer.argv[-4:] == ("--max_steps", "{num_steps}", "--lr", "1e-6")
    printed = capsys.readouterr().out
    assert "rlhf run my.toml" in printed
    assert "resources.ranks_per_node" in printed
    assert "could not be read" in printed
    assert "GPUs on every node" in printed


def test_words_of_the_launch_line_are_never_options_of_rlhf() -> None:
    rlhf("python", "t.py", "--name", "x", "--steps", "7", "-o", "y", "--", "--json")
    spec = load("wrapped.toml")
    assert isinstance(spec.trainer, CommandTrainer)
    assert spec.trainer.argv == ("python", "t.py", "--name", "x", "--steps", "{num_steps}", "-o", "y", "--", "--json")


def test_a_script_becomes_a_config(folder: Path, capsys: Printed) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "go.sh").write_text('cd "$(dirname "$0")"\nNPROC_PER_NODE=${1:-8} swift sft --max_steps $2 ~/x\n')
    rlhf("-o", "my.toml", "bash", "sub/go.sh", "4", "30")
    spec = load("my.toml")
    assert isinstance(spec.trainer, CommandTrainer)
    assert (spec.trainer.num_steps, spec.resources.ranks_per_node) == (30, 4)
    assert spec.trainer.working_dir == str(folder / "sub")
    assert str(Path.home() / "x") in spec.trainer.argv
    capsys.readouterr()


def test_missing_steps_are_noted_in_the_file_and_can_be_given(folder: Path, capsys: Printed) -> None:
    rlhf("-o", "a.toml", "swift", "sft", "--num_train_epochs", "3")
    assert "the number of optimizer steps is missing" in capsys.readouterr().out
    with pytest.raises(BadConfig, match=r"trainer\.num_steps"):
        load("a.toml")
    rlhf("-o", "b.toml", "--steps", "40", "swift", "sft", "--num_train_epochs", "3")
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
    line: list[str], message: str, folder: Path, capsys: Printed
) -> None:
    (folder / "my train.py").write_text("print()")
    rlhf(*line, expect=2)
    assert message in capsys.readouterr().err
    assert not (folder / "wrapped.toml").exists()
    (folder / "my train.py").chmod(0o755)
    rlhf("my train.py", "--lr", "1e-6")


def test_an_existing_file_is_not_overwritten(folder: Path, capsys: Printed) -> None:
    (folder / "my.toml").write_text("mine")
    rlhf("-o", "my.toml", *LINE, expect=2)
    assert (folder / "my.toml").read_text() == "mine"
    assert "already exists" in capsys.readouterr().err


def test_standard_output_and_json(capsys: Printed) -> None:
    rlhf("-o", "-", *LINE)
    text = capsys.readouterr().out
    rlhf("--json", "-o", "my.toml", *LINE)
    found = json.loads(capsys.readouterr().out)
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
def test_scripts_that_cannot_be_used(content: bytes | None, message: str, folder: Path, capsys: Printed) -> None:
    if content is not None:
        (folder / "x.sh").write_bytes(content)
    rlhf("x.sh", expect=2)
    assert message in capsys.readouterr().err
    assert not (folder / "wrapped.toml").exists()


def test_a_line_in_quotes_is_not_taken_for_the_name_of_a_program(folder: Path, capsys: Printed) -> None:
    rlhf("torchrun train.py --max_steps 5", expect=2)
    assert "leave out the quotes" in capsys.readouterr().err
    assert not (folder / "wrapped.toml").exists()


def test_a_line_without_a_program(capsys: Printed) -> None:
    rlhf("torchrun", "--nnodes", "2", expect=2)
    assert "found no program" in capsys.readouterr().err
    rlhf(expect=2)


def test_an_unwritable_folder(folder: Path, capsys: Printed) -> None:
    (folder / "file").write_text("")
    rlhf("-o", "file/my.toml", *LINE, expect=2)
    assert "cannot write file/my.toml" in capsys.readouterr().err


def test_the_environment_of_the_shell_is_that_of_the_program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job does not start in this shell: otherwise it would train with the first torchrun on the nodes' PATH."""
    active = folder / "of-trl"
    (active / "bin").mkdir(parents=True)
    (active / "bin" / "torchrun").touch()
    monkeypatch.setenv("VIRTUAL_ENV", str(active))
    rlhf("-o", "its.toml", *LINE)
    rlhf("-o", "another.toml", "--steps", "3", "python", "train.py")
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    rlhf("-o", "own.toml", *LINE)
    trainers = [load(f"{name}.toml").trainer for name in ("its", "another", "own")]
    assert [one.environment for one in trainers if isinstance(one, CommandTrainer)] == [str(active), "", ""]


def test_a_config_file_that_does_not_exist_is_reported_with_advice(folder: Path, capsys: Printed) -> None:
    line = ["accelerate", "launch", "--config_file", "there.yaml", "train.py", "--max_steps", "5"]
    rlhf("--json", "-o", "my.toml", *line)
    unread = {part["what"]: part["advice"] for part in json.loads(capsys.readouterr().out)["unread"]}
    assert "correct the path" in unread[f"there.yaml: there is no such file in {folder}"]
    (folder / "there.yaml").write_text("num_processes: 2\n")
    rlhf("-o", "other.toml", *line)
    assert "no such file" not in capsys.readouterr().out


def test_a_file_of_nobody_is_missing(capsys: Printed) -> None:
    rlhf("-o", "my.toml", "--", *LINE, "--deepspeed", "~no-such-user/zero.json")
    assert "~no-such-user/zero.json: there is no such file" in capsys.readouterr().out
