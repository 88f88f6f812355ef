"""Findings about deviating nodes: the node, the key, the value of the others; none about nodes that agree."""

from typing import Any

import pytest

from rlhf_core.diagnosis.nodes.checks import NodeCheck, Plan, compare
from rlhf_core.diagnosis.nodes.differences import differences
from rlhf_core.schemas.checks import CheckResult, CheckStatus
from rlhf_core.schemas.probe import NodeFacts

NAMES = ("n1", "n2", "n3", "n4")
PLAN = Plan(NAMES, ranks_per_node=8)
BLOCKED, WARNING = CheckStatus.BLOCKED, CheckStatus.WARNING


def facts(**changed: dict[str, Any]) -> dict[int, NodeFacts]:
    """Four equal nodes, except for the given changes: node to fields."""
    same: dict[str, Any] = {
        "versions": {"torch": "2.13.0", "left-pad": "1.0"},
        "trainer_versions": {"trl": "1.16.0", "left-pad": "2.0"},
        "variables": {"NCCL_DEBUG": "WARN", "HOSTNAME": "x", "LANG": "C"},
        "content": {"config (spec.json)": "aa", "data.train": "bb"},
        "hardware": {"cores": "8", "gpus": "8", "gpu_types": "NVIDIA H100"},
    }
    found = {}
    for index, name in enumerate(NAMES):
        fields = {key: {**value, **changed.get(name, {}).get(key, {})} for key, value in same.items()}
        found[index] = NodeFacts(node=name, index=index, **fields)
    return found


def troubles(results: list[CheckResult]) -> list[tuple[str, str, str]]:
    return [(one.id, one.status.value, one.node) for one in results if one.status in (BLOCKED, WARNING)]


def test_nodes_that_have_the_same_are_well() -> None:
    """Negative control of this file; values that name the node itself also differ on healthy nodes."""
    found = compare(facts(n2={"variables": {"HOSTNAME": "y", "SLURMD_NODENAME": "n2"}}), {}, PLAN)
    assert troubles(found) == []
    assert {one.id for one in found} <= {*NodeCheck}


@pytest.mark.parametrize(
    ("changed", "check", "status", "node", "message"),
    [
        ({"n3": {"versions": {"torch": "2.12.0"}}}, "node.versions", BLOCKED, "n3", "torch = 2.12.0"),
        ({"n3": {"versions": {"vllm": "0.9"}}}, "node.versions", BLOCKED, "n3", "vllm = 0.9"),
        ({"n3": {"versions": {"left-pad": "2.0"}}}, "node.versions", WARNING, "n3", "left-pad = 2.0"),
        ({"n3": {"trainer_versions": {"trl": "1.15.0"}}}, "node.versions", BLOCKED, "n3", "trainer's trl = 1.15.0"),
        ({"n3": {"trainer_versions": {"left-pad": "1.0"}}}, "node.versions", WARNING, "n3", "trainer's left-pad = 1.0"),
        ({"n2": {"variables": {"NCCL_ALGO": "Ring"}}}, "node.variables", BLOCKED, "n2", "NCCL_ALGO = Ring"),
        ({"n2": {"variables": {"RCCL_MSCCL_ENABLE": "0"}}}, "node.variables", BLOCKED, "n2", "RCCL_MSCCL_ENABLE = 0"),
        ({"n2": {"variables": {"HSA_ENABLE_SDMA": "0"}}}, "node.variables", BLOCKED, "n2", "HSA_ENABLE_SDMA = 0"),
        ({"n2": {"variables": {"HIP_FORCE_DEV_KERNARG": "1"}}}, "node.variables", BLOCKED, "n2", "DEV_KERNARG = 1"),
        ({"n2": {"variables": {"NCCL_IB_HCA": "mlx5"}}}, "node.variables", WARNING, "n2", "NCCL_IB_HCA = mlx5"),
        ({"n2": {"variables": {"LANG": "de"}}}, "node.variables", WARNING, "n2", "LANG = de"),
        ({"n4": {"content": {"config (spec.json)": "zz"}}}, "node.content", BLOCKED, "n4", "config (spec.json) = zz"),
        ({"n4": {"content": {"data.train": "not there"}}}, "node.content", BLOCKED, "n4", "data.train = not there"),
        ({"n1": {"hardware": {"gpu_types": "NVIDIA A100"}}}, "node.hardware", BLOCKED, "n1", "NVIDIA A100"),
        ({"n1": {"hardware": {"cores": "4"}}}, "node.hardware", WARNING, "n1", "cores = 4"),
        ({"n3": {"variables": {"MASTER_PORT": "1"}}}, "node.launch", BLOCKED, "n3", "MASTER_PORT = 1"),
    ],
)
def test_the_odd_node_and_its_key_are_named(
    changed: dict[str, Any], check: str, status: CheckStatus, node: str, message: str
) -> None:
    found = compare(facts(**changed), {}, PLAN)
    assert troubles(found) == [(check, status.value, node)]
    (result,) = [one for one in found if one.id == check]
    assert message in result.found
    assert result.expected
    assert result.advice


