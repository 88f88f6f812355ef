"""Layouts of trainers and engines: those that do not divide are not listed, and the nearest that do are named."""

import pytest

from rlhf_core.allocation.layouts import Cluster, Layout, layouts, nearest

ROWS = frozenset({64})
NODE = Cluster(1, 8, ROWS, ROWS, num_heads=28, num_kv_heads=4)
"""One node of 8 GPUs, 64 prompts a step, heads of Qwen2.5-7B."""
TWO = Cluster(2, 8, frozenset({56, 112}), frozenset({56}), num_heads=40, num_kv_heads=8)
FOUR = Cluster(4, 8)


@pytest.mark.parametrize("layout", [Layout(8), Layout(4, 4), Layout(2, 2), Layout(4, 2, 2), Layout(4, 1, 4)])
def test_a_layout_that_divides_is_listed_and_has_none_in_its_place(layout: Layout) -> None:
    assert layout in set(layouts(NODE))
    assert nearest(layout, NODE) == []


@pytest.mark.parametrize(
    ("layout", "cluster"),
    [
        pytest.param(Layout(7), NODE, id="64 rows for 7 trainers"),
        pytest.param(Layout(14, 3), TWO, id="3 engines on 2 nodes"),
        pytest.param(Layout(7), TWO, id="7 trainers on 2 nodes"),
        pytest.param(Layout(2), Cluster(1, 8, ROWS, ranks_per_row=4), id="4 trainers share a sequence"),
        pytest.param(Layout(2, 1, 3), NODE, id="28 attention heads over 3 GPUs"),
        pytest.param(Layout(2, 1, 8), NODE, id="28 attention heads over 8 GPUs"),
        pytest.param(Layout(8, 8), NODE, id="16 processes on 8 GPUs"),
        pytest.param(Layout(4, 2, 4), NODE, id="4 trainers and 2 engines of 4 GPUs on 8 GPUs"),
        pytest.param(Layout(8, 8, 1, 2), TWO, id="no node that trains"),
        pytest.param(Layout(14, 7, 1, 1), TWO, id="14 trainers on a node with 8 GPUs"),
        pytest.param(Layout(4, 4, 4, 1), TWO, id="4 engines of 4 GPUs on a node with 8"),
        pytest.param(Layout(4, 2, 1, 3), FOUR, id="2 engines on 3 nodes"),
        pytest.param(Layout(3, 2, 1, 2), FOUR, id="3 trainers on 2 nodes"),
        pytest.param(Layout(2, 5), Cluster(1, 8, prompts=frozenset({6})), id="6 prompts for 5 engines"),
        pytest.param(Layout(2, 4), Cluster(1, 8, prompts=frozenset({2})), id="2 prompts for 4 engines"),
    ],
)
def test_a_layout_that_does_not_divide_is_replaced(layout: Layout, cluster: Cluster) -> None:
    assert layout not in set(layouts(cluster))
    found = nearest(layout, cluster)
    assert found
    assert set(found) <= set(layouts(cluster))


@pytest.mark.parametrize(("trainers", "engines"), [(5, 3), (7, 8), (14, 16)])
def test_trainers_and_engines_need_not_divide_one_another(trainers: int, engines: int) -> None:
    """Each trainer deals its prompts to all engines (tests/training/test_dispatch.py)."""
    prompts = frozenset({16 * trainers})
    assert Layout(trainers, engines) in set(layouts(Cluster(1, 32, prompts, prompts)))


def test_nodes_of_engines_are_laid_out_too() -> None:
    """Sixteen GPUs on two nodes: 8 trainers on one node and 8 engines on the other, or both on each node."""
    cluster = Cluster(2, 8, frozenset({56}), frozenset({56}))
    apart, together = Layout(8, 8, 1, 1), Layout(8, 8)
    assert {apart, together} <= set(layouts(cluster))
    assert str(apart) == "8 trainers + 8 engines on 1 node of their own"
    assert nearest(Layout(6, 8, 1, 1), cluster)[0] in (Layout(7, 8, 1, 1), Layout(7, 7, 1, 1))
    assert all(one.engine_nodes for one in nearest(Layout(6, 8, 1, 1), cluster)), "of the requested kind"
    assert not any(one.engine_nodes for one in nearest(Layout(6, 8), cluster))


def test_rows_that_do_not_divide_are_given_the_trainers_that_do() -> None:
    assert nearest(Layout(7), NODE)[0] == Layout(8)
    many = Cluster(64, 8, frozenset({1024}))
    assert [one.trainers for one in nearest(Layout(448), many)] == [512, 256, 128], "the same number on every node"


def test_key_value_heads_may_be_copied_but_not_cut() -> None:
    split, rows = Layout(4, 1, 4), frozenset({4})
    assert split in set(layouts(Cluster(1, 8, rows, num_heads=8, num_kv_heads=2)))
    assert split not in set(layouts(Cluster(1, 8, rows, num_heads=12, num_kv_heads=6)))


def test_every_layout_that_is_listed_has_its_gpus() -> None:
    for cluster in (NODE, TWO):
        found = list(layouts(cluster))
        assert Layout(8 if cluster is NODE else 14) in found
        assert all(one.trainers + one.engines * one.tensor_parallel <= cluster.num_gpus for one in found)
        assert len(set(found)) == len(found)


def test_without_gpus_processes_are_counted_as_they_are_asked_for() -> None:
    node = Cluster(1, 0, frozenset({32}))
    assert nearest(Layout(2, 2), node) == []
    assert nearest(Layout(3), node)[0] in (Layout(2), Layout(4))
