"""The check of launch lines of other programs."""

from dataclasses import replace

import pytest
from test_preflight_checks import healthy

from rlhf_core import config
from rlhf_core.preflight.registry import CHECKS, run_checks
from rlhf_core.presets import PRESETS
from rlhf_core.schemas.checks import CheckResult, CheckStatus

CHECK = [one for one in CHECKS if one.id == "trainer.placeholders"]
COMMANDS = [name for name in PRESETS if config.load(name).trainer.kind == "command"]
GIVEN = ("model.path=/models/m", "data.train=/data/t.jsonl")


def results(preset: str, *overrides: str) -> tuple[CheckResult, ...]:
    return run_checks(replace(healthy(), spec=config.load(preset, overrides)), CHECK)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_preset_passes_once_model_and_data_are_set(name: str) -> None:
    assert [one.status for one in results(name, *GIVEN)] == [CheckStatus.PASSED]


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "torchrun"])
def test_a_preset_alone_is_blocked_with_the_settings_to_give(name: str) -> None:
    found = results(name)
    assert [one.status for one in found] == [CheckStatus.BLOCKED] * 2
    assert found[0].found == "trainer.argv names {model}, and model.path is not set"
    assert "--set data.train=..." in found[1].advice
    assert len(results(name, GIVEN[0])) == 1


def test_a_misspelt_placeholder_is_told_and_other_braces_are_left_alone() -> None:
    line = 'trainer.argv=["run", "{modle}", "{\\"a\\": 1}", "{prompt}"]'
    (found,) = results("torchrun", line)
    assert found.status is CheckStatus.WARNING
    assert "{modle}" in found.found
    assert "{model}" in found.advice


def test_a_native_trainer_has_no_launch_line() -> None:
    assert run_checks(healthy(), CHECK) == ()
