"""Order of training rows: a pure function of the position, with the shares of a mixture exact in every epoch."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.errors import BadData
from rlhf_core.training.data.order import RowOrder, in_proportion, row_indices
from rlhf_core.training.types import Row

Mixture = dict[str, int]


def rows_of(sizes: Mixture) -> list[Row]:
    return [Row(f"{name}{n}", f"{n}", "", "", {}, source=name) for name, size in sizes.items() for n in range(size)]


def unweighted(sizes: Mixture) -> dict[str, float]:
    return dict.fromkeys(sizes, 0.0)


mixtures = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 30), min_size=2)


@given(sizes=mixtures, seed=st.integers(0, 9), cuts=st.lists(st.integers(0, 20), max_size=8), weighted=st.booleans())
def test_parts_of_any_size_are_the_same_sequence(sizes: Mixture, seed: int, cuts: list[int], weighted: bool) -> None:
    """A resume and another number of ranks ask for other parts."""
    weights = dict.fromkeys(sizes, 2.0) if weighted and max(sizes.values()) < 2 * min(sizes.values()) else {}
    rows, weights = rows_of(sizes), weights or unweighted(sizes)
    whole = RowOrder(rows, weights, seed).indices(0, sum(cuts))
    parts = [RowOrder(rows, weights, seed).indices(sum(cuts[:n]), count) for n, count in enumerate(cuts)]
    assert [index for part in parts for index in part] == whole


@given(sizes=mixtures, seed=st.integers(0, 9))
def test_without_weights_every_row_comes_once_in_an_epoch(sizes: Mixture, seed: int) -> None:
    rows = rows_of(sizes)
    order, size = RowOrder(rows, unweighted(sizes), seed), len(rows)
    first, second = order.indices(0, size), order.indices(size, size)
    assert sorted(first) == sorted(second) == list(range(size))
    assert size < 10 or first != second


def test_the_only_source_has_the_order_of_a_single_file() -> None:
    rows = [Row(f"{n}", "", "", "", {}) for n in range(7)]
    assert RowOrder(rows, {"": 0.0}, 5).indices(3, 20) == row_indices(7, 5, 3, 20)


def test_shares_are_those_of_the_weights_and_small_sources_repeat_evenly() -> None:
    sizes = {"code": 10, "math": 90}
    rows = rows_of(sizes)
    order = RowOrder(rows, {"code": 0.3, "math": 0.7}, 0)
    for epoch in range(5):
        taken = Counter(rows[index].source for index in order.indices(100 * epoch, 100))
        assert taken == {"code": 30, "math": 70}
    of_code = Counter(rows[index].uid for index in order.indices(0, 500) if rows[index].source == "code")
    assert set(of_code.values()) == {15}, "each of 10 rows, 5 x 30 draws"
    of_math = Counter(rows[index].uid for index in order.indices(0, 500) if rows[index].source == "math")
    assert set(of_math.values()) == {3, 4}, "5 x 70 draws of 90 rows: the next pass begins when one is complete"


def test_sources_are_mixed_within_a_batch() -> None:
    rows = rows_of({"a": 500, "b": 500})
    order = RowOrder(rows, {"a": 1.0, "b": 3.0}, 0)
    for step in range(10):
        share = sum(rows[index].source == "b" for index in order.indices(64 * step, 64)) / 64
        assert 0.5 < share < 0.95
    other_seed = RowOrder(rows, {"a": 1.0, "b": 3.0}, 1)
    assert order.indices(0, 64) != other_seed.indices(0, 64)


def test_the_order_of_the_rows_in_memory_does_not_matter_within_a_source() -> None:
    """Rows are found by their place in their source."""
    rows = rows_of({"a": 8, "b": 8})
    mixed = [row for pair in zip(rows[:8], rows[8:], strict=True) for row in pair]
    weights = {"a": 1.0, "b": 2.0}
    found = [[of[index].uid for index in RowOrder(of, weights, 0).indices(0, 40)] for of in (rows, mixed)]
    assert found[0] == found[1]


def test_a_source_that_is_never_taken_is_refused() -> None:
    with pytest.raises(BadData, match=r"data.sources.a.weight = 0.001, which gives it none of the 20 rows"):
        RowOrder(rows_of({"a": 10, "b": 10}), {"a": 0.001, "b": 1.0}, 0)
    with pytest.raises(BadData, match=r"no training row of data.sources.b that is neither malformed nor too long"):
        RowOrder(rows_of({"a": 10}), {"a": 1.0, "b": 1.0}, 0)


def test_every_beginning_of_the_held_out_rows_has_all_sources() -> None:
    """``evaluate.num_prompts`` takes the first ones."""
    parts = {name: rows_of({name: size}) for name, size in (("big", 90), ("small", 10))}
    rows = in_proportion(parts)
    assert Counter(row.source for row in rows[:20]) == {"big": 18, "small": 2}
    assert [row for row in rows if row.source == "big"] == parts["big"]
    assert in_proportion({"": parts["big"]}) == parts["big"]
