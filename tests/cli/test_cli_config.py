"""``rlhf config show``: a config with its overrides and defaults, as a run would have it."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.cli.main import execute
from rlhf_core.control.new_run import resolve
from rlhf_core.schemas.run import RunSpec


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert execute(["config", "show", *arguments]) == 0
    text = capsys.readouterr().out
    found = json.loads(text) if "--json" in arguments else tomllib.loads(text)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("form", [[], ["--json"], ["--changed"], ["--changed", "--json"]])
@pytest.mark.parametrize("preset", ["quickstart", "trl-grpo"])
def test_what_is_shown_is_the_config_of_the_run(
    capsys: pytest.CaptureFixture[str], preset: str, form: list[str]
) -> None:
    content = shown(capsys, preset, "--set", "seed=4", *form)
    assert RunSpec.model_validate(content) == resolve(preset, ["seed=4"])


def test_only_changed_settings_are_shown_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    """A setting that is written down with its default has not changed."""
    overrides = ["--set", "evaluate.num_prompts=512", "--set", "rollout.temperature=0.5"]
    assert shown(capsys, "quickstart", *overrides)["evaluate"]["num_prompts"] == 512
    changed = shown(capsys, "quickstart", *overrides, "--changed")
    assert changed["evaluate"] == {"every_num_steps": 20}
    assert changed["rollout"] == {"max_new_tokens": 8, "temperature": 0.5}


def test_paths_are_those_that_the_nodes_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content = shown(capsys, "quickstart", "--set", "model.path=base", "--changed")
    assert content["model"] == {"path": str(tmp_path / "base")}, "in place of the one that the preset builds"


def test_a_wrong_setting_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["config", "show", "quickstart", "--set", "sed=4"]) == 2
    assert 'did you mean "seed"?' in capsys.readouterr().err
