"""The English of docstrings and names, in the code and in the tests."""

from collections.abc import Callable
from typing import Any

import english
import pytest

SOURCES = {
    path.relative_to(english.ROOT).as_posix(): path.read_text()
    for package in english.PACKAGES
    for path in english.sources(package)
}


def found_by(measure: Callable[[str], list[Any]]) -> dict[str, list[Any]]:
    """Findings of a measure, by file."""
    return {path: found for path, text in SOURCES.items() if (found := measure(text))}


def test_docstrings_begin_with_a_noun_phrase_or_an_imperative() -> None:
    assert found_by(english.riddles) == {}


def test_actors_have_names() -> None:
    assert found_by(english.impersonal) == {"tests/security/site_stranger.py": ["nobody"]}, "the name of a user"


def test_identifiers_use_the_words_of_the_field() -> None:
    assert found_by(english.pictures) == {"tests/faults/fault_measure.py": ["again_s"]}, "a field of recorded results"


def test_names_of_modules_tell_what_is_in_them() -> None:
    assert english.unclear_modules(SOURCES) == set()


def test_a_class_name_is_used_once() -> None:
    own = [(path, text) for path, text in SOURCES.items() if not path.startswith("tests/")]
    assert english.classes_used_twice(own) == set()


# ---------------------------------------------------------------------------------------------------------------------
# Negative controls


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ('"""What every test shares."""', 1),
        ('def f():\n    """Whether it is done."""', 1),
        ('class A:\n    x: int\n    """How many there are."""', 1),
        ('"""Whoever asks."""', 1),
        ('"""Helpers of every test."""', 0),
        ('"""Whole files."""', 0),
        ('x = "what"', 0),
    ],
)
def test_a_planted_interrogative_is_found(text: str, number: int) -> None:
    assert len(english.riddles(text)) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ('"""The lease that nobody has."""', 1),
        ("x = 1  # somebody asks, and a person answers", 2),
        ('"""The lease without an owner."""', 0),
        ('x = "nobody"', 0),
    ],
)
def test_a_planted_impersonal_actor_is_found(text: str, number: int) -> None:
    assert len(english.impersonal(text)) == number


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("KILL_PATIENCE_S = 1.0", ["KILL_PATIENCE_S"]),
        ("AGAIN_S = 1.0", ["AGAIN_S"]),
        ("class LookOrder: ...", ["LookOrder"]),
        ("def wait(gives_way): ...", ["gives_way"]),
        ("self.untold = 1", ["untold"]),
        ("again = 1", []),
        ("def test_the_story(): ...", []),
        ("from looks import story", []),
    ],
)
def test_a_planted_picture_is_found(text: str, found: list[str]) -> None:
    assert english.pictures(text) == found


def test_a_planted_module_is_found() -> None:
    planted = "rlhf_core/launch/words.py"
    assert english.unclear_modules([planted]) == {planted}


def test_a_planted_second_class_is_found() -> None:
    table = ("rlhf_core/history/tables/rows.py", "class Two: ...")
    texts = [("a.py", "class One: ..."), ("b.py", "class One: ..."), ("c.py", "class Two: ..."), table]
    assert english.classes_used_twice(texts) == {"One"}
