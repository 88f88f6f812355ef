"""Placements: groups side by side and one after another, and those written by version 0.1."""

import json

import pytest
from pydantic import ValidationError

from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.resources import GroupPlan, Placement, in_order


def test_a_placement_of_0_1_is_read_as_groups_on_all_nodes() -> None:
    roles = [{"role": "probe", "workers_per_node": 4}, {"role": "trainer", "workers_per_node": 4}]
    written = {"attempt": 1, "num_nodes": 2, "roles": roles, "gpus_per_node": 4}
    placement = Placement.model_validate_json(json.dumps(written))
    assert placement.phases == in_order(
        GroupPlan.on_all_nodes(Role.PROBE, 4, 2, 4), GroupPlan.on_all_nodes(Role.TRAINER, 4, 2, 4)
    )
    assert Placement.model_validate_json(placement.model_dump_json()) == placement


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        ({"role": "trainer", "nodes": [1]}, "expected each role once"),
        ({"role": "rollout", "nodes": [2]}, "expected less than 2"),
        ({"role": "rollout", "nodes": [1, 0]}, "ascending"),
        ({"role": "rollout", "nodes": [1], "restart": "together"}, "found groups restarted together, together"),
        ({"role": "rollout", "nodes": [1]}, ""),
    ],
)
def test_groups_of_a_phase_are_told_apart_and_lie_in_the_allocation(second: dict[str, object], problem: str) -> None:
    """Control: an accepted placement."""
    first = {"role": "trainer", "nodes": [0, 1], "workers_per_node": 2}
    beside = {"workers_per_node": 1, "restart": "alone", **second}
    content = {"attempt": 1, "num_nodes": 2, "phases": [[first, beside]]}
    if problem:
        with pytest.raises(ValidationError, match=problem):
            Placement.model_validate(content)
    else:
        assert [group.num_workers for group in Placement.model_validate(content).groups] == [4, 1]


@pytest.mark.parametrize("phase", [[], [{"role": "rollout", "nodes": [0], "workers_per_node": 1, "restart": "alone"}]])
def test_a_phase_needs_a_group_that_the_others_serve(phase: list[dict[str, object]]) -> None:
    with pytest.raises(ValidationError, match="expected the first together"):
        Placement.model_validate({"attempt": 1, "num_nodes": 1, "phases": [phase]})
