"""Survival of errors that cannot be named beforehand, and of no others."""

import pytest

from rlhf_core.errors import BadInput, LeaseLost
from rlhf_core.survival import Survived


def test_an_error_is_kept_and_the_block_is_left() -> None:
    done = []
    with Survived() as tried:
        done.append(1)
        raise ValueError("no such thing")
    assert done == [1]
    assert isinstance(tried.error, ValueError)
    assert (tried.problem, tried.message) == ("ValueError: no such thing",) * 2
    assert tried.trace.startswith("Traceback (most recent call last):\n")
    assert tried.trace.endswith("\nValueError: no such thing\n")


def test_a_message_that_was_written_to_be_read_alone_has_no_kind() -> None:
    with Survived() as tried:
        raise BadInput("found 3, expected 4")
    assert (tried.message, tried.problem) == ("found 3, expected 4", "BadInput: found 3, expected 4")


def test_without_an_error_there_is_no_problem() -> None:
    with Survived() as tried:
        pass
    assert (tried.error, tried.problem, tried.trace) == (None, "", "")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit(), LeaseLost("another has it")])
def test_the_end_of_the_process_and_what_is_named_go_up(error: BaseException) -> None:
    with pytest.raises(type(error)), Survived(but=(LeaseLost,)):
        raise error


def test_an_exit_is_survived_where_it_is_asked_for() -> None:
    with Survived(also=(SystemExit,)) as tried:
        raise SystemExit(3)
    assert isinstance(tried.error, SystemExit)
