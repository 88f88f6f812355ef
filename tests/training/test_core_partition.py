"""Micro-batches formed by length."""

import random
from itertools import chain, product
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.training.data.micro_batches import balanced, micro_batches

pytestmark = pytest.mark.training

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=40)


def fits(lengths: list[int], part: list[int], max_sequences: int, max_tokens: int) -> bool:
    padded = len(part) * max(lengths[index] for index in part)
    return len(part) <= max_sequences and (not max_tokens or padded <= max_tokens or len(part) == 1)


def padding_share(lengths: list[int], cut: list[list[int]]) -> float:
    """Share of the tokens of all micro-batches that are padding."""
    padded = sum(max(lengths[index] for index in part) * len(part) for part in cut)
    return 1 - sum(lengths) / padded


@given(LENGTHS, st.integers(1, 8), st.sampled_from([0, 10, 50, 200]))
def test_every_sequence_is_in_one_micro_batch_within_its_bounds(
    lengths: list[int], max_sequences: int, max_tokens: int
) -> None:
    cut = micro_batches(lengths, max_sequences, max_tokens)
    assert sorted(chain.from_iterable(cut)) == list(range(len(lengths)))
    assert all(fits(lengths, part, max_sequences, max_tokens) for part in cut)
    assert [lengths[index] for index in chain.from_iterable(cut)] == sorted(lengths), "similar lengths go together"


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(1, 4), st.integers(5, 25))
def test_no_division_has_fewer_micro_batches(lengths: list[int], max_sequences: int, max_tokens: int) -> None:
    """The optimum is taken over contiguous divisions of the sorted lengths, which include an optimal one."""
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    fewest = len(lengths)
    for cuts in product((False, True), repeat=len(order) - 1):
        parts = [[order[0]]]
        for index, is_cut in zip(order[1:], cuts, strict=True):
            parts = [*parts, [index]] if is_cut else [*parts[:-1], [*parts[-1], index]]
        if all(fits(lengths, part, max_sequences, max_tokens) for part in parts):
            fewest = min(fewest, len(parts))
    assert len(micro_batches(lengths, max_sequences, max_tokens)) == fewest


@given(LENGTHS, st.integers(1, 8), st.sampled_from([0, 10, 50, 200]))
def test_packed_micro_batches_keep_the_order_within_their_bounds(
    lengths: list[int], max_sequences: int, max_tokens: int
) -> None:
    cut = micro_batches(lengths, max_sequences, max_tokens, packed=True)
    assert list(chain.from_iterable(cut)) == list(range(len(lengths))), "sequences with a common prefix stay together"
    totals = [sum(lengths[index] for index in part) for part in cut]
    for part, total in zip(cut, totals, strict=True):
        assert len(part) <= max_sequences
        assert not max_tokens or total <= max_tokens or len(part) == 1
    for part, later, total in zip(cut, cut[1:], totals, strict=False):
        is_full = len(part) == max_sequences or 0 < max_tokens < total + lengths[later[0]]
        assert is_full, "none is closed before it has to be"


def test_a_budget_of_tokens_pads_less_than_a_number_of_sequences() -> None:
    lengths = [16] * 60 + [512] * 4
    by_tokens = micro_batches(lengths, 64, 2048)
    in_order = [list(range(start, start + 8)) for start in range(0, 64, 8)]
    assert padding_share(lengths, by_tokens) == 0
    assert padding_share(lengths, in_order) > 0.35, "negative control: in the given order"


@given(st.integers(1, 5).flatmap(lambda parts: st.tuples(st.just(parts), st.lists(st.integers(0, 99), max_size=8))))
def test_parts_have_as_many_items_and_no_item_is_lost(drawn: tuple[int, list[int]]) -> None:
    num_parts, seeds = drawn
    weights = [*seeds, *([0] * (-len(seeds) % num_parts))]
    parts = balanced(weights, num_parts)
    assert sorted(chain.from_iterable(parts)) == list(range(len(weights)))
    assert {len(part) for part in parts} == {len(weights) // num_parts}
    assert all(part == sorted(part) for part in parts)


def test_parts_dealt_by_weight_are_closer_than_contiguous_ones() -> None:
    draw = random.Random(0)
    spreads: dict[str, list[float]] = {"balanced": [], "contiguous": []}
    for _ in range(50):
        weights = [draw.lognormvariate(0, 1) for _ in range(64)]
        contiguous = [list(range(start, start + 8)) for start in range(0, 64, 8)]
        for name, parts in (("balanced", balanced(weights, 8)), ("contiguous", contiguous)):
            spreads[name].append(max(sum(weights[index] for index in part) for part in parts) * 8 / sum(weights))
    assert median(spreads["balanced"]) < 1.1 < 1.4 < median(spreads["contiguous"]), "negative control: given order"
