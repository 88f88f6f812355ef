"""The campaign's own arithmetic: bounds, the plan of the runs, the criteria for right outcomes, the place in the
page."""

from dataclasses import replace
from itertools import pairwise

import fault_inject
import pytest
from campaign import LONGEST_RUN, require_learning
from fault_cases import CHAIN, CONTROLS, KINDS, SPACING, scenarios
from fault_engines import AHEAD, SETTINGS, SPLIT, engine_scenarios
from fault_engines import KINDS as OF_ENGINES
from fault_measure import Row, again_limit_s, passed_by
from fault_runs import Stuck
from fault_soon import CONTROLS as SILENT
from fault_soon import DEFAULTS, STEPS_BEFORE, soon_scenarios
from fault_soon import KINDS as SOON
from fault_table import at_most, markdown, write_between
from fault_wrapped import KINDS as OF_SCRIPTS
from fault_wrapped import wrapped_scenarios

EVERYTHING = frozenset({"slurm", "namespaces", "postgres", "prefect", "small_disk", "memory_group"})

GOOD = Row(
    scenario="sigkill-0",
    number=0,
    row="SIGKILL a rank",
    control=False,
    found=True,
    found_s=0.2,
    limit_s=None,
    decided_s=0.4,
    in_time=True,
    blame_right=True,
    class_right=True,
    kind="worker_killed",
    action="restart_in_place",
    action_right=True,
    again_s=6.0,
    cold_s=8.0,
    again_in_time=True,
    steps_lost=3,
    same_numbers=True,
    submitted_twice=0,
    state="completed",
    message="",
    scheduler="slurm",
)


@pytest.mark.parametrize(
    ("failures", "trials", "share"),
    [(0, 20, 0.1391), (0, 30, 0.0950), (1, 20, 0.2161), (5, 10, 0.7776), (3, 3, 1.0)],
)
def test_bounds_are_those_of_clopper_and_pearson(failures: int, trials: int, share: float) -> None:
    assert at_most(failures, trials) == pytest.approx(share, abs=1e-4)


def test_every_kind_is_planned_as_often_as_asked_for_and_the_plan_is_the_same_every_time() -> None:
    plan = scenarios(0, 10, 3, 30, EVERYTHING)
    assert plan == scenarios(0, 10, 3, 30, EVERYTHING)
    assert plan != scenarios(1, 10, 3, 30, EVERYTHING)
    rows = [fault.row for scenario in plan for fault in scenario.faults]
    for kind in KINDS:
        assert rows.count(kind.row) == (10 if kind.is_hang else 3)
    assert sum(rows.count(kind.row) for kind in CONTROLS) == 30
    assert len({scenario.name for scenario in plan}) == len(plan)


def test_every_fault_from_outside_is_a_function() -> None:
    kinds = (*KINDS, *CONTROLS, *OF_ENGINES, *OF_SCRIPTS, *SOON, *SILENT)
    assert [kind for kind in kinds if kind.outside and not callable(getattr(fault_inject, kind.outside, None))] == []


