"""Number of nodes of an attempt: all requested ones, or as many as are available and divide the batch."""

from typing import Any

import pytest
from control_fakes import FakeScheduler, make_spec
from pydantic import ValidationError

from rlhf_core.allocation.planner import shortages
from rlhf_core.allocation.sizing import Size, size_of
from rlhf_core.schemas.cluster import SlurmSpec
from rlhf_core.schemas.run import RunSpec

NODES = ("a", "b", "c", "d")


def spec_of(min_nodes: int, batch_size: int = 32) -> RunSpec:
    resources = {"num_nodes": 4, "min_nodes": min_nodes, "ranks_per_node": 2}
    return make_spec(resources=resources, sft={"batch_size": batch_size}, grpo={"prompts_per_step": batch_size})


def size(min_nodes: int, excluded: tuple[str, ...] = (), new: tuple[str, ...] = (), **scheduler: Any) -> Size:
    inventory = FakeScheduler(**{"nodes": NODES, **scheduler}).inventory()
    return size_of(spec_of(min_nodes), SlurmSpec(), inventory, dict.fromkeys(excluded, "suspect"), new)


def test_numbers_that_the_batch_does_not_divide_by_are_passed_over() -> None:
    assert spec_of(1).possible_nodes == (4, 2, 1)
    assert spec_of(2).possible_nodes == (4, 2)
    assert spec_of(0).possible_nodes == (4,), "control: without min_nodes it waits for all of them"
    with pytest.raises(ValidationError, match=r"resources.min_nodes = 5 and resources.num_nodes = 4"):
        spec_of(5)


def test_an_attempt_has_as_many_nodes_as_there_are() -> None:
    down = {"d": "down*"}
    found = size(1, out_of_service=down)
    assert found.num_nodes == 2
    assert "cannot give 4 nodes (d is down*): continuing with 2, at least resources.min_nodes = 1" in found.reason
    assert size(0, out_of_service=down).num_nodes == 4, "control: without min_nodes it waits"
    assert size(4, out_of_service=down).num_nodes == 4
    assert size(1).num_nodes == 4
    assert size(2, out_of_service=dict.fromkeys("bcd", "drained")).num_nodes == 4, "fewer than the minimum: it waits"


def test_a_new_suspect_is_left_out_and_an_old_one_taken_again() -> None:
    first = size(2, ("d",), new=("d",))
    assert (first.num_nodes, dict(first.excluded)) == (2, {"d": "suspect"})
    later = size(2, ("d",))
    assert (later.num_nodes, later.spared, later.reason) == (4, ["d"], ""), "the next attempt grows again"


def test_a_suspect_is_taken_again_where_its_partition_has_no_other_node() -> None:
    partitions = {**dict.fromkeys("abcd", ("gpu",)), "e": ("cpu",)}
    slurm = SlurmSpec(partition="gpu")
    inventory = FakeScheduler(nodes=(*NODES, "e"), node_partitions=partitions).inventory()
    found = size_of(spec_of(0), slurm, inventory, {"d": "lost"}, {"d"})
    assert (dict(found.excluded), found.spared) == ({}, ["d"]), "Slurm would refuse 4 of 3 nodes permanently"
    larger = FakeScheduler(nodes=(*NODES, "e"), node_partitions={**partitions, "e": ("gpu",)}).inventory()
    assert dict(size_of(spec_of(0), slurm, larger, {"d": "lost"}, {"d"}).excluded) == {"d": "lost"}, "control"


