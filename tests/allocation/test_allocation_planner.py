"""Planning of an attempt: a pure function that refuses unavailable resources."""

from pathlib import Path
from typing import Any

import pytest
from control_fakes import FakeScheduler, make_spec
from pydantic import ValidationError

from rlhf_core.allocation.planner import plan, shortages
from rlhf_core.errors import BadInput
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.changes import with_changes
from rlhf_core.schemas.cluster import SlurmSpec
from rlhf_core.schemas.resources import Placement
from rlhf_core.schemas.rollouts import EngineLayout, RolloutSpec


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
    ("engines", "width", "gpus", "of_trainers", "of_engines"),
    [
        (2, 1, 0, (), (1, ())),
        (8, 1, 4, (0, 1), (4, (0, 1, 2, 3))),
        (4, 2, 4, (0, 1), (2, (0, 1, 2, 3))),
    ],
    ids=["CPU", "an engine on every GPU", "engines of two GPUs"],
)
def test_the_last_nodes_have_engines_alone_and_the_first_ones_trainers_alone(
    engines: int, width: int, gpus: int, of_trainers: tuple[int, ...], of_engines: tuple[object, ...]
) -> None:
    rollout = {"engine": "vllm", "engines": engines, "nodes": 2, "vllm": {"tensor_parallel": width}}
    spec = make_spec(rollout=rollout, resources={"num_nodes": 5, "ranks_per_node": 2, "gpus_per_node": gpus})
    placement = plan(spec, FakeScheduler(nodes=tuple("abcde"), gpus_per_node=gpus).inventory(), attempt=1)
    (probe,), *phases = placement.phases
    assert (placement.num_nodes, probe.nodes) == (5, (0, 1, 2, 3, 4)), "one allocation, measured as a whole"
    for (workers, beside), role in zip(phases, (Role.TRAINER, Role.EVALUATOR), strict=True):
        assert (workers.role, workers.nodes, workers.workers_per_node) == (role, (0, 1, 2), 2)
        assert workers.gpus == of_trainers
        assert (beside.role, beside.nodes, beside.restart) == (Role.ROLLOUT, (3, 4), "alone")
        assert (beside.workers_per_node, beside.gpus) == of_engines
    assert shared_nodes(placement) == set()
    assert (spec.num_ranks, spec.engines_beside_trainers) == (6, 0)
    assert spec.processes_per_node == max(2, spec.engines_per_node * width)


def shared_nodes(placement: Placement) -> set[int]:
    """Nodes with engines and other workers, or with engines before the last other worker."""
    found: set[int] = set()
    for phase in placement.phases:
        engines = {node for group in phase if group.role is Role.ROLLOUT for node in group.nodes}
        last = max((node for group in phase if group.role is not Role.ROLLOUT for node in group.nodes), default=-1)
        found |= {node for node in engines if node <= last}
    return found


