"""How figures are said to people."""

import pytest

from rlhf_core.words import count, duration


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.04, "0.0 s"), (8.24, "8.2 s"), (9.94, "9.9 s"), (9.96, "10 s"), (59.4, "59 s"), (59.6, "1 min 00 s"),
        (185, "3 min 05 s"), (3599.4, "59 min 59 s"), (3599.7, "1 h 00 min"), (8040, "2 h 14 min"),
        (90 * 3600, "90 h 00 min"),
    ],
)  # fmt: skip
def test_durations_are_said_as_people_say_them(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_one_thing_is_no_plural() -> None:
    assert [count(number, "run") for number in (0, 1, 2, 10_000)] == ["0 runs", "1 run", "2 runs", "10,000 runs"]
