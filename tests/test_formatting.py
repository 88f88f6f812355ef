"""Formatting of numbers, durations and names."""

from collections.abc import Collection

import pytest

from rlhf_core.text.formatting import count, duration, figure, listed, markdown_table, missing_steps, size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"), (8.24, "8.2 s"), (9.94, "9.9 s"), (9.96, "10 s"), (59.4, "59 s"), (59.6, "1 min 00 s"),
        (185, "3 min 05 s"), (3599.4, "59 min 59 s"), (3599.7, "1 h 00 min"), (8040, "2 h 14 min"),
        (90 * 3600, "90 h 00 min"),
    ],
)  # fmt: skip
def test_durations_read_naturally(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1.5 * 2**20, "1.5 MiB"), (99.9 * 2**30, "99.9 GiB"),
        (149.4 * 2**30, "149 GiB"), (1.25 * 2**40, "1.2 TiB"), (3000 * 2**40, "3000 TiB"),
    ],
)  # fmt: skip
def test_sizes_have_the_unit_that_suits_them(num_bytes: float, text: str) -> None:
    assert size(num_bytes) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0123456, "0.01235"), (123.456, "123.5"), (9999.6, "10000"), (123456.7, "123457"), (-86400.5, "-86400"),
        (2.0**40, "1099511627776"), (1e20, "1e+20"), (1e-7, "1e-07"), (0.0, "0"),
        (float("inf"), "inf"), (float("nan"), "nan"),
    ],
)  # fmt: skip
def test_large_figures_keep_their_digits(value: float, text: str) -> None:
    """Tokens per second, seconds of a day and bytes were written as powers of ten."""
    assert figure(value) == text


def test_one_takes_the_singular() -> None:
    assert [count(number, "run") for number in (0, 1, 2, 10_000)] == ["0 runs", "1 run", "2 runs", "10,000 runs"]


@pytest.mark.parametrize(
    ("known", "total", "state", "text"),
    [
        (range(1, 151), 150, "completed", ""),
        (range(1, 60), 150, "completed", "no metrics of 91 of 150 steps: 60-150"),
        ((), 3, "completed", "no metrics of 3 of 3 steps: 1-3"),
        ((1, 2, 5, 6), 7, "completed", "no metrics of 3 of 7 steps: 3-4, 7"),
        (range(2, 20, 2), 18, "completed", "no metrics of 9 of 18 steps: 1, 3, 5, 7, 9 and 4 more gaps"),
        # Steps that were never made are no gap, nor are steps still to come.
        (range(1, 60), 150, "failed", ""),
        ((1, 2, 5), 150, "cancelled", "no metrics of 2 of 5 steps: 3-4"),
        ((), 150, "failed", ""),
        ((1, 5), 150, "training", ""),
    ],
)
def test_steps_without_metrics_are_listed(known: Collection[int], total: int, state: str, text: str) -> None:
    assert missing_steps(known, total, state) == text


@pytest.mark.parametrize(("most", "text"), [(1, "a and 2 more"), (2, "a, b and 1 more"), (3, "a, b, c")])
def test_the_first_of_many_names_are_listed(most: int, text: str) -> None:
    assert listed(["a", "b", "c"], most) == text


def test_a_table_has_a_line_per_row_below_its_head() -> None:
    assert markdown_table(("", "step"), [("last", 7), ("best", "*5*")]) == [
        "|  | step |",
        "| --- | --- |",
        "| last | 7 |",
        "| best | *5* |",
    ]
    assert markdown_table(("step",), []) == ["| step |", "| --- |"]
