"""Fixtures for the tests of programs that a worker starts and follows."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from watched_programs import Program, Start, started


@pytest.fixture
def start() -> Iterator[Start]:
    """Start small real programs; those still running are killed after the test."""
    with ExitStack() as programs:

        def begin(code: str, *arguments: object) -> Program:
            return programs.enter_context(started(code, *arguments))

        yield begin