@pytest.mark.parametrize(
    "slurm",
    [
        SlurmSpec(constraint="h100"),
        SlurmSpec(constraint="h100&ib"),
        SlurmSpec(constraint="gb200|h100"),
        SlurmSpec(constraint="cpu", extra=("--constraint=h100,ib",)),
        SlurmSpec(reservation="ours"),
    ],
    ids=lambda slurm: f"{slurm.constraint}{slurm.reservation}",
)
def test_a_suspect_is_taken_again_where_no_other_node_is_selected(slurm: SlurmSpec) -> None:
    features = {**dict.fromkeys(NODES, ("ib", "h100")), "e": ("ib", "a100"), "f": ("(null)",)}
    place: dict[str, Any] = {"nodes": tuple(features), "node_features": features, "reservations": {"ours": "a,b,c,d"}}
    found = size_of(spec_of(0), slurm, FakeScheduler(**place).inventory(), {"d": "lost"}, {"d"})
    assert (dict(found.excluded), found.spared) == ({}, ["d"]), "Slurm would refuse 4 of 3 nodes permanently"
    place |= {"node_features": {**features, "e": ("ib", "h100")}, "reservations": {"ours": "a,b,c,d,e"}}
    found = size_of(spec_of(0), slurm, FakeScheduler(**place).inventory(), {"d": "lost"}, {"d"})
    assert dict(found.excluded) == {"d": "lost"}, "control"


@pytest.mark.parametrize(
    "slurm",
    [
        SlurmSpec(constraint="[rack1|rack2]"),
        SlurmSpec(constraint="h100*4&ib*2"),
        SlurmSpec(constraint="a&b|c"),
        SlurmSpec(reservation="not_listed"),
    ],
)
def test_nodes_selected_in_ways_that_only_slurm_knows_are_all_counted(slurm: SlurmSpec) -> None:
    inventory = FakeScheduler(nodes=NODES, node_features=dict.fromkeys(NODES, ("ib",))).inventory()
    assert inventory.nodes_for(slurm) == list(NODES)


def test_the_reason_for_fewer_nodes_names_none_of_another_partition() -> None:
    others = [f"cpu{number}" for number in range(9)]
    partitions = {**dict.fromkeys(others, ("cpu",)), **dict.fromkeys(NODES, ("gpu",))}
    down = {**dict.fromkeys(others, "drained"), "d": "down*"}
    inventory = FakeScheduler(nodes=tuple(partitions), node_partitions=partitions, out_of_service=down).inventory()
    found = size_of(spec_of(1), SlurmSpec(partition="gpu"), inventory, {"cpu0": "suspect", "c": "suspect"}, {"c"})
    assert "the cluster cannot give 4 nodes (c is excluded, d is down*): continuing with 2" in found.reason


def test_nodes_with_gpus_of_another_type_do_not_count() -> None:
    kinds = {**dict.fromkeys("abcd", "H100"), **dict.fromkeys("ef", "a100")}
    partitions = dict.fromkeys("abcdefg", ("gpu",))
    inventory = FakeScheduler(
        nodes=tuple(partitions),
        node_partitions=partitions,
        gpus_per_node=8,
        node_gpu_types=kinds,
        out_of_service={"d": "drained"},
    ).inventory()
    typed = SlurmSpec(gpu_type="h100")
    assert inventory.nodes_for(typed) == ["a", "b", "c", "d", "g"], "that of g is unknown"
    without_g = SlurmSpec(gpu_type="h100", exclude=("g",))
    assert size_of(spec_of(2), without_g, inventory, {}, set()).num_nodes == 2
    assert size_of(spec_of(2), SlurmSpec(), inventory, {}, set()).num_nodes == 4, "control"
    many = make_spec(resources={"num_nodes": 6, "gpus_per_node": 8}).resources
    assert shortages(many, typed, inventory) == ["6 nodes requested, 5 available with 8 h100 GPUs"]
    local = inventory.model_copy(update={"node_partitions": {}})
    assert len(local.nodes_for(typed)) == 7, "the local scheduler does not select, and has names of its own for types"


def test_a_suspect_is_not_spared_because_others_are_out_of_service() -> None:
    """The job waits for those nodes."""
    found = size(0, ("d",), ("d",), nodes=(*NODES, "e"), out_of_service={"a": "down*"})
    assert (dict(found.excluded), found.spared) == ({"d": "suspect"}, [])


@pytest.mark.parametrize("min_nodes", [0, 1])
def test_a_suspect_that_the_cluster_does_not_have_is_not_named(min_nodes: int) -> None:
    found = size(min_nodes, ("renamed", "e"), ("renamed",), nodes=(*NODES, "e"))
    assert dict(found.excluded) == {"e": "suspect"}, "Slurm refuses a job that names an unknown node"
