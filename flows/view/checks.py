"""The findings of preflight and probes as Markdown.

A list, not one of Prefect's tables: those do not wrap, and the advice of a finding was out of view on a common screen.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from rlhf_core.escaping import markdown

_TITLES = {"blocked": "Blocked", "warning": "Warnings", "skipped": "Skipped", "passed": "Passed"}


def checks_markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Format findings, which come sorted by status with the worst first."""
    lines = []
    for status, group in groupby(rows, key=lambda row: row["status"]):
        lines += [f"## {_TITLES[status]}", "", *_items(group), ""]
    return "\n".join(lines)


def _items(rows: Iterator[Mapping[str, str]]) -> Iterator[str]:
    for row in rows:
        place = ", ".join(markdown(part) for part in (row["when"], row["node"]) if part)
        expected = f"; expected {markdown(row['expected'])}" if row["expected"] else ""
        advice = f" **What to do:** {markdown(row['what to do'])}" if row["what to do"] else ""
        yield f"- **{markdown(row['check'])}** ({place}): {markdown(row['found'])}{expected}.{advice}"
