"""The page on trainers of your own: its script, its launch line, and the settings that it adds."""

import re
from pathlib import Path

import pytest
from process_tools import run_rlhf

from rlhf_core.config.loading import load
from rlhf_core.schemas.command_trainer import PLACEHOLDERS, SIGHTS, CommandTrainer

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the script from the page."""
    (script,) = [text for text in blocks("python") if "argparse" in text]
    (tmp_path / "train.py").write_text(script)
    return tmp_path


def commands() -> list[list[str]]:
    """The two commands of the page, without the prompt."""
    return [line.removeprefix("$ rlhf ").split() for line in blocks("console")[0].splitlines()]


def with_settings_of_the_page(config: Path) -> None:
    added = blocks("toml")[0].removeprefix("[trainer]\n")
    text = config.read_text()
    assert text.count('resume = "none"\n') == 1
    config.write_text(text.replace('resume = "none"\n', added))


def test_every_placeholder_and_every_source_stands_in_the_page() -> None:
    page = PAGE.read_text()
    assert [name for name in PLACEHOLDERS if f"| `{{{name}}}` |" not in page] == []
    assert [str(source) for source, sight in SIGHTS.items() if f"| `{source}` |" not in page] == []
    assert [str(source) for source, sight in SIGHTS.items() if sight.blind not in page] == []


@pytest.mark.training
@pytest.mark.end_to_end
def test_the_two_commands_of_the_page_train_with_its_settings(folder: Path) -> None:
    wrap, run = commands()
    done = run_rlhf(folder, *wrap)
    assert done.returncode == 0, done.stdout + done.stderr
    config = folder / run[-1]
    with_settings_of_the_page(config)
    trainer = load(str(config)).trainer
    assert isinstance(trainer, CommandTrainer)
    assert (trainer.checkpoint_name, trainer.resume, trainer.num_steps) == ("step-{step}.pt", "argument", 60)
    done = run_rlhf(folder, *run, "--no-prefect", "--set", "trainer.num_steps=20", "--set", 'preflight.trial="off"')
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 of 20" in done.stdout
    (checkpoint,) = (folder / "home" / "runs").glob("train-*/checkpoints/step-000020")
    assert (checkpoint / "step-20.pt").is_file()
    assert (checkpoint / "COMPLETE").is_file()
