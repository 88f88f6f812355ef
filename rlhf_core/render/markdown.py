"""Incidents, findings and progress of a run as Markdown, for readers with a browser but no shell on the cluster.

Browsers do not follow links from web pages to local files, so the text contains the essentials of the evidence, and a
path and a command for the rest. Prefect's new UI shows HTML inside Markdown as text, renders code blocks light on
light, and does not wrap tables, so long texts use none of them.
"""

import socket
from collections.abc import Iterator, Sequence
from itertools import groupby

from rlhf_core.render.evidence import read_incident_evidence
from rlhf_core.render.progress import METRICS, RunProgress
from rlhf_core.render.timeline import Timeline, TimelineIncident, collective_text, decision_text, suspects_text
from rlhf_core.schemas.checks import CheckResult
from rlhf_core.text.escaping import markdown, markdown_code, markdown_quote
from rlhf_core.text.formatting import count, duration, listed, markdown_table

MAX_INCIDENTS = 20
"""Number of newest incidents that are shown in full; earlier ones are only counted."""

MAX_WITH_EVIDENCE = 5
"""Number of those whose evidence is shown."""

MAX_FILES = 40
"""Number of evidence files listed per incident."""

MAX_NODES = 8
"""Number of node names listed."""

_CHECK_TITLES = {"blocked": "Blocked", "warning": "Warnings", "skipped": "Skipped", "passed": "Passed"}


def incidents_markdown(timeline: Timeline, links: str = "") -> str:
    """Format the incidents of a run as a page, the newest first.

    Args:
        links: Markdown with links to other pages of the run.
    """
    number = len(timeline.incidents)
    lines = [f"# {count(number, 'incident')} of {timeline.run_id}", "", *([links, ""] if links else [])]
    for index, found in enumerate(list(reversed(timeline.incidents))[:MAX_INCIDENTS]):
        lines += _incident(timeline, found, shows_evidence=index < MAX_WITH_EVIDENCE)
    if number > MAX_INCIDENTS:
        lines += [f"{number - MAX_INCIDENTS} earlier incidents are left out here: `rlhf show {timeline.run_id}`", ""]
    lines += [
        "## More",
        "",
        *(f"- `rlhf {command} {timeline.run_id}`" for command in ("show", "report", "logs")),
        "",
        f"Paths are those of `{socket.gethostname()}`, and of every machine that has the folder of the runs at the "
        "same place.",
    ]
    return "\n".join(lines)


def _incident(timeline: Timeline, found: TimelineIncident, *, shows_evidence: bool) -> list[str]:
    incident = found.incident
    after = "" if incident.detected_after_s is None else f", {incident.detected_after_s:.1f} s after the last beat"
    facts = {
        "trial": f"{markdown(found.trial)}, run `{found.run_dir.run_id}`" if found.trial else "",
        "attempt, restart": f"{incident.attempt}, {incident.restart}",
        "found": f"{incident.seen_at:%Y-%m-%d %H:%M:%S} UTC{after}",
        "step": "" if incident.step is None else str(incident.step),
        "phase": markdown(incident.phase),
        "to blame": markdown(suspects_text(incident)),
        "collective": markdown_code(collective_text(incident), in_table=True) if incident.collective else "",
    }
    decisions = [("decision", markdown(decision_text(one))) for one in timeline.decisions_on(found)]
    step = f", step {incident.step}" if incident.step else ""
    return [
        f"## {incident.failure_kind.value}{step}",
        "",
        markdown_quote(incident.message),
        "",
        *markdown_table(("", ""), [(name, value) for name, value in facts.items() if value] + decisions),
        "",
        *(_evidence(found) if shows_evidence else []),
    ]


