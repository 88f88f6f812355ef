"""The incidents of a run as Markdown for a person who has a browser and no shell on the cluster.

Browsers do not follow links from a web page to files, so the essentials of the evidence stand in the text, and where
the rest lies is said as a path and a command. The new UI shows HTML in Markdown as text, and blocks of code light on
light: neither is used.
"""

import socket
from collections.abc import Callable, Sequence

from flows.view.keys import artifact_link
from flows.view.story import Story, ToldIncident
from rlhf_core.escaping import markdown, markdown_code, markdown_quote
from rlhf_core.render.evidence import read_evidence
from rlhf_core.schemas.failures import Decision

MAX_INCIDENTS = 20
"""Incidents that are told whole, the newest; of those before them there is a count."""

MAX_WITH_EVIDENCE = 5
"""Of these, incidents whose evidence is shown."""

MAX_FILES = 40
"""Names of files of evidence listed per incident."""


def headline(story: Story) -> str:
    """The first line of the page."""
    count = len(story.incidents)
    return f"# {count} incident{'' if count == 1 else 's'} of {story.run_id}"


def first_line(text: str) -> str:
    """First line of a text, whatever ends it."""
    return next(iter(text.splitlines()), "")


def incidents_markdown(story: Story) -> str:
    """The story, newest incident first."""
    count = len(story.incidents)
    lines = [
        headline(story),
        "",
        f"[progress]({artifact_link(story.run_id, 'progress')}) · [curves]({artifact_link(story.run_id, 'curves')})",
        "",
    ]
    newest = list(reversed(story.incidents))
    for index, told in enumerate(newest[:MAX_INCIDENTS]):
        lines += _section(story, told, shows_evidence=index < MAX_WITH_EVIDENCE)
    if count > MAX_INCIDENTS:
        lines += [f"{count - MAX_INCIDENTS} earlier incidents are left out here: `rlhf show {story.run_id}`", ""]
    lines += [
        "## More",
        "",
        *(f"- `rlhf {command} {story.run_id}`" for command in ("show", "report", "logs")),
        "",
        f"Paths are those of `{socket.gethostname()}`, and of every machine that has the folder of the runs at the "
        "same place.",
    ]
    return "\n".join(lines)


def _section(story: Story, told: ToldIncident, *, shows_evidence: bool) -> list[str]:
    incident = told.incident
    trial = story.trial_of(told.run_dir)
    found_after = (
        "" if incident.detected_after_s is None else f", {incident.detected_after_s:.1f} s after the last beat"
    )
    suspects = ", ".join(f"rank {rank}" for rank in incident.suspect_ranks)
    number = "" if incident.collective_sequence is None else f", number {incident.collective_sequence}"
    facts = {
        "trial": f"{markdown(trial)}, run `{told.run_dir.run_id}`" if trial else "",
        "attempt, restart": f"{incident.attempt}, {incident.restart}",
        "found": f"{incident.seen_at:%Y-%m-%d %H:%M:%S} UTC{found_after}",
        "step": "" if incident.step is None else str(incident.step),
        "phase": markdown(incident.phase),
        "to blame": markdown(" on ".join(part for part in (suspects, ", ".join(incident.suspect_nodes)) if part)),
        "collective": f"{markdown_code(incident.collective, in_table=True)}{number}" if incident.collective else "",
    }
    here = (told.run_dir, incident.attempt, incident.restart)
    done = [
        one.decision
        for one in story.decisions
        if (one.run_dir, one.decision.attempt, one.decision.restart) == here
        and one.decision.number in (0, incident.number)
    ]
    return [
        f"## {incident.failure_kind.value}, step {incident.step}"
        if incident.step
        else f"## {incident.failure_kind.value}",
        "",
        markdown_quote(incident.message),
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in facts.items() if value),
        *(f"| decided by the {one.decided_by.value} | {decided(one)} |" for one in done),
        "",
        *(_evidence(told) if shows_evidence else []),
    ]


def decided(decision: Decision, escape: Callable[[str], str] = markdown) -> str:
    """A decision in a sentence, with what it changes.

    Args:
        escape: Escapes texts for the place in which the sentence is shown.
    """
    changed = escape(", ".join(f"{name} = {value}" for name, value in decision.config_diff.items()))
    parts = [
        f"**{decision.action.value}**: {escape(decision.reason.rstrip('.'))}",
        f"after {decision.delay_s:g} s" if decision.delay_s else "",
        f"without {escape(', '.join(decision.excluded_nodes))}" if decision.excluded_nodes else "",
        f"with {changed}" if changed else "",
        f"from {escape(decision.resume_checkpoint)}" if decision.resume_checkpoint else "",
    ]
    return "; ".join(part for part in parts if part)


def _evidence(told: ToldIncident) -> list[str]:
    incident = told.incident
    if not incident.evidence_dir:
        return []
    folder = (told.run_dir.root / incident.evidence_dir).absolute()
    evidence = read_evidence(folder, incident.suspect_ranks)
    lines = []
    for stack in evidence.stacks:
        lines += [f"**{markdown(stack.name)}**", "", *_as_code(stack.lines), ""]
    for log in evidence.logs:
        lines += [f"End of **{markdown(log.name)}**", "", *_as_code(log.lines), ""]
    names = [markdown_code(str(path.relative_to(folder))) for path in evidence.files[:MAX_FILES]]
    more = f" and {len(evidence.files) - MAX_FILES} more" if len(evidence.files) > MAX_FILES else ""
    logs = f"rlhf logs {told.run_dir.run_id} --attempt {incident.attempt} --restart {incident.restart}"
    return [
        *lines,
        f"Evidence: {markdown_code(str(folder))}",
        "",
        *([f"{', '.join(names)}{more}", ""] if names else []),
        f"Whole logs: `{logs}`",
        "",
    ]


def _as_code(lines: Sequence[str]) -> list[str]:
    """Lines as code, each by itself: the new UI shows blocks of code light on light in its light scheme."""
    # An end of a line with two spaces is a line break; hard spaces keep the indentation.
    return [f"{markdown_code(line)}  " for line in lines if line.strip()]
