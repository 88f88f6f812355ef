"""Survival of unexpected errors, and only of those."""

import pytest

from rlhf_core.errors import BadInput, LeaseLost
from rlhf_core.survival import Survived


def test_an_error_is_kept_and_ends_the_block() -> None:
    done = []
    with Survived() as tried:
        done.append(1)
        raise ValueError("no such thing")
    assert done == [1]
    assert isinstance(tried.error, ValueError)
    assert (tried.problem, tried.message) == ("ValueError: no such thing",) * 2
    assert tried.trace.startswith("Traceback (most recent call last):\n")
    assert tried.trace.endswith("\nValueError: no such thing\n")


def test_a_self_contained_message_has_no_error_type() -> None:
    with Survived() as tried:
        raise BadInput("found 3, expected 4")
    assert (tried.message, tried.problem) == ("found 3, expected 4", "BadInput: found 3, expected 4")


def test_without_an_error_there_is_no_problem() -> None:
    with Survived() as tried:
        pass
    assert (tried.error, tried.problem, tried.trace) == (None, "", "")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit(), LeaseLost("another has it")])
def test_exits_and_named_errors_propagate(error: BaseException) -> None:
    with pytest.raises(type(error)), Survived(but=(LeaseLost,)):
        raise error


def test_an_exit_is_survived_on_request() -> None:
    with Survived(also=(SystemExit,)) as tried:
        raise SystemExit(3)
    assert isinstance(tried.error, SystemExit)
