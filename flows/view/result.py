"""What a run came to, as the page that Prefect keeps of it."""

from collections.abc import Mapping
from typing import Any

from flows.view.incidents import decided
from flows.view.keys import artifact_link
from flows.view.story import Story
from rlhf_core.control.summary import Section, Summary
from rlhf_core.control.summary import markdown as summary_markdown
from rlhf_core.errors import HistoryError
from rlhf_core.escaping import markdown, markdown_code
from rlhf_core.formatting import duration
from rlhf_core.history import queries
from rlhf_core.history.store import HistoryStore
from rlhf_core.schemas.regression import REGRESSED


def times_of(store: HistoryStore, run_id: str) -> Mapping[str, Any]:
    """Goodput and lost time of a run (``goodput``, ``lost_time``); empty where the history does not answer."""
    try:
        shown = queries.show_run(store, run_id)
    except HistoryError:
        return {}
    return {"goodput": shown["goodput"], "lost_time": shown["lost_time"]}


def result_markdown(summary: Summary, story: Story, times: Mapping[str, Any]) -> str:
    """The page."""
    return summary_markdown(
        summary,
        sections=[_where_to_look(story), _promotion(story), _times(times), _trouble(story)],
    )


def tells_the_end(page: str, story: Story) -> bool:
    """Whether a page says how the run ended, and where its promotion stands."""
    lines = page.splitlines()
    head = f"# {story.run_id}: {story.record.state.value}"
    return any(line in (head, f"{head}, {REGRESSED}") for line in lines) and set(_promotion(story)) <= {*lines, ""}


def _where_to_look(story: Story) -> Section:
    pages = ["curves", "progress", "checks", *(["incidents"] if story.incidents else [])]
    return [" · ".join(f"[{page}]({artifact_link(story.run_id, page)})" for page in pages), ""]


def _promotion(story: Story) -> Section:
    event = story.promotion
    if event is None:
        return []
    parts = [
        f"**Promotion: {event.state.value}**, step {event.checkpoint_step}",
        f"by {markdown(event.by)}" if event.by else "",
        markdown(event.reason),
        markdown_code(event.path) if event.path else "",
    ]
    waits = [f"Decide with `rlhf approve {story.run_id}`", ""] if event.state.value == "waiting" else []
    return [" · ".join(part for part in parts if part), "", *waits]


def _times(times: Mapping[str, Any]) -> Section:
    goodput = times.get("goodput") or {}
    if not goodput.get("wall_s"):
        return []
    rows = [
        ("from start to end", duration(goodput["wall_s"])),
        ("of it waiting for nodes", duration(goodput["queue_s"])),
        ("steps that count", duration(goodput["productive_s"])),
        ("steps made again", duration(goodput["repeated_s"])),
        ("lost to failures, with these", duration(goodput["lost_s"])),
        ("goodput, queue not counted", "" if goodput["ettr"] is None else f"{goodput['ettr']:.1%}"),
    ]
    lost = [
        f"| lost to {markdown(row['failure_kind'])} | {duration(row['lost_s'])}, {row['num_incidents']} of them |"
        for row in times.get("lost_time", ())
    ]
    return ["| time | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows if value), *lost, ""]


def _trouble(story: Story) -> Section:
    """Incidents and decisions, in the order of time."""
    told = [
        (one.incident.seen_at, one.incident.attempt, one.incident.failure_kind.value, markdown(one.incident.message))
        for one in story.incidents
    ]
    told += [(one.decision.decided_at, one.decision.attempt, "", decided(one.decision)) for one in story.decisions]
    if not told:
        return ["No incident.", ""]
    return [
        "| at (UTC) | attempt | incident | what happened, what was done |",
        "|---|---|---|---|",
        *(f"| {at:%H:%M:%S} | {number} | {kind} | {text} |" for at, number, kind, text in sorted(told)),
        "",
    ]
