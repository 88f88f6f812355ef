"""The shipped presets: complete, consistent, and explained."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from rlhf_core.cli.main import app
from rlhf_core.config import loading as config
from rlhf_core.presets import PRESETS

FOLDER = Path(__file__).parents[2] / "infra" / "presets"
NATIVE = [name for name in PRESETS if config.load(name).trainer.kind == "native"]


def test_every_preset_can_be_named_and_every_help_names_it() -> None:
    files = {path.stem for path in FOLDER.glob("*.toml")}
    assert set(PRESETS) == files
    assert len(files) >= 3
    root: Any = typer.main.get_command(app)
    for command in ("init", "check", "run", "deploy"):
        texts = [str(getattr(one, "help", "")) for one in root.commands[command].params]
        naming = [text for text in texts if "preset" in text]
        assert naming, command
        assert [name for name in files if not all(re.search(rf"(?<![\w-]){name}\b", text) for text in naming)] == []


@pytest.mark.parametrize("name", PRESETS)
def test_the_batches_of_a_preset_divide_among_its_ranks(name: str) -> None:
    spec = config.load(name)
    assert spec.name == name.replace(".", "-")
    for loop in spec.loops.named.values():
        assert loop.algorithm.rows_per_step % spec.num_ranks == 0


@pytest.mark.parametrize("name", NATIVE)
def test_prompts_and_completions_of_a_preset_fit_its_model(name: str) -> None:
    spec = config.load(name)
    positions = spec.model.config["max_position_embeddings"]
    assert isinstance(positions, int)
    assert spec.max_tokens <= positions


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_begins_with_what_it_is_and_how_it_is_run(name: str) -> None:
    text = (FOLDER / f"{name}.toml").read_text()
    head = text[: text.index("\nname = ")]
    assert head.startswith(f"# {name}: ")
    assert f"#   rlhf run {name}" in head
