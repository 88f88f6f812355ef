"""Layouts of trainers and engines: those that do not divide are refused, and the nearest ones that do are named."""

import pytest

from rlhf_core.allocation.layouts import Cluster, Layout, layouts, nearest, problems

NODE = Cluster(1, 8, {"main": 64}, num_heads=28, num_kv_heads=4)
"""One node of 8 GPUs, 64 prompts a step, heads of Qwen2.5-7B."""
TWO = Cluster(2, 8, {"main": 56, "warm_start": 112}, num_heads=40, num_kv_heads=8)


@pytest.mark.parametrize("layout", [Layout(8), Layout(4, 4), Layout(2, 2), Layout(4, 2, 2), Layout(4, 1, 4)])
def test_a_layout_that_divides_is_not_refused(layout: Layout) -> None:
    assert problems(layout, NODE) == []


@pytest.mark.parametrize(
    ("layout", "cluster", "reason"),
    [
        (Layout(7), NODE, "64 rows of a step of loops.main for 7 trainers"),
        (Layout(4, 3), NODE, "4 trainers against 3 engines"),
        (Layout(14, 16), TWO, "14 trainers against 16 engines"),
        (Layout(14, 3), TWO, "3 engines on 2 nodes"),
        (Layout(7), TWO, "7 trainers on 2 nodes"),
        (Layout(2, 1, 3), NODE, "28 attention heads over 3 GPUs"),
        (Layout(2, 1, 8), NODE, "28 attention heads over 8 GPUs"),
        (Layout(8, 8), NODE, "8 trainers and 8 engines of 1 GPU on a node with 8"),
        (Layout(4, 2, 4), NODE, "4 trainers and 2 engines of 4 GPUs on a node with 8"),
        (Layout(8, 8, 1, 2), TWO, "8 trainers + 8 engines on 2 nodes of their own of 2 nodes"),
        (Layout(7, 8, 1, 1), TWO, "7 trainers against 8 engines"),
        (Layout(14, 7, 1, 1), TWO, "14 trainers on a node with 8"),
        (Layout(4, 4, 4, 1), TWO, "4 engines of 4 GPUs on a node with 8"),
        (Layout(4, 2, 1, 3), Cluster(4, 8, {}), "2 engines on 3 nodes of their own"),
        (Layout(3, 2, 1, 2), Cluster(4, 8, {}), "3 trainers on 2 nodes"),
    ],
)
def test_a_layout_that_does_not_divide_is_refused_with_the_reason(
    layout: Layout, cluster: Cluster, reason: str
) -> None:
    assert reason in "; ".join(problem.found for problem in problems(layout, cluster))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (1024, "such as 256 or 512: otherwise"),
        (64, "such as 64: otherwise"),
        (1000, "a multiple of 448 rows: no number of trainers on these nodes divides 1000"),
    ],
)
def test_a_number_of_trainers_that_these_nodes_cannot_have_is_not_advised(rows: int, expected: str) -> None:
    (refused,) = problems(Layout(448), Cluster(64, 8, {"main": rows}))
    assert expected in refused.expected


def test_seven_trainers_against_eight_engines_are_replaced_by_the_nearest_that_divide() -> None:
    """The layout of ms-swift #3186 and #3477: one node with 7 trainers, the others with 8."""
    cluster = Cluster(1, 16, {"main": 56})
    refused = problems(Layout(7, 8), cluster)
    assert [problem.found for problem in refused] == ["7 trainers against 8 engines"]
    assert "divides the other" in refused[0].expected
    found = nearest(Layout(7, 8), cluster)
    assert found[0] in (Layout(8, 8), Layout(7, 7))
    assert all(problems(one, cluster) == [] for one in found)


def test_nodes_of_engines_are_laid_out_too() -> None:
    """Sixteen GPUs on two nodes: 8 trainers on one node and 8 engines on the other, or both on each node."""
    cluster = Cluster(2, 8, {"main": 56})
    apart, together = Layout(8, 8, 1, 1), Layout(8, 8)
    assert problems(apart, cluster) == problems(together, cluster) == []
    assert {apart, together} <= set(layouts(cluster))
    assert str(apart) == "8 trainers + 8 engines on 1 node of their own"
    assert nearest(Layout(7, 8, 1, 1), cluster)[0] in (apart, Layout(7, 7, 1, 1))
    assert all(one.engine_nodes for one in nearest(Layout(7, 8, 1, 1), cluster)), "of the requested kind"
    assert not any(one.engine_nodes for one in nearest(Layout(7, 8), cluster))


def test_rows_that_do_not_divide_name_the_trainers_that_would() -> None:
    (problem,) = problems(Layout(7), NODE)
    assert "as 4 or 8" in problem.expected
    assert nearest(Layout(7), NODE)[0] == Layout(8)


def test_key_value_heads_may_be_copied_but_not_cut() -> None:
    assert problems(Layout(4, 1, 4), Cluster(1, 8, {"main": 4}, num_heads=8, num_kv_heads=2)) == []
    (problem,) = problems(Layout(4, 1, 4), Cluster(1, 8, {"main": 4}, num_heads=12, num_kv_heads=6))
    assert "6 key-value heads over 4 GPUs" in problem.found


def test_every_layout_that_is_listed_divides_and_has_its_gpus() -> None:
    for cluster in (NODE, TWO):
        found = list(layouts(cluster))
        assert Layout(8 if cluster is NODE else 14) in found
        assert all(problems(one, cluster) == [] for one in found)
        assert all(one.trainers + one.engines * one.tensor_parallel <= cluster.num_gpus for one in found)
        assert len(set(found)) == len(found)


def test_without_gpus_processes_are_counted_as_they_are_asked_for() -> None:
    node = Cluster(1, 0, {"main": 32})
    assert problems(Layout(2, 2), node) == []
    assert nearest(Layout(3), node)[0] in (Layout(2), Layout(4))
