"""Preflight without an allocation: gather the facts, run every check, raise the blocking findings."""

from collections.abc import Sequence

import rlhf_core.preflight.checks  # noqa: F401 - importing it registers the checks
from rlhf_core.errors import PreflightBlocked
from rlhf_core.preflight.gather_facts import Surroundings, gather
from rlhf_core.preflight.program_queries import Tick
from rlhf_core.preflight.registry import run_checks
from rlhf_core.schemas.checks import CheckResult, CheckStatus
from rlhf_core.schemas.run import RunSpec
from rlhf_core.text.formatting import sentence


def make_checks(spec: RunSpec, around: Surroundings, tick: Tick = lambda: None) -> tuple[CheckResult, ...]:
    """Run every check on a spec in its surroundings.

    Args:
        tick: called while waiting; may raise to stop.
    """
    return run_checks(gather(spec, around, tick))


def blocking(results: Sequence[CheckResult]) -> list[CheckResult]:
    """Select the findings that prevent the run."""
    return [result for result in results if result.status is CheckStatus.BLOCKED]


def require_passed(results: Sequence[CheckResult]) -> None:
    """Raise :class:`PreflightBlocked` with every blocking finding, if there is one."""
    found = blocking(results)
    if not found:
        return
    count = "1 check blocks" if len(found) == 1 else f"{len(found)} checks block"
    lines = [
        f"  {result.id}: found {result.found}; expected {result.expected}. {sentence(result.advice)}"
        for result in found
    ]
    raise PreflightBlocked(f"{count} the run; nothing was started:\n" + "\n".join(lines))
