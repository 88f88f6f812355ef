"""The list of checks, and how they are run."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rlhf_core.preflight.facts import Facts
from rlhf_core.schemas.checks import CheckResult, CheckStatus


@dataclass(frozen=True)
class Finding:
    """What one check has to say."""

    status: CheckStatus
    found: str
    expected: str = ""
    advice: str = ""


CheckFunction = Callable[[Facts], Iterator[Finding]]


@dataclass(frozen=True)
class Check:
    """A registered check. It yields a finding for each thing it looked at, and none where it does not apply."""

    id: str
    function: CheckFunction

    @property
    def prevents(self) -> str:
        """What it is for: the first line of its docstring."""
        return (self.function.__doc__ or "").strip().partition("\n")[0]


CHECKS: list[Check] = []
"""Every static check, in the order in which they are shown."""


def check(id: str) -> Callable[[CheckFunction], CheckFunction]:
    """Register a check under a stable dotted name."""

    def register(function: CheckFunction) -> CheckFunction:
        CHECKS.append(Check(id, function))
        return function

    return register


def run_checks(facts: Facts, checks: Iterable[Check] | None = None) -> tuple[CheckResult, ...]:
    """Make every check, in order, and return all findings."""
    results = []
    for each in CHECKS if checks is None else checks:
        started = time.monotonic()
        for finding in each.function(facts):
            now = time.monotonic()
            results.append(
                CheckResult(
                    id=each.id,
                    status=finding.status,
                    found=finding.found,
                    expected=finding.expected,
                    advice=finding.advice,
                    seconds=now - started,
                )
            )
            started = now
    return tuple(results)


def passed(found: str) -> Finding:
    """All is well."""
    return Finding(CheckStatus.PASSED, found)


def skipped(reason: str) -> Finding:
    """The check could not be made."""
    return Finding(CheckStatus.SKIPPED, reason)


def warning(found: str, expected: str, advice: str) -> Finding:
    """Worth reading; does not stop the run."""
    return Finding(CheckStatus.WARNING, found, expected, advice)


def blocked(found: str, expected: str, advice: str) -> Finding:
    """The run cannot work."""
    return Finding(CheckStatus.BLOCKED, found, expected, advice)
