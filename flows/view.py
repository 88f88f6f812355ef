"""Findings, incidents and decisions in Prefect: a table and a Markdown artifact per run, and events for automations.

Prefect is told by a thread of its own: neither a server that is away nor one that never answers may hold a controller,
which has a lease to keep. What could not be told is told later, when the server is back, or never; the run directory
and the history have it all.
"""

import contextlib
import contextvars
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.events import emit_event

from flows.server import server_answers
from flows.session import Observer, Session
from rlhf_core.launch.journal import read_record
from rlhf_core.run_dir import RunDir, read_model
from rlhf_core.schemas.checks import CheckStatus
from rlhf_core.schemas.failures import Decision, Incident
from rlhf_core.schemas.probe import ProbeReport
from rlhf_core.schemas.run import RunSpec
from rlhf_core.watchdog.evidence import agent_decisions, incidents
from rlhf_core.watchdog.watch import Look

AGAIN_S = 10.0
"""Pause after Prefect could not be told."""

FAREWELL_S = 15.0
"""How long the end of a run waits for what is still to be told."""

MAX_FILES = 40
"""Files of evidence that an artifact lists, per incident."""

_NAMESPACE = uuid.UUID("6a1f3a52-3c0e-4b52-9d5e-5d9a1f0c7e11")
"""Ids of events are made from what they are about: a controller that comes later tells nothing twice."""


@dataclass(frozen=True)
class Story:
    """What went wrong in a run so far, and what was done about it, in order."""

    incidents: Sequence[Incident]
    decisions: Sequence[Decision]


def read_story(run_dir: RunDir) -> Story:
    """What the agents wrote into the incident folders, and the controller into its journal."""
    attempts = read_record(run_dir).attempts.values()
    found = [incident for attempt in run_dir.attempts() for incident in incidents(attempt)]
    found += [attempt.incident for attempt in attempts if attempt.incident is not None]
    made = [decision for attempt in run_dir.attempts() for decision in agent_decisions(attempt)]
    made += [attempt.decision for attempt in attempts if attempt.decision is not None]
    return Story(
        sorted(found, key=lambda incident: incident.seen_at), sorted(made, key=lambda decision: decision.decided_at)
    )


def artifact_key(run_id: str, what: str = "incidents") -> str:
    """Key of an artifact of a run: lower-case letters, digits and dashes."""
    return f"rlhf-{what}-{run_id.replace('_', '-')}"


def read_checks(run_dir: RunDir) -> list[dict[str, str]]:
    """Findings of preflight and of the probes of all attempts so far, the bad ones first, as rows of a table."""
    found = [("preflight", result) for result in read_record(run_dir).checks]
    for attempt in run_dir.attempts():
        report = read_model(attempt.probe_report, ProbeReport)
        found += [(f"attempt {attempt.number}", result) for result in (report.results if report is not None else ())]
    order = (CheckStatus.BLOCKED, CheckStatus.WARNING, CheckStatus.SKIPPED, CheckStatus.PASSED)
    return [
        {
            "status": result.status.value,
            "check": result.id,
            "when": when,
            "node": result.node,
            "found": result.found,
            "expected": result.expected,
            "what to do": result.advice,
        }
        for when, result in sorted(found, key=lambda pair: order.index(pair[1].status))
    ]


@contextmanager
def shown_in_prefect(session: Session) -> Iterator[None]:
    """Show the run's incidents and decisions in Prefect for as long as the block lasts. Use it in the flow run."""
    teller = Teller(session.run_dir, session.observer.says)
    observer, session.observer = session.observer, _Onlooker(session.observer, teller)
    teller.start()
    try:
        yield
    finally:
        session.observer = observer
        teller.close()


class _Onlooker:
    """Hands everything on to the observer behind it, and has the teller look when there may be something new."""

    def __init__(self, behind: Observer, teller: "Teller") -> None:
        self._behind = behind
        self._teller = teller

    def turns_to(self, spec: RunSpec) -> None:
        """What follows is about a run with this spec."""
        self._behind.turns_to(spec)

    def begins(self, title: str) -> None:
        """A stage begins."""
        self._teller.look()
        self._behind.begins(title)

    def looked(self, look: Look) -> None:
        """The watchdog has looked."""
        self._teller.look()
        self._behind.looked(look)

    def says(self, text: str) -> None:
        """Something a person should read: for instance, that an attempt has ended."""
        self._teller.look()
        self._behind.says(text)

    def wants_to_stop(self) -> bool:
        """Whether the person has asked to end the run."""
        return self._behind.wants_to_stop()