def test_the_majority_is_what_is_expected() -> None:
    (result,) = [one for one in compare(facts(n3={"versions": {"torch": "2.12.0"}}), {}, PLAN) if one.node]
    assert result.expected == "torch = 2.13.0, as on 3 nodes"


def test_without_a_majority_all_are_shown_and_none_is_blamed() -> None:
    other = {"versions": {"torch": "2.12.0"}}
    (result,) = [one for one in compare(facts(n3=other, n4=other), {}, PLAN) if one.status is BLOCKED]
    assert result.node == ""
    assert "2.13.0 on n1, n2" in result.found
    assert "2.12.0 on n3, n4" in result.found


def test_one_finding_per_node_has_all_that_differs_there() -> None:
    found = compare(facts(n2={"versions": {f"nvidia-{number}": "1" for number in range(9)}}), {}, PLAN)
    (result,) = [one for one in found if one.status is BLOCKED]
    assert result.found.endswith("and 3 more")


def test_a_node_that_did_not_come_is_missing() -> None:
    there = facts()
    del there[2]
    assert troubles(compare(there, {}, PLAN)) == [("node.missing", "blocked", "n3")]


def test_fewer_gpus_than_planned() -> None:
    plan = Plan(NAMES, ranks_per_node=8, gpus_per_node=8)
    (result,) = [one for one in compare(facts(n2={"hardware": {"gpus": "7"}}), {}, plan) if one.node]
    assert (result.status, result.found) == (BLOCKED, "n2 has 7 working GPUs")


@pytest.mark.parametrize(
    ("ahead", "node", "message"),
    [
        ({0: 0.0, 1: 0.01, 2: -100.0, 3: 0.0}, "n3", "100.0 s ahead"),
        ({0: 0.0, 1: 0.01, 2: 100.0, 3: 0.0}, "n3", "100.0 s behind"),
        ({0: 0.0, 1: 7.0, 2: 7.1, 3: 7.0}, "n1", "7.0 s ahead"),
    ],
)
def test_a_wrong_clock_is_that_of_the_odd_node(ahead: dict[int, float], node: str, message: str) -> None:
    """This holds even if it is the first node, which is the reference for all others."""
    (result,) = [one for one in compare(facts(), ahead, PLAN) if one.status is BLOCKED]
    assert (result.id, result.node) == ("node.clock", node)
    assert message in result.found


def test_variables_that_a_site_knows_to_differ_are_left_alone() -> None:
    changed = facts(n2={"variables": {"NCCL_CROSS_NIC": "1"}})
    assert troubles(compare(changed, {}, PLAN)) == [("node.variables", "blocked", "n2")]
    assert troubles(compare(changed, {}, Plan(NAMES, 8, per_node_variables=("NCCL_CROSS*",)))) == []


def test_variables_with_the_address_or_a_folder_of_each_node_differ() -> None:
    """vLLM wants its own address on each node, and Triton a cache that is not shared."""
    own = {
        name: {"variables": {"VLLM_HOST_IP": f"10.0.0.{name}", "TRITON_CACHE_DIR": f"/tmp/{name}"}} for name in NAMES
    }
    assert troubles(compare(facts(**own), {}, PLAN)) == []


def test_a_key_that_a_node_lacks_is_absent_there() -> None:
    (found,) = differences({"a": {"x": "1"}, "b": {"x": "1"}, "c": {}})
    assert (found.key, found.usual, found.odd, found.num_usual) == ("x", "1", {"c": "absent"}, 2)
