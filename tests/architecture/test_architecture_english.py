"""Ratchets on the English of docstrings and names: each limit may only fall, and a package without a limit has 0.

``python tests/architecture/english.py`` prints the present counts in the form of the tables here.
"""

from collections import Counter
from collections.abc import Callable, Sized

import english
import pytest

SOURCES = {path: path.read_text() for package in english.PACKAGES for path in english.sources(package)}

RIDDLES: dict[str, int] = {}
"""Docstrings that open with an interrogative (``english.OPENING``)."""

IMPERSONAL = {"tests/security": 1}
"""Impersonal actors (``english.IMPERSONAL``) in docstrings and comments: here, the name of a user."""

PICTURES = {
    "tests/faults": 1,
}
"""Identifiers with a word of ``english.NAMES``."""

MODULES: set[str] = set()
"""Modules whose names do not tell their content."""

CLASSES = {"CheckResult", "Decision", "EvaluationSample", "Incident", "NodeSpeed"}
"""Names of classes that several modules define: tables of the history that are named as their schemas."""


def over_limit(count: Callable[[str], Sized], limits: dict[str, int]) -> dict[str, str]:
    """Packages above their limit."""
    found: Counter[str] = Counter()
    for path, text in SOURCES.items():
        found[english.group(path)] += len(count(text))
    return {
        name: f"{number}, at most {limits.get(name, 0)}"
        for name, number in found.items()
        if number > limits.get(name, 0)
    }


def test_docstrings_begin_with_a_noun_phrase_or_an_imperative() -> None:
    assert over_limit(english.riddles, RIDDLES) == {}


def test_actors_have_names() -> None:
    assert over_limit(english.impersonal, IMPERSONAL) == {}


def test_identifiers_use_the_words_of_the_field() -> None:
    assert over_limit(english.pictures, PICTURES) == {}


def test_names_of_modules_tell_what_is_in_them() -> None:
    assert english.unclear_modules(SOURCES) <= MODULES


def test_a_class_name_is_used_once() -> None:
    own = [(str(path), text) for path, text in SOURCES.items() if english.group(path).split("/")[0] != "tests"]
    assert english.classes_used_twice(own) <= CLASSES


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
    planted = english.ROOT / "rlhf_core" / "launch" / "words.py"
    assert english.unclear_modules([planted]) == {"rlhf_core/launch/words.py"}


def test_a_planted_second_class_is_found() -> None:
    texts = [("a.py", "class One: ..."), ("b.py", "class One: ..."), ("history/tables.py", "class Two: ...")]
    assert english.classes_used_twice([*texts, ("c.py", "class Two: ...")]) == {"One"}
