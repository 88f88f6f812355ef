"""Guard for `make test`: tests that pass only on a rerun are reported with their failure, and few are tolerated.

Hundreds of tests start real processes, servers and clusters on the capacity left of two cores. One test that is
occasionally too early must not hide the results of all others; many such tests indicate a fault of the product or of
the tests.
"""

import pytest

OPTION = "--most-reruns"


class RerunGuard:
    """Collects the rerun tests of a session, and fails the session if there are too many."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._failures: list[tuple[str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a failure that is followed by a rerun."""
        if report.outcome == "rerun":  # type: ignore[comparison-overlap] # pytest-rerunfailures' own
            self._failures.append((report.nodeid, str(report.longrepr)))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the session if too many tests were rerun."""
        if len(self._failures) > self._most and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Show the failures that the reruns would hide."""
        if not self._failures:
            return
        terminalreporter.section("tests that were run again", yellow=True)
        for test, failure in self._failures:
            terminalreporter.line(f"{test}\n{failure}\n")
        terminalreporter.line(
            f"{len(self._failures)} tests failed and were run again; {self._most} may. Each is a test to mend, or a "
            "fault that shows itself rarely."
        )


def add_option(parser: pytest.Parser) -> None:
    """Add the option that `make test` passes along with ``--reruns``."""
    parser.addoption(OPTION, type=int, default=None, help="fail when more tests than this were run again")


def configure(config: pytest.Config) -> None:
    """Register the guard if the option was given, in the one process that collects all reports."""
    most = config.getoption(OPTION)
    if most is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(RerunGuard(most), "rerun-guard")
