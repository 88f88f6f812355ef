"""What has happened to a run so far, read from its directory and those of its trials: once for all that is shown."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from rlhf_core.control.trials import trials_of
from rlhf_core.control_journal import read_journal
from rlhf_core.launch.journal import RunRecord, fold, read_record
from rlhf_core.run_dir import RunDir, read_model
from rlhf_core.schemas.checks import CheckResult, CheckStatus
from rlhf_core.schemas.failures import Decision, Incident
from rlhf_core.schemas.journal import ControllerStarted, JournalLine, PromotionMoved
from rlhf_core.schemas.probe import ProbeReport
from rlhf_core.watchdog.evidence import agent_decisions, incidents


@dataclass(frozen=True)
class ToldIncident:
    """An incident, and whose it is."""

    run_dir: RunDir
    incident: Incident


@dataclass(frozen=True)
class ToldDecision:
    """A decision, and whose it is."""

    run_dir: RunDir
    decision: Decision


@dataclass(frozen=True)
class Story:
    """A run and its trials at one moment."""

    run_dir: RunDir
    lines: Sequence[JournalLine]
    """Its journal, without what controllers wrote that had lost the run."""
    record: RunRecord
    incidents: Sequence[ToldIncident]
    """What went wrong, in the order of time; also in its trials."""
    decisions: Sequence[ToldDecision]
    """What was done about it, likewise."""

    @property
    def run_id(self) -> str:
        """Identity of the run."""
        return self.run_dir.run_id

    @cached_property
    def promotion(self) -> PromotionMoved | None:
        """How the promotion of its model stands; None where none was asked for."""
        found = [line.event for line in self.lines if isinstance(line.event, PromotionMoved)]
        return found[-1] if found else None

    def flow_run_url(self, before: JournalLine) -> str:
        """Page of the flow run that wrote a line, as its controller said; empty where it did not."""
        urls = [
            line.event.flow_run_url
            for line in self.lines
            if isinstance(line.event, ControllerStarted) and line.sequence <= before.sequence
        ]
        return urls[-1] if urls else ""

    def trial_of(self, run_dir: RunDir) -> str:
        """The check that a trial decides; empty for the run itself."""
        return next((check for check, run_id in self.record.trials.items() if run_id == run_dir.run_id), "")


def read_story(run_dir: RunDir) -> Story:
    """What the agents wrote into the incident folders, and the controllers into the journals."""
    lines = _valid(read_journal(run_dir.control))
    record = fold(lines)
    found, made = _told_by(run_dir, record)
    for trial in trials_of(run_dir) if record.trials else ():
        more_found, more_made = _told_by(trial, read_record(trial))
        found, made = found + more_found, made + more_made
    return Story(
        run_dir,
        lines,
        record,
        sorted(found, key=lambda told: told.incident.seen_at),
        sorted(made, key=lambda told: told.decision.decided_at),
    )


def _valid(lines: Iterable[JournalLine]) -> list[JournalLine]:
    kept: list[JournalLine] = []
    token = 0
    for line in lines:
        if line.token >= token:
            token = line.token
            kept.append(line)
    return kept


def _told_by(run_dir: RunDir, record: RunRecord) -> tuple[list[ToldIncident], list[ToldDecision]]:
    attempts = record.attempts.values()
    found = [incident for attempt in run_dir.attempts() for incident in incidents(attempt)]
    found += [attempt.incident for attempt in attempts if attempt.incident is not None]
    made = [decision for attempt in run_dir.attempts() for decision in agent_decisions(attempt)]
    made += [attempt.decision for attempt in attempts if attempt.decision is not None]
    return [ToldIncident(run_dir, one) for one in found], [ToldDecision(run_dir, one) for one in made]


def read_checks(run_dir: RunDir) -> list[dict[str, str]]:
    """Findings of preflight and of the probes of all attempts so far, those of its trials too, the bad ones first, as
    rows of a table."""
    record = read_record(run_dir)
    found = _findings(run_dir, "", record)
    for trial in trials_of(run_dir):
        found += _findings(trial, "trial: ", read_record(trial))
    order = (CheckStatus.BLOCKED, CheckStatus.WARNING, CheckStatus.SKIPPED, CheckStatus.PASSED)
    return [
        {
            "status": result.status.value,
            "check": result.id,
            "found": result.found,
            "what to do": result.advice,
            "expected": result.expected,
            "node": result.node,
            "when": when,
        }
        for when, result in sorted(found, key=lambda pair: order.index(pair[1].status))
    ]


def _findings(run_dir: RunDir, whose: str, record: RunRecord) -> list[tuple[str, CheckResult]]:
    found = [(f"{whose}preflight", result) for result in record.checks]
    for attempt in run_dir.attempts():
        report = read_model(attempt.probe_report, ProbeReport)
        results = report.results if report is not None else ()
        found += [(f"{whose}attempt {attempt.number}", result) for result in results]
    return found
