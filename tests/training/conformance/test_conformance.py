"""Agreement of losses, gradients and advantages with those of TRL 1.16.0, recorded by make_conformance_fixtures.py."""

from pathlib import Path
from typing import Any

import pytest
from conformance_cases import CASES, CONTROLS, Case

pytestmark = pytest.mark.training

TOLERANCE = 1e-6
BY_NAME = {case.name: case for case in CASES}
PAGE = Path(__file__).parents[3] / "docs" / "conformance.md"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_value_gradient_and_advantages_are_those_of_trl(case: Case) -> None:
    from conformance_run import difference, ours, theirs

    found, recorded = ours(case), theirs(case)
    assert difference(found, recorded).largest < TOLERANCE
    assert float(recorded.gradient.abs().max()) > 1e-3, "gradients of 0 would agree trivially"
    for name, value in recorded.metrics.items() if case.algorithm == "grpo" else ():
        assert found.metrics[name] == pytest.approx(value, abs=TOLERANCE), name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_cut_into_micro_batches_changes_nothing(case: Case) -> None:
    from conformance_run import difference, ours

    assert difference(ours(case, micro_batch=1), ours(case, micro_batch=100)).largest < 1e-12


@pytest.mark.parametrize(("name", "changes"), CONTROLS)
def test_negative_control_another_setting_disagrees(name: str, changes: dict[str, Any]) -> None:
    from conformance_run import difference, ours, theirs

    assert difference(ours(BY_NAME[name], **changes), theirs(BY_NAME[name])).gradient > 1e-3


@pytest.mark.parametrize("case", [case for case in CASES if case.observed], ids=lambda case: case.name)
def test_negative_control_observations_as_sampled_tokens_disagree(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    from conformance_run import TRL, difference, ours, theirs

    monkeypatch.delitem(TRL["cases"][case.name]["given"], "sampled")
    assert difference(ours(case), theirs(case)).gradient > 1e-3


def test_the_recorded_cases_reach_what_is_hard() -> None:
    from conformance_run import TRL, theirs

    assert set(TRL["cases"]) == set(BY_NAME)
    metrics = theirs(BY_NAME["grpo, dapo, several updates"]).metrics
    assert min(metrics["clip_ratio/low_mean"], metrics["clip_ratio/high_mean"]) > 0
    given = TRL["cases"]["grpo, dapo, several updates"]["given"]
    assert given["advantages"][-4:] == [0, 0, 0, 0], "a group whose rewards are all equal"
    assert len({len(tokens) for tokens in given["completions"]}) > 3
    masked = TRL["cases"]["grpo, dapo, truncated completions masked"]["given"]
    assert 0 in masked["loss_tokens"]
    assert 0 not in given["loss_tokens"]


def test_the_page_is_up_to_date() -> None:
    from conformance_page import page

    assert PAGE.read_text(encoding="utf-8") == page(), "run `make docs`"