class Teller:
    """The thread that tells Prefect."""

    def __init__(self, run_dir: RunDir, say: Callable[[str], None]) -> None:
        """Made in a flow run, to which what it tells will belong.

        Args:
            run_dir: The run.
            say: Told, once per outage, that Prefect does not listen.
        """
        self._run_dir = run_dir
        self._say = say
        self._told: set[uuid.UUID] = set()
        self._checks_told: list[dict[str, str]] = []
        self._something = threading.Event()
        self._over = threading.Event()
        self._silent = False
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._run), name="prefect-teller", daemon=True)

    def start(self) -> None:
        """Begin, with what there is already."""
        self._something.set()
        self._thread.start()

    def look(self) -> None:
        """There may be something new. Never blocks."""
        self._something.set()

    def close(self) -> None:
        """Tell what is left, but not for long."""
        self._over.set()
        self._something.set()
        self._thread.join(timeout=FAREWELL_S)

    def _run(self) -> None:
        while True:
            self._something.wait()
            self._something.clear()
            last = self._over.is_set()
            try:
                self._tell()
                self._silent = False
            except Exception as error:  # noqa: BLE001 - whatever Prefect raises must not end the telling
                if not self._silent:
                    self._silent = True
                    with contextlib.suppress(Exception):
                        self._say(f"Prefect could not be told of an incident: {type(error).__name__}: {error}")
                self._something.set()
                self._over.wait(AGAIN_S)
            if last:
                return

    def _tell(self) -> None:
        story = read_story(self._run_dir)
        new = [event for event in _events(self._run_dir.run_id, story) if event.id not in self._told]
        checks = read_checks(self._run_dir)
        if not new and checks == self._checks_told:
            return
        # Prefect's own client tries again for a minute.
        if not server_answers():
            raise ConnectionError("its server does not answer")
        if checks != self._checks_told:
            self._tell_checks(checks)
        # First what is answered: an event is only queued, and would be lost with a server that is away.
        if new and story.incidents:
            create_markdown_artifact(
                markdown(self._run_dir, story),
                key=artifact_key(self._run_dir.run_id),
                description=f"{self._run_dir.run_id}: {_first_line(story.incidents[-1].message)}",
            )
        for event in new:
            emit_event(event.name, event.resource, payload=event.payload, id=event.id)
            self._told.add(event.id)

    def _tell_checks(self, checks: list[dict[str, str]]) -> None:
        counts = Counter(row["status"] for row in checks)
        create_table_artifact(
            table=checks,
            key=artifact_key(self._run_dir.run_id, "checks"),
            description=f"{self._run_dir.run_id}: " + ", ".join(f"{count} {name}" for name, count in counts.items()),
        )
        self._checks_told = checks


# ---------------------------------------------------------------------------------------------------------------------
# What is told


@dataclass(frozen=True)
class _Event:
    """One event, before Prefect has it."""

    id: uuid.UUID
    name: str
    resource: dict[str, str]
    payload: dict[str, str]
    """Texts alone: a number would break the templates of an automation whose parameters are texts."""


def _events(run_id: str, story: Story) -> Iterator[_Event]:
    for incident in story.incidents:
        name = f"rlhf.incident.{incident.failure_kind.value}"
        about = f"{run_id}/{incident.attempt}/{incident.restart}/{name}/{incident.seen_at.isoformat()}"
        yield _Event(uuid.uuid5(_NAMESPACE, about), name, _resource(run_id), _of_incident(run_id, incident))
    for decision in story.decisions:
        name = f"rlhf.decision.{decision.action.value}"
        about = f"{run_id}/{decision.attempt}/{decision.restart}/{name}/{decision.decided_at.isoformat()}"
        yield _Event(uuid.uuid5(_NAMESPACE, about), name, _resource(run_id), _of_decision(run_id, decision))


