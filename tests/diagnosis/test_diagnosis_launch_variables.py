"""Launchers' variables compared with the plan: only a contradicting node is named; unset may be right."""

import pytest

from rlhf_core.diagnosis.nodes.checks import NodeCheck, Plan, compare
from rlhf_core.schemas.checks import CheckStatus
from rlhf_core.schemas.probe import NodeFacts

NAMES = ("n1", "n2", "n3", "n4")


def troubles(name: str, values: str, ranks_per_node: int = 1, present: tuple[int, ...] = (0, 1, 2, 3)) -> list[str]:
    """Findings for these values on four nodes, ``-`` for unset: status, node and sentence."""
    facts = {
        index: NodeFacts(node=NAMES[index], index=index, variables={} if value == "-" else {name: value})
        for index, value in enumerate(values.split())
        if index in present
    }
    found = compare(facts, {}, Plan(NAMES, ranks_per_node))
    bad = [one for one in found if one.id == NodeCheck.LAUNCH and one.status is not CheckStatus.PASSED]
    assert all(one.expected and one.advice for one in bad)
    return [f"{one.status} {one.node or 'run'}: {one.found}" for one in bad]


@pytest.mark.parametrize(
    ("name", "values", "ranks_per_node"),
    [
        ("NPROC_PER_NODE", "1 - - -", 1),  # the default of some launchers
        ("PET_NPROC_PER_NODE", "- 1 1 -", 1),
        ("LOCAL_WORLD_SIZE", "1 - 1 1", 1),
        ("NPROC_PER_NODE", "8 8 8 8", 8),
        ("NNODES", "4 4 4 4", 8),
        ("PET_NNODES", "4:4 4 4:4 4", 8),
        ("WORLD_SIZE", "32 32 32 32", 8),
        ("WORLD_SIZE", "4 4 4 4", 8),  # Kubernetes
        ("NODE_RANK", "0 1 2 3", 1),
        ("NODE_RANK", "1 0 3 2", 1),  # a launcher with an order of its own
        ("NODE_RANK", "- 1 2 3", 1),  # launchers accept 0
    ],
)
def test_what_fits_the_plan_is_well(name: str, values: str, ranks_per_node: int) -> None:
    assert troubles(name, values, ranks_per_node) == []


@pytest.mark.parametrize(
    ("name", "values", "ranks_per_node", "found"),
    [
        ("NPROC_PER_NODE", "- - 7 -", 1, "blocked n3: on n3: NPROC_PER_NODE = 7"),
        ("NPROC_PER_NODE", "- - 7 -", 8, "blocked n3: on n3: NPROC_PER_NODE = 7"),
        ("NPROC_PER_NODE", "8 8 7 8", 8, "blocked n3: on n3: NPROC_PER_NODE = 7"),
        ("NPROC_PER_NODE", "8 8 - 8", 8, "blocked n3: on n3: NPROC_PER_NODE absent"),
        ("PET_NPROC_PER_NODE", "- 2 - -", 1, "blocked n2: on n2: PET_NPROC_PER_NODE = 2"),
        ("LOCAL_WORLD_SIZE", "- 2 - -", 1, "blocked n2: on n2: LOCAL_WORLD_SIZE = 2"),
        ("NNODES", "- - - 1", 8, "blocked n4: on n4: NNODES = 1"),
        ("NNODES", "4 4 4 -", 8, "blocked n4: on n4: NNODES absent"),
        ("PET_NNODES", "- - - 2:4", 8, "blocked n4: on n4: PET_NNODES = 2:4"),
        ("WORLD_SIZE", "- 31 - -", 8, "blocked n2: on n2: WORLD_SIZE = 31"),
        ("WORLD_SIZE", "32 32 - 32", 8, "blocked n3: on n3: WORLD_SIZE absent"),
        ("NODE_RANK", "- - - 0", 1, "blocked n4: on n4: NODE_RANK = 0, the place of n1"),
        ("NODE_RANK", "- - 1 -", 1, "blocked n3: on n3: NODE_RANK = 1, the place of n2"),
        ("NODE_RANK", "- - 9 -", 1, "blocked n3: on n3: NODE_RANK = 9, with 4 nodes"),
        ("NODE_RANK", "0 1 two 3", 1, "blocked n3: on n3: NODE_RANK = two, which is not a number"),
        ("NODE_RANK", "0 1 1 3", 1, "blocked n3: n2 and n3 have the same NODE_RANK = 1"),
        (
            "NODE_RANK",
            "0 1 - 3",
            1,
            "blocked n3: on n3: NODE_RANK absent; a launcher's default is 0, the number of the first node",
        ),
        # A value on most nodes belongs to no single node: excluding these nodes would not remove the mistake.
        ("NPROC_PER_NODE", "7 7 7 7", 8, "blocked run: NPROC_PER_NODE = 7 on all nodes"),
        ("NNODES", "1 1 1 1", 8, "blocked run: NNODES = 1 on all nodes"),
        ("NPROC_PER_NODE", "7 7 7 -", 8, "blocked run: NPROC_PER_NODE = 7 on 3 of 4 nodes"),
        # Right where it is set, without a deviating node: rlhf-flows does not need it.
        ("NNODES", "4 - - -", 8, "warning run: NNODES absent on n2, n3, n4, and as planned elsewhere"),
        ("NNODES", "4 4 - -", 8, "warning run: NNODES absent on n3, n4, and as planned elsewhere"),
        ("NODE_RANK", "- - 2 -", 1, "warning run: NODE_RANK absent on n2, n4, and as planned elsewhere"),
    ],
)
def test_only_what_contradicts_the_plan_is_named(name: str, values: str, ranks_per_node: int, found: str) -> None:
    assert troubles(name, values, ranks_per_node) == [found]


def test_each_node_is_named_for_its_own_value() -> None:
    assert troubles("NPROC_PER_NODE", "7 - - 6") == [
        "blocked n1: on n1: NPROC_PER_NODE = 7",
        "blocked n4: on n4: NPROC_PER_NODE = 6",
    ]


def test_a_node_that_did_not_come_makes_no_other_wrong() -> None:
    assert troubles("NODE_RANK", "0 1 2 3", present=(0, 1, 3)) == []
    assert troubles("NPROC_PER_NODE", "- - - 7", present=(0, 1, 3)) == ["blocked n4: on n4: NPROC_PER_NODE = 7"]
