"""Conditions are logged when they begin, not at every poll that finds them again."""

import pytest

from rlhf_core.condition_log import ConditionLog


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def log(lines: list[str]) -> ConditionLog:
    return ConditionLog(lines.append)


def test_a_condition_is_logged_once_whatever_is_found_later(log: ConditionLog, lines: list[str]) -> None:
    for problem in ("refused", "refused", "timed out"):
        log.log_once(f"no answer: {problem}")
    assert lines == ["no answer: refused"]


def test_a_condition_that_begins_again_is_logged_again(log: ConditionLog, lines: list[str]) -> None:
    log.end()  # it has never begun
    for _ in range(2):
        log.log_once("no answer")
        log.log_once("no answer")
        log.end()
    assert lines == ["no answer", "no answer"]


def test_every_change_is_logged_and_no_repetition(log: ConditionLog, lines: list[str]) -> None:
    for reason in ("Priority", "Priority", "Resources", "Priority"):
        log.log_change(reason)
    assert lines == ["Priority", "Resources", "Priority"]
    log.end()
    log.log_change("Priority")
    assert lines[3:] == ["Priority"]


def test_named_conditions_are_independent(log: ConditionLog, lines: list[str]) -> None:
    for run in ("toy-1", "toy-2", "toy-1"):
        log.log_once(f"{run} is damaged", run)
        log.log_change(f"{run} waits", (run, "queue"))
    log.end("toy-1")
    log.log_once("toy-2 is damaged", "toy-2")
    log.log_once("toy-1 is damaged", "toy-1")
    assert lines == ["toy-1 is damaged", "toy-1 waits", "toy-2 is damaged", "toy-2 waits", "toy-1 is damaged"]


def test_a_log_that_fails_is_not_tried_again() -> None:
    """The line of an outage must not break every later poll of it."""

    def fails(line: str) -> None:
        raise OSError(line)

    log = ConditionLog(fails)
    with pytest.raises(OSError, match="no answer"):
        log.log_once("no answer")
    log.log_once("no answer")
