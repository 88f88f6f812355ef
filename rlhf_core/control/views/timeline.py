"""Reading the timeline of a run from its directory, its journal and those of its trials.

This is the only module that decides which incidents and decisions belong to a run.
"""

from collections.abc import Sequence

from rlhf_core.files.appended import parse_lines, read_lines
from rlhf_core.files.whole import read_model
from rlhf_core.launch.journal import RunRecord, fold, read_record
from rlhf_core.render.timeline import FirstStep, Timeline, TimelineDecision, TimelineIncident
from rlhf_core.run_dir.attempt import RestartDir
from rlhf_core.run_dir.journal import read_journal
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.checks import CheckResult, CheckStatus
from rlhf_core.schemas.failures import Decision, Incident
from rlhf_core.schemas.probe import ProbeReport
from rlhf_core.schemas.reports import MetricsLine
from rlhf_core.watchdog.evidence import agent_decisions, incidents

MAX_METRICS_LINE_BYTES = 1 << 16
"""Longest line of metrics."""

_CHECK_ORDER = (CheckStatus.BLOCKED, CheckStatus.WARNING, CheckStatus.SKIPPED, CheckStatus.PASSED)


def read_timeline(run_dir: RunDir) -> Timeline:
    """Read the timeline of a run, with the incidents and decisions of its trials.

    Raises:
        JournalDamaged: a line of a journal cannot be read.
        OSError: the file system does not respond.
    """
    lines = read_journal(run_dir.control)
    record = fold(lines)
    found, made = _of_run(run_dir, record, "")
    for check_id, trial in _trials(run_dir, record):
        more_found, more_made = _of_run(trial, read_record(trial), check_id)
        found, made = found + more_found, made + more_made
    return Timeline(
        run_dir,
        record.state,
        record.cause,
        sorted(found, key=lambda one: one.incident.seen_at),
        sorted(made, key=lambda one: one.decision.decided_at),
        # Only incidents make the first steps part of a timeline.
        _first_steps(run_dir) if found else (),
        lines,
    )


def all_incidents(run_dir: RunDir, record: RunRecord) -> list[Incident]:
    """Incidents that the agents and the controllers of a run found, in chronological order."""
    found = [incident for attempt in run_dir.attempts() for incident in incidents(attempt)]
    found += [attempt.incident for attempt in record.attempts.values() if attempt.incident is not None]
    return sorted(found, key=lambda incident: incident.seen_at)


def all_decisions(run_dir: RunDir, record: RunRecord) -> list[Decision]:
    """Decisions that agents and controllers made about a run, in chronological order."""
    made = [decision for attempt in run_dir.attempts() for decision in agent_decisions(attempt)]
    made += [attempt.decision for attempt in record.attempts.values() if attempt.decision is not None]
    return sorted(made, key=lambda decision: decision.decided_at)


def trials_of(run_dir: RunDir) -> list[RunDir]:
    """Trials that were made for a run."""
    return [trial for _, trial in _trials(run_dir, read_record(run_dir))]


def read_checks(run_dir: RunDir) -> list[tuple[str, CheckResult]]:
    """Read the findings of preflight and probes, including those of the trials, worst first, each with its time."""
    record = read_record(run_dir)
    found = _findings(run_dir, "", record)
    for _, trial in _trials(run_dir, record):
        found += _findings(trial, "trial: ", read_record(trial))
    return sorted(found, key=lambda pair: _CHECK_ORDER.index(pair[1].status))


def _trials(run_dir: RunDir, record: RunRecord) -> list[tuple[str, RunDir]]:
    found = ((check, RunDir.find(run_dir.root.parent, run_id)) for check, run_id in record.trials.items())
    return [(check, trial) for check, trial in found if trial is not None]


def _of_run(run_dir: RunDir, record: RunRecord, trial: str) -> tuple[list[TimelineIncident], list[TimelineDecision]]:
    return (
        [TimelineIncident(run_dir, one, trial) for one in all_incidents(run_dir, record)],
        [TimelineDecision(run_dir, one, trial) for one in all_decisions(run_dir, record)],
    )


def _first_steps(run_dir: RunDir) -> Sequence[FirstStep]:
    return [first for restart in run_dir.restarts() if (first := _first_step(restart)) is not None]


def _first_step(restart: RestartDir) -> FirstStep | None:
    found = read_lines(restart.metrics, 0, MAX_METRICS_LINE_BYTES)
    line = next(iter(parse_lines(found.lines[:1], MetricsLine)), None)
    return None if line is None else FirstStep(restart.attempt, restart.restart, line.step, line.time)


def _findings(run_dir: RunDir, prefix: str, record: RunRecord) -> list[tuple[str, CheckResult]]:
    found = [(f"{prefix}preflight", result) for result in record.checks]
    for attempt in run_dir.attempts():
        report = read_model(attempt.probe_report, ProbeReport)
        results = report.results if report is not None else ()
        found += [(f"{prefix}attempt {attempt.number}", result) for result in results]
    return found