def test_engines_among_the_trainers_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the layout that is right beside trainers, from the first node on."""
    spec = make_spec(rollout={"engines": 2, "nodes": 2}, resources={"num_nodes": 5})
    inventory = FakeScheduler(nodes=tuple("abcde")).inventory()
    assert shared_nodes(plan(spec, inventory, attempt=1)) == set()
    monkeypatch.setattr(RolloutSpec, "layout", lambda self, num_nodes: EngineLayout(0, self.nodes, 1))
    assert shared_nodes(plan(spec, inventory, attempt=1)) == {0, 1}


@pytest.mark.parametrize(
    ("rollout", "num_nodes", "message"),
    [
        ({"engines": 2, "nodes": 2}, 2, r"rollout.nodes = 2 and resources.num_nodes = 2, .* resources.num_nodes = 3"),
        ({"engines": 4, "nodes": 4}, 2, "no node would train"),
        ({"nodes": 1}, 2, "rollout.nodes = 1 and rollout.engines = 0: nothing would run there"),
    ],
)
def test_nodes_of_engines_that_cannot_be_are_refused(rollout: dict[str, int], num_nodes: int, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        make_spec(rollout=rollout, resources={"num_nodes": num_nodes})
    assert make_spec(rollout={"engines": 2, "nodes": 1}, resources={"num_nodes": 2}).num_trainer_nodes == 1, "control"


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
    ("engines", "resources", "message"),
    [
        (7, {"num_nodes": 2}, "cannot be spread evenly over 2 nodes"),
        (3, {"num_nodes": 1, "ranks_per_node": 6, "gpus_per_node": 8}, "6 trainer ranks and 3 rollout engines"),
    ],
)
def test_engines_that_do_not_fit_are_refused(engines: int, resources: dict[str, int], message: str) -> None:
    inventory = FakeScheduler(nodes=("a", "b"), gpus_per_node=8).inventory()
    with pytest.raises(BadInput, match=message):
        plan(make_spec(rollout={"engines": engines}, resources=resources), inventory, attempt=1)


@pytest.mark.parametrize(
    ("engines", "message"),
    [(3, "cannot be spread evenly over 2 nodes"), (20, "^10 rollout engines need 10 GPUs of a node, found 8")],
)
def test_engines_that_do_not_fit_their_own_nodes_are_refused(engines: int, message: str) -> None:
    inventory = FakeScheduler(nodes=("a", "b", "c"), gpus_per_node=8).inventory()
    spec = make_spec(rollout={"engines": engines, "nodes": 2}, resources={"num_nodes": 3, "gpus_per_node": 8})
    with pytest.raises(BadInput, match=message):
        plan(spec, inventory, attempt=1)


def test_fewer_nodes_are_taken_only_where_the_engines_still_spread_evenly() -> None:
    """Control: the same run without engines."""
    sections: dict[str, Any] = {
        "resources": {"num_nodes": 4, "min_nodes": 1, "ranks_per_node": 1},
        "grpo": {"prompts_per_step": 12},
        "sft": {"batch_size": 12},
    }
    assert make_spec(**sections, rollout={"engines": 8}).possible_nodes == (4, 2, 1)
    assert make_spec(**sections).possible_nodes == (4, 3, 2, 1)


def test_fewer_nodes_are_taken_only_where_as_many_ranks_share_sequences() -> None:
    """Rows that are not sampled are those of two ranks. Control: ranks with rows of their own."""
    sections: dict[str, Any] = {
        "resources": {"num_nodes": 4, "min_nodes": 1, "ranks_per_node": 1},
        "grpo": {"prompts_per_step": 12},
        "sft": {"batch_size": 6},
    }
    assert make_spec(**sections, trainer={"sequence_parallel": 2}).possible_nodes == (4, 2)
    assert make_spec(**sections).possible_nodes == (4, 3, 2, 1)


@pytest.mark.parametrize(("gpus", "possible"), [(8, (4,)), (12, (4, 2)), (0, (4, 2))])
def test_fewer_nodes_are_taken_only_where_the_engines_have_gpus(gpus: int, possible: tuple[int, ...]) -> None:
    resources = {"num_nodes": 4, "min_nodes": 2, "ranks_per_node": 4, "gpus_per_node": gpus}
    spec = make_spec(rollout={"engines": 16}, resources=resources)
    assert spec.possible_nodes == possible
    inventory = FakeScheduler(nodes=tuple("abcd"), gpus_per_node=gpus).inventory()
    for number in possible:
        placement = plan(with_changes(spec, {"resources.num_nodes": number}), inventory, attempt=2)
        _, engines = placement.phases[1]
        assert spec.processes_on_each_of(placement.num_nodes) == 4 + engines.workers_per_node


def test_of_fewer_nodes_those_of_engines_stay_and_fewer_train() -> None:
    """Control: the same nodes with engines beside the trainers."""
    sections: dict[str, Any] = {
        "resources": {"num_nodes": 6, "min_nodes": 1, "ranks_per_node": 1},
        "grpo": {"prompts_per_step": 8},
        "sft": {"batch_size": 8},
    }
    spec = make_spec(**sections, rollout={"engines": 4, "nodes": 2})
    assert spec.possible_nodes == (6, 4, 3), "4, 2 or 1 of them train"
    smaller = with_changes(spec, {"resources.num_nodes": 3, "resources.min_nodes": 0})
    inventory = FakeScheduler(nodes=("a", "b", "c")).inventory()
    trainers, engines = plan(smaller, inventory, attempt=2).phases[1]
    assert (trainers.nodes, engines.nodes, engines.workers_per_node) == ((0,), (1, 2), 2)
    assert make_spec(**sections, rollout={"engines": 4}).possible_nodes == (6, 4, 2, 1)


def test_a_later_attempt_names_its_checkpoint(tmp_path: Path) -> None:
    checkpoint = RunDir(tmp_path).checkpoint(40)
    placement = plan(make_spec(), FakeScheduler().inventory(), attempt=2, resume_from=checkpoint)
    assert (placement.resume_checkpoint, placement.resumed_from_step) == ("step-000040", 40)


@pytest.mark.parametrize(
    ("resources", "inventory", "message"),
    [
        ({"num_nodes": 3}, {"nodes": ("a", "b")}, "3 nodes requested, 2 available"),
        ({"gpus_per_node": 8}, {"gpus_per_node": 4}, "8 GPUs per node requested, 4 there"),
        ({"memory_gb": 64}, {"memory_gb": 32.0}, "64 GiB of memory per node requested, 32.0 there"),
    ],
)
def test_what_is_not_there_is_refused(resources: dict[str, float], inventory: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        plan(make_spec(resources=resources), FakeScheduler(**inventory).inventory(), attempt=1)  # type: ignore[arg-type]


def test_excluded_nodes_are_not_counted() -> None:
    inventory = FakeScheduler(nodes=("a", "b")).inventory()
    spec = make_spec(resources={"num_nodes": 2})
    assert shortages(spec.resources, SlurmSpec(), inventory) == []
    lacks = shortages(spec.resources, SlurmSpec(), inventory, ["b"])
    assert lacks == ["2 nodes requested, 1 available without the excluded b"]


def test_nodes_of_other_partitions_are_not_counted() -> None:
    partitions = {"a": ("small",), "b": ("small", "gpu"), "c": ("gpu",)}
    inventory = FakeScheduler(nodes=("a", "b", "c"), node_partitions=partitions, default_partition="small").inventory()
    resources = make_spec(resources={"num_nodes": 3}).resources
    assert shortages(resources, SlurmSpec(), inventory) == ["3 nodes requested, 2 available"]
    assert shortages(resources, SlurmSpec(partition="gpu"), inventory) == ["3 nodes requested, 2 available in gpu"]
    assert shortages(resources, SlurmSpec(partition="gpu", extra=("--partition=gpu,small",)), inventory) == []
    featured = inventory.model_copy(update={"node_features": {"a": ("ib",), "b": ("ib",), "c": ()}})
    (lack,) = shortages(resources, SlurmSpec(partition="gpu", constraint="ib"), featured)
    assert lack == "3 nodes requested, 1 available in gpu, constraint ib"
    assert shortages(resources, SlurmSpec(partition="hidden"), inventory) == [], "its nodes are unknown"
    assert shortages(resources, SlurmSpec(partition="gpu,small", exclude=("a",)), inventory)
    with pytest.raises(BadInput, match="2 available in gpu"):
        plan(make_spec(resources={"num_nodes": 3}), inventory, attempt=1, slurm=SlurmSpec(partition="gpu"))


def test_nodes_with_too_few_gpus_are_not_counted() -> None:
    inventory = FakeScheduler(nodes=("a", "b"), gpus_per_node=8, node_gpus={"a": 8, "b": 4}).inventory()
    lacks = shortages(make_spec(resources={"num_nodes": 2, "gpus_per_node": 8}).resources, SlurmSpec(), inventory)
    assert lacks == ["2 nodes requested, 1 available with 8 GPUs"]


def test_cores_may_be_shared() -> None:
    resources = make_spec(resources={"ranks_per_node": 64}).resources
    assert shortages(resources, SlurmSpec(), FakeScheduler().inventory()) == []
