"""Registry of the static checks, and their execution."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rlhf_core.preflight.facts import Facts
from rlhf_core.schemas.checks import CheckResult, CheckStatus
from rlhf_core.survival import Survived

PLUGINS = "rlhf_flows.checks"
"""Entry point group of a site's own checks."""
OFF = "preflight.off"
"""Check of the disabled checks; it cannot be disabled itself."""


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    status: CheckStatus
    found: str
    expected: str = ""
    advice: str = ""


CheckFunction = Callable[[Facts], Iterator[Finding]]


@dataclass(frozen=True)
class Check:
    """A registered check. It yields a finding for each examined object, and none if it does not apply."""

    id: str
    function: CheckFunction
    trainer: Literal["", "native", "command"] = ""
    """Kind of trainer that it applies to; empty for every kind."""

    def concerns(self, facts: Facts) -> bool:
        """Return True if the check applies to the run's kind of trainer."""
        return self.trainer in ("", facts.spec.trainer.kind)

    @property
    def prevents(self) -> str:
        """Problem that the check prevents: the first line of its docstring."""
        return (self.function.__doc__ or "").strip().partition("\n")[0]


CHECKS: list[Check] = []
"""Every static check, in the order in which they are shown."""


def check(id: str, *, trainer: Literal["", "native", "command"] = "") -> Callable[[CheckFunction], CheckFunction]:
    """Register a check under a stable dotted name.

    Args:
        trainer: kind of trainer that it applies to; it does not run for others. Empty for every kind.
    """

    def register(function: CheckFunction) -> CheckFunction:
        CHECKS.append(Check(id, function, trainer))
        return function

    return register


def run_checks(facts: Facts, prefix: str | tuple[str, ...] = "") -> tuple[CheckResult, ...]:
    """Run every check in order, then those of plug-ins, and return all findings.

    A check in ``preflight.off`` does not run; its only finding is the reason given there.

    Args:
        prefix: of the ids of the checks to run, or several.
    """
    off = facts.spec.preflight.off
    results = []
    for each in _all_checks(facts):
        if not each.concerns(facts) or not each.id.startswith(prefix):
            continue
        function = _turned_off(off[each.id]) if each.id in off and each.id != OFF else each.function
        started = time.monotonic()
        for finding in function(facts):
            now = time.monotonic()
            results.append(CheckResult(id=each.id, seconds=now - started, **asdict(finding)))
            started = now
    return tuple(results)


def _turned_off(reason: str) -> CheckFunction:
    return lambda facts: iter([skipped(f"turned off: {reason.strip() or 'no reason given'}")])


def _all_checks(facts: Facts) -> Iterator[Check]:
    yield from CHECKS
    taken = {one.id for one in CHECKS}
    for plugin in facts.plugins:
        problem = "there is a check with this id already" if plugin.id in taken else plugin.problem
        taken.add(plugin.id)
        function = None if problem else plugin.function
        yield Check(plugin.id, _guarded(plugin.id, function) if function else _unusable(plugin.id, problem))


def _guarded(id: str, function: Callable[..., Any]) -> CheckFunction:
    """Wrap a site's own check: its errors must not prevent a run from starting."""

    def made(facts: Facts) -> Iterator[Finding]:
        with Survived(also=(SystemExit,)) as found:  # any exception becomes a finding
            for finding in function(facts) or ():
                if not isinstance(finding, Finding):
                    raise TypeError(f"yielded {finding!r:.80}, expected a Finding")
                yield finding
        if found.error is not None:
            yield from _unusable(id, one_line(found.problem))(facts)

    made.__doc__ = function.__doc__
    return made


def _unusable(id: str, problem: str) -> CheckFunction:
    return lambda facts: iter(
        [
            warning(
                f"the plug-in {id} could not be used: {problem}",
                f'a function of the entry point group "{PLUGINS}" that takes the facts and yields findings',
                f'correct its package or remove it, or set preflight.off = {{"{id}" = "why"}}',
            )
        ]
    )


def one_line(problem: str) -> str:
    """Format type and text of an exception in one line."""
    return " ".join(problem.split())[:300].removesuffix(":")


def passed(found: str) -> Finding:
    """Report that the check passed."""
    return Finding(CheckStatus.PASSED, found)


def skipped(reason: str) -> Finding:
    """Report that the check could not run."""
    return Finding(CheckStatus.SKIPPED, reason)


def warning(found: str, expected: str, advice: str) -> Finding:
    """Report a problem that does not stop the run."""
    return Finding(CheckStatus.WARNING, found, expected, advice)


def blocked(found: str, expected: str, advice: str) -> Finding:
    """Report a problem that prevents the run."""
    return Finding(CheckStatus.BLOCKED, found, expected, advice)


def bad_rows(found: str, expected: str, remedy: str, *, dropped: bool, leave_others: bool = True) -> Finding:
    """Report rows that are dropped or prevent the run.

    Args:
        remedy: what the user can do with the rows themselves.
        dropped: True if ``data.malformed_rows`` is ``drop``.
        leave_others: False if there is no other row.
    """
    if not leave_others:
        return blocked(found, expected, f"{remedy}: there is no other row")
    if dropped:
        return warning(found, expected, 'they are dropped, because data.malformed_rows is "drop"')
    return blocked(found, expected, f'{remedy}, or drop them with data.malformed_rows="drop"')
