"""Placement of an attempt: pure, with refusal of unavailable resources."""

from pathlib import Path
from typing import Any

import pytest
from control_fakes import FakeScheduler, make_spec

from rlhf_core.allocation.planner import plan, shortages
from rlhf_core.errors import BadInput
from rlhf_core.run_dir import RunDir
from rlhf_core.schemas.resources import Role


def test_probe_first_then_trainer_then_evaluator_in_the_same_places() -> None:
    placement = plan(make_spec(), FakeScheduler().inventory(), attempt=1)
    roles = [(role.role, role.workers_per_node) for role in placement.groups]
    assert roles == [(Role.PROBE, 2), (Role.TRAINER, 2), (Role.EVALUATOR, 2)]
    without = plan(make_spec(preflight={"probe": False}), FakeScheduler().inventory(), attempt=1)
    assert [role.role for role in without.groups] == [Role.TRAINER, Role.EVALUATOR]
    assert (placement.num_nodes, placement.resume_checkpoint, placement.resumed_from_step) == (1, "", 0)


@pytest.mark.parametrize(
    ("engines", "nodes", "gpus", "expected"),
    [
        (2, 1, 0, ((0,), 2, ())),
        (2, 4, 0, ((0, 1), 1, ())),
        (8, 4, 0, ((0, 1, 2, 3), 2, ())),
        (4, 2, 4, ((0, 1), 2, (2, 3))),
    ],
)
def test_engines_lie_beside_the_trainers_and_are_restarted_alone(
    engines: int, nodes: int, gpus: int, expected: tuple[object, ...]
) -> None:
    spec = make_spec(
        rollout={"engines": engines}, resources={"num_nodes": nodes, "ranks_per_node": 2, "gpus_per_node": gpus}
    )
    inventory = FakeScheduler(nodes=tuple("abcd"[:nodes]), gpus_per_node=gpus).inventory()
    trainers, beside = plan(spec, inventory, attempt=1).phases[1]
    assert (trainers.role, trainers.restart, trainers.workers_per_node) == (Role.TRAINER, "together", 2)
    assert trainers.gpus == tuple(range(min(gpus, 2)))
    assert (beside.role, beside.restart) == (Role.ROLLOUT, "alone")
    assert (beside.nodes, beside.workers_per_node, beside.gpus) == expected
    assert spec.processes_per_node == 2 + beside.workers_per_node


def test_an_engine_that_is_split_has_a_gpu_for_each_of_its_parts() -> None:
    split = {"engines": 4, "engine": "vllm", "vllm": {"tensor_parallel": 2}}
    resources = {"num_nodes": 2, "ranks_per_node": 2, "gpus_per_node": 6}
    spec = make_spec(rollout=split, resources=resources)
    inventory = FakeScheduler(nodes=("a", "b"), gpus_per_node=6).inventory()
    trainers, engines = plan(spec, inventory, attempt=1).phases[1]
    assert (trainers.gpus, engines.workers_per_node, engines.gpus) == ((0, 1), 2, (2, 3, 4, 5))
    assert (spec.processes_per_node, spec.engines_per_node) == (6, 2)
    with pytest.raises(BadInput, match="2 trainer ranks and 2 rollout engines need 6 GPUs of a node, found 4"):
        plan(make_spec(rollout=split, resources={**resources, "gpus_per_node": 4}), inventory, attempt=1)


@pytest.mark.parametrize(
    ("rollout", "model", "roles"),
    [
        ({"engines": 2, "engine": "vllm"}, {}, [Role.EVALUATOR, Role.ROLLOUT]),
        ({"engines": 2, "engine": "sglang"}, {}, [Role.EVALUATOR, Role.ROLLOUT]),
        ({"engines": 2, "engine": "vllm"}, {"lora": {}}, [Role.EVALUATOR]),
        ({"engines": 2}, {}, [Role.EVALUATOR]),
        ({"engine": "vllm"}, {}, [Role.EVALUATOR]),
    ],
    ids=["vLLM", "SGLang", "an adapter, which is merged by then", "transformers", "vLLM in each evaluator"],
)
def test_evaluators_have_the_engines_beside_them_that_they_would_have_to_start(
    rollout: dict[str, object], model: dict[str, object], roles: list[Role]
) -> None:
    spec = make_spec(rollout=rollout, model=model, resources={"num_nodes": 2, "ranks_per_node": 1, "gpus_per_node": 2})
    inventory = FakeScheduler(nodes=("a", "b"), gpus_per_node=2).inventory()
    *_, evaluation = plan(spec, inventory, attempt=1).phases
    assert [group.role for group in evaluation] == roles
    assert [group.gpus for group in evaluation] == ([(0,), (1,)] if len(roles) > 1 else [(0, 1)])
    assert spec.evaluates_with_engines == (len(roles) > 1)


@pytest.mark.parametrize(
    ("engines", "resources", "says"),
    [
        (7, {"num_nodes": 2}, "cannot be spread evenly over 2 nodes"),
        (3, {"num_nodes": 1, "ranks_per_node": 6, "gpus_per_node": 8}, "6 trainer ranks and 3 rollout engines"),
    ],
)
def test_engines_that_do_not_fit_are_refused(engines: int, resources: dict[str, int], says: str) -> None:
    inventory = FakeScheduler(nodes=("a", "b"), gpus_per_node=8).inventory()
    with pytest.raises(BadInput, match=says):
        plan(make_spec(rollout={"engines": engines}, resources=resources), inventory, attempt=1)


def test_fewer_nodes_are_taken_only_where_the_engines_still_spread_evenly() -> None:
    """With the control, the same run without engines."""
    sections: dict[str, Any] = {
        "resources": {"num_nodes": 4, "min_nodes": 1, "ranks_per_node": 1},
        "grpo": {"prompts_per_step": 12},
        "sft": {"batch_size": 12},
    }
    assert make_spec(**sections, rollout={"engines": 8}).possible_nodes == (4, 2, 1)
    assert make_spec(**sections).possible_nodes == (4, 3, 2, 1)


def test_a_later_attempt_names_its_checkpoint(tmp_path: Path) -> None:
    checkpoint = RunDir(tmp_path).checkpoint(40)
    placement = plan(make_spec(), FakeScheduler().inventory(), attempt=2, resume_from=checkpoint)
    assert (placement.resume_checkpoint, placement.resumed_from_step) == ("step-000040", 40)


@pytest.mark.parametrize(
    ("resources", "inventory", "says"),
    [
        ({"num_nodes": 3}, {"nodes": ("a", "b")}, "3 nodes asked for, 2 there"),
        ({"gpus_per_node": 8}, {"gpus_per_node": 4}, "8 GPUs per node asked for, 4 there"),
        ({"memory_gb": 64}, {"memory_gb": 32.0}, "64 GiB of memory per node asked for, 32.0 there"),
    ],
)
def test_what_is_not_there_is_refused(resources: dict[str, float], inventory: dict[str, object], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        plan(make_spec(resources=resources), FakeScheduler(**inventory).inventory(), attempt=1)  # type: ignore[arg-type]


def test_excluded_nodes_are_not_counted() -> None:
    inventory = FakeScheduler(nodes=("a", "b")).inventory()
    spec = make_spec(resources={"num_nodes": 2})
    assert shortages(spec.resources, inventory) == []
    assert shortages(spec.resources, inventory, ["b"]) == ["2 nodes asked for, 1 there without the excluded b"]


def test_cores_may_be_shared() -> None:
    assert shortages(make_spec(resources={"ranks_per_node": 64}).resources, FakeScheduler().inventory()) == []