def _resource(run_id: str) -> dict[str, str]:
    return {"prefect.resource.id": f"rlhf.run.{run_id}", "prefect.resource.name": run_id}


def _of_incident(run_id: str, incident: Incident) -> dict[str, str]:
    return {
        "run_id": run_id,
        "attempt": str(incident.attempt),
        "restart": str(incident.restart),
        "failure_kind": incident.failure_kind.value,
        "message": incident.message,
        "phase": incident.phase,
        "step": "" if incident.step is None else str(incident.step),
        "suspect_ranks": ",".join(map(str, incident.suspect_ranks)),
        "suspect_nodes": ",".join(incident.suspect_nodes),
        "collective": incident.collective,
        "evidence_dir": incident.evidence_dir,
        "seen_at": incident.seen_at.isoformat(),
    }


def _of_decision(run_id: str, decision: Decision) -> dict[str, str]:
    return {
        "run_id": run_id,
        "attempt": str(decision.attempt),
        "restart": str(decision.restart),
        "action": decision.action.value,
        "reason": decision.reason,
        "decided_by": decision.decided_by.value,
        "delay_s": f"{decision.delay_s:g}",
        "excluded_nodes": ",".join(decision.excluded_nodes),
        "config_diff": ", ".join(f"{name}={value}" for name, value in decision.config_diff.items()),
        "decided_at": decision.decided_at.isoformat(),
    }


def markdown(run_dir: RunDir, story: Story) -> str:
    """The story for a person, newest incident first, with links to its evidence."""
    lines = [f"# {run_dir.run_id}: {len(story.incidents)} incident{'' if len(story.incidents) == 1 else 's'}", ""]
    for incident in reversed(story.incidents):
        lines += _section(run_dir, incident, story.decisions)
    lines.append(f"More: `rlhf show {run_dir.run_id}`, `rlhf logs {run_dir.run_id}`")
    return "\n".join(lines)


def _section(run_dir: RunDir, incident: Incident, decisions: Sequence[Decision]) -> list[str]:
    found_after = "" if incident.detected_after_s is None else f"{incident.detected_after_s:.1f} s after the last beat"
    suspects = ", ".join(f"rank {rank}" for rank in incident.suspect_ranks)
    number = "" if incident.collective_sequence is None else f", number {incident.collective_sequence}"
    facts = {
        "attempt, restart": f"{incident.attempt}, {incident.restart}",
        "found": f"{incident.seen_at:%Y-%m-%d %H:%M:%S} UTC {found_after}".strip(),
        "step": "" if incident.step is None else str(incident.step),
        "phase": incident.phase,
        "to blame": " on ".join(part for part in (suspects, ", ".join(incident.suspect_nodes)) if part),
        "collective": f"`{incident.collective}`{number}" if incident.collective else "",
    }
    here = (incident.attempt, incident.restart)
    done = [decision for decision in decisions if (decision.attempt, decision.restart) == here]
    return [
        f"## {incident.failure_kind.value}",
        "",
        _quoted(incident.message),
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {_cell(value)} |" for name, value in facts.items() if value),
        *(f"| decided ({one.decided_by.value}) | **{one.action.value}**: {_cell(one.reason)} |" for one in done),
        "",
        *_evidence(run_dir, incident),
        "",
    ]


def _evidence(run_dir: RunDir, incident: Incident) -> list[str]:
    """Links to the folder and to each file in it; for a browser on a machine that sees the run directories."""
    if not incident.evidence_dir:
        return []
    folder = (run_dir.root / incident.evidence_dir).absolute()
    files = _files(folder)
    more = [f"- ... and {len(files) - MAX_FILES} more"] if len(files) > MAX_FILES else []
    return [
        f"Evidence: [{incident.evidence_dir}]({folder.as_uri()})",
        "",
        *(f"- [{path.relative_to(folder)}]({path.as_uri()})" for path in files[:MAX_FILES]),
        *more,
    ]


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.rglob("*") if path.is_file())
    except OSError:
        return []


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}" for line in text.splitlines())


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