def _evidence(found: TimelineIncident) -> list[str]:
    incident = found.incident
    evidence = read_incident_evidence(found.run_dir, incident.evidence_dir, incident.suspect_ranks)
    if evidence is None:
        return []
    lines = []
    for stack in evidence.stacks:
        lines += [f"**{markdown(stack.name)}**", "", *_as_code(stack.lines), ""]
    for log in evidence.logs:
        lines += [f"End of **{markdown(log.name)}**", "", *_as_code(log.lines), ""]
    names = [markdown_code(str(path.relative_to(evidence.folder))) for path in evidence.files]
    logs = f"rlhf logs {found.run_dir.run_id} --attempt {incident.attempt} --restart {incident.restart}"
    return [
        *lines,
        f"Evidence: {markdown_code(str(evidence.folder))}",
        "",
        *([listed(names, MAX_FILES), ""] if names else []),
        f"Whole logs: `{logs}`",
        "",
    ]


def _as_code(lines: Sequence[str]) -> list[str]:
    """Format each line as inline code: the new UI's light scheme shows code blocks light on light."""
    # Two trailing spaces make a line break; non-breaking spaces keep the indentation.
    return [f"{markdown_code(line)}  " for line in lines if line.strip()]


# ---------------------------------------------------------------------------------------------------------------------


def checks_markdown(checks: Sequence[tuple[str, CheckResult]]) -> str:
    """Format findings of preflight and probes, given in order of status with the worst first."""
    lines = []
    for status, group in groupby(checks, key=lambda pair: pair[1].status.value):
        lines += [f"## {_CHECK_TITLES[status]}", "", *_findings(group), ""]
    return "\n".join(lines)


def _findings(checks: Iterator[tuple[str, CheckResult]]) -> Iterator[str]:
    for when, result in checks:
        place = ", ".join(markdown(part) for part in (when, result.node) if part)
        expected = f"; expected {markdown(result.expected)}" if result.expected else ""
        advice = f" **What to do:** {markdown(result.advice)}" if result.advice else ""
        yield f"- **{markdown(result.id)}** ({place}): {markdown(result.found)}{expected}.{advice}"


# ---------------------------------------------------------------------------------------------------------------------


def progress_markdown(progress: RunProgress, timeline: Timeline) -> str:
    """Format the progress of a run: a line with its current position, then the figures.

    Two pages of the UI show it, so it contains no links between them.
    """
    first = [f"**{markdown(progress.activity())}**"]
    if timeline.ended:
        first.append(markdown(timeline.cause))
    elif progress.left_s is not None:
        first.append(f"{duration(progress.left_s)} left")
    blocks = [" · ".join(part for part in first if part)]
    if progress.is_behind and not timeline.ended:
        blocks.append(_rewind(progress, timeline))
    blocks += [" · ".join(line) for line in (_place(progress, timeline), _metrics(progress)) if line]
    return "\n\n".join(blocks)


def _rewind(progress: RunProgress, timeline: Timeline) -> str:
    """Explanation for a progress bar that moved back."""
    cause = f" after {timeline.incidents[-1].incident.failure_kind.value}" if timeline.incidents else ""
    reason = f": {markdown(timeline.decisions[-1].decision.reason)}" if timeline.decisions else ""
    return f"Went back{cause}: step {progress.furthest} was reached before, and is being made again{reason}"


def _place(progress: RunProgress, timeline: Timeline) -> list[str]:
    if not progress.attempt:
        return []
    nodes = progress.nodes
    found = [
        f"attempt {progress.attempt}, {count(progress.restarts, 'restart')}",
        f"on {markdown(listed(nodes, MAX_NODES))}" if nodes else "",
        f"{duration(progress.step_s)} a step" if progress.step_s is not None else "",
        count(len(timeline.incidents), "incident") if timeline.incidents else "",
        f"the history is behind: {markdown(progress.history_behind)}" if progress.history_behind else "",
    ]
    return [text for text in found if text]


def _metrics(progress: RunProgress) -> list[str]:
    known = progress.metrics
    return [f"{name} {format(known[key], form)}" for key, name, form in METRICS if key in known]
