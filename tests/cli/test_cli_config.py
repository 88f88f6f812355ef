"""``rlhf config show``: a config with its overrides and defaults, as a run would have it."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from process_tools import Rlhf

from rlhf_core.control.new_run import resolve
from rlhf_core.schemas.run import RunSpec


def shown(rlhf: Rlhf, *arguments: str) -> dict[str, Any]:
    answer = rlhf("config", "show", *arguments)
    found: dict[str, Any] = answer.json() if "--json" in arguments else tomllib.loads(answer.stdout)
    return found


@pytest.mark.parametrize("form", [[], ["--json"], ["--changed"], ["--changed", "--json"]])
@pytest.mark.parametrize("preset", ["quickstart", "trl-grpo"])
def test_what_is_shown_is_the_config_of_the_run(rlhf: Rlhf, preset: str, form: list[str]) -> None:
    content = shown(rlhf, preset, "--set", "seed=4", *form)
    assert RunSpec.model_validate(content) == resolve(preset, ["seed=4"])


def test_only_changed_settings_are_shown_on_request(rlhf: Rlhf) -> None:
    """A setting that is written down with its default has not changed."""
    overrides = ["--set", "evaluate.num_prompts=512", "--set", "rollout.temperature=0.5"]
    assert shown(rlhf, "quickstart", *overrides)["evaluate"]["num_prompts"] == 512
    changed = shown(rlhf, "quickstart", *overrides, "--changed")
    assert changed["evaluate"] == {"every_num_steps": 20}
    assert changed["rollout"] == {"max_new_tokens": 8, "temperature": 0.5}


def test_paths_are_those_that_the_nodes_read(rlhf: Rlhf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    content = shown(rlhf, "quickstart", "--set", "model.path=base", "--changed")
    assert content["model"] == {"path": str(tmp_path / "base")}, "in place of the one that the preset builds"


def test_a_wrong_setting_is_named(rlhf: Rlhf) -> None:
    assert 'did you mean "seed"?' in rlhf("config", "show", "quickstart", "--set", "sed=4", code=2).stderr