def test_faults_of_a_run_are_far_enough_apart_for_a_checkpoint_between_them() -> None:
    for scenario in scenarios(0, 10, 3, 30, EVERYTHING):
        steps = [fault.step for fault in scenario.faults if fault.step > 1]
        assert all(later // 5 > earlier // 5 for earlier, later in pairwise(steps)), scenario.name
        assert len(scenario.faults) <= CHAIN
        assert max(steps, default=0) <= scenario.total_steps - SPACING // 2


def test_at_default_floors_every_fault_strikes_after_twenty_steps_and_every_control_is_made_once() -> None:
    floors = {setting for setting in DEFAULTS if setting.startswith("supervise.reward_floor_s")}
    assert floors == {"supervise.reward_floor_s=180.0"}
    plan = soon_scenarios(0, 2)
    rows = [fault.row for scenario in plan for fault in scenario.faults]
    assert sorted(rows) == sorted([kind.row for kind in SOON for _ in range(2)] + [kind.row for kind in SILENT])
    assert len({scenario.name for scenario in plan}) == len(plan)
    for scenario in plan:
        assert set(DEFAULTS) <= set(scenario.overrides)
        assert min(fault.step for fault in scenario.faults) > STEPS_BEFORE
        assert max(fault.step for fault in scenario.faults) <= scenario.total_steps - SPACING // 2


def test_what_needs_a_cluster_is_left_out_where_there_is_none() -> None:
    assert not any(scenario.needs for scenario in scenarios(0, 1, 1, 8, frozenset()))


def test_the_table_counts_what_went_wrong() -> None:
    missed = replace(GOOD, found=False, class_right=False, blame_right=False, same_numbers=False, number=1)
    alarm = replace(GOOD, row="control: slow", control=True, class_right=None, blame_right=None)
    text = markdown([GOOD, missed, alarm])
    assert "| SIGKILL a rank | 1 of 2 |" in text
    assert "| missed faults | 1 of 2 |" in text
    assert "| false alarms in healthy controls | 1 of 1 |" in text
    assert "| missed faults | 0 of 1 | 95.0% |" in markdown([GOOD])


def test_only_what_is_between_the_markers_of_a_page_is_replaced() -> None:
    page = "before\n<!-- x: begin -->\nold\n<!-- x: end -->\nafter\n"
    assert write_between(page, "x", "new") == "before\n<!-- x: begin -->\nnew\n<!-- x: end -->\nafter\n"
    with pytest.raises(ValueError, match="found no"):
        write_between("nothing here", "x", "new")


def test_a_reference_that_learns_nothing_is_refused() -> None:
    require_learning({"5": "a", "10": "b"})
    with pytest.raises(Stuck, match="the same weights at two steps"):
        require_learning({"5": "a", "10": "b", "15": "b"})


def test_only_what_may_pass_a_run_by_is_right_without_being_found() -> None:
    expected = {kind.row: kind.expected for kind in KINDS}
    assert [row for row, one in expected.items() if passed_by(one, "completed")] == ["slurmstepd killed"]
    assert not passed_by(expected["slurmstepd killed"], "failed")


def test_a_new_attempt_has_longer_to_come_back() -> None:
    assert (again_limit_s(10.0, is_new=True), again_limit_s(10.0, is_new=False)) == (40.0, 20.0)


def test_scripts_are_struck_where_they_are_and_only_by_what_fits_them() -> None:
    plan = wrapped_scenarios(0, 3)
    assert plan == wrapped_scenarios(0, 3)
    rows = [fault.row for scenario in plan for fault in scenario.faults]
    assert {kind.row: rows.count(kind.row) for kind in OF_SCRIPTS} == {kind.row: 3 for kind in OF_SCRIPTS}
    for scenario in plan:
        assert scenario.is_wrapped
        assert f"trainer.num_steps={scenario.total_steps}" in scenario.settings
        assert not any(setting.startswith("train.") for setting in scenario.settings)
        assert all(fault.inside or fault.outside.endswith("_program_rank") for fault in scenario.faults)
    assert not any(scenario.is_wrapped for scenario in scenarios(0, 10, 3, 30, EVERYTHING))


def test_engines_are_struck_as_often_as_asked_for_and_compared_with_a_run_that_has_engines() -> None:
    plan = engine_scenarios(0, 5, EVERYTHING)
    assert plan == engine_scenarios(0, 5, EVERYTHING)
    rows = [fault.row for scenario in plan for fault in scenario.faults]
    assert {kind.row: rows.count(kind.row) for kind in OF_ENGINES} == {kind.row: 5 for kind in OF_ENGINES}
    assert len({scenario.name for scenario in plan}) == len(plan)
    for scenario in plan:
        assert scenario.compared in (SETTINGS, AHEAD, SPLIT)
        assert set(scenario.compared) <= set(scenario.settings)
        assert scenario.total_steps <= LONGEST_RUN, "the undisturbed run is shorter"
    local = engine_scenarios(0, 1, frozenset())
    assert not any("agent killed" in fault.row for scenario in local for fault in scenario.faults)
