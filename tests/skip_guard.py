"""Guard for `make test`: any skip that is not on the list of allowed ones fails the session.

Without it, a machine on which Slurm, PostgreSQL or the browser could not be installed would pass with most of the
integration tests skipped.
"""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

OPTION = "--only-allowed-skips"
ALLOWED = Path(__file__).parent / "allowed_skips.toml"


@dataclass(frozen=True)
class AllowedSkip:
    """An accepted skip: its location, the reason given by the test, and why nothing is lost."""

    test: str
    """Regular expression that the beginning of a test's node id matches."""
    reason: str
    """Regular expression found in the reason that the test gave."""
    why: str


def read_allowed(path: Path = ALLOWED) -> tuple[AllowedSkip, ...]:
    """Read the list of allowed skips.

    Raises:
        TypeError: a field is missing or unknown.
        ValueError: a row gives no explanation.
    """
    rows = tuple(AllowedSkip(**row) for row in tomllib.loads(path.read_text(encoding="utf-8"))["skip"])
    for row in rows:
        if not row.why.strip():
            raise ValueError(f"{path}: the row for {row.test!r} does not say why")
    return rows


class SkipGuard:
    """Collects the skips of a session, including its worker processes, and fails the session for those not allowed."""

    def __init__(self, allowed: tuple[AllowedSkip, ...]) -> None:
        self._allowed = allowed
        self._refused: list[tuple[str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a skipped test."""
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a skipped module."""
        self._note(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the session if a skip is not allowed."""
        if self._refused and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """List the skips, with advice."""
        if not self._refused:
            return
        terminalreporter.section("skips that are not allowed", red=True)
        for test, reason in self._refused:
            terminalreporter.line(f"{test}: {reason}")
        terminalreporter.line(
            f"{len(self._refused)} skips. Install what is missing, or run `make test SKIPS=any` and know that these "
            f"did not run; a skip that is no loss gets a row in {ALLOWED.relative_to(Path(__file__).parents[1])}."
        )

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(re.match(row.test, report.nodeid) and re.search(row.reason, reason) for row in self._allowed):
            self._refused.append((report.nodeid, reason))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that `make test` passes."""
    parser.addoption(OPTION, action="store_true", help=f"fail for a skip that is not in {ALLOWED.name}")


def pytest_configure(config: pytest.Config) -> None:
    """Register the guard if the option was given, in the one process that collects all reports."""
    if config.getoption(OPTION) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SkipGuard(read_allowed()), "skip-guard")
