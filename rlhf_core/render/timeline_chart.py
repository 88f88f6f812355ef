"""Chart of a run over time: stages, attempts with their restarts, checkpoints and incidents as HTML bars and marks.

Positions are percentages, so that the chart fits a phone, a monitor and paper.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

from rlhf_core.render.gather import ReportData
from rlhf_core.render.markup import Markup, as_time, clock, duration, moment, remark, tag

_TICKS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
_MAX_TICKS = 6


@dataclass(frozen=True)
class _Span:
    row: str
    start: datetime
    end: datetime
    kind: str
    text: str


@dataclass(frozen=True)
class _Moment:
    row: str
    time: datetime
    kind: str
    text: str


def timeline_chart(record: ReportData) -> Markup | None:
    """Draw the chart; None if the history has no times."""
    latest = record.last_seen
    spans = _stages(record) + _restarts(record, latest)
    moments = _moments(record)
    if not spans:
        return None
    start = min([span.start for span in spans] + [one.time for one in moments])
    end = max([span.end for span in spans] + [one.time for one in moments])
    length_s = max((end - start).total_seconds(), 1e-3)

    def place(time: datetime) -> float:
        return 100 * (time - start).total_seconds() / length_s

    rows = []
    for name in dict.fromkeys([span.row for span in spans] + [one.row for one in moments]):
        bars = [
            tag(
                "i",
                class_=f"bar {span.kind}",
                style=f"left:{place(span.start):.3f}%;width:max(2px,{place(span.end) - place(span.start):.3f}%)",
                title=span.text,
            )
            for span in spans
            if span.row == name
        ]
        signs = [
            tag("i", class_=f"sign {one.kind}", style=f"left:{place(one.time):.3f}%", title=one.text)
            for one in moments
            if one.row == name
        ]
        rows.append(tag("div", tag("span", name), tag("div", *bars, *signs, class_="track"), class_="row"))
    ticks = [
        tag("i", tag("b", _tick_text(at)), class_="tick", style=f"left:{100 * at / length_s:.3f}%")
        for at in _ticks(length_s)
    ]
    rows.append(tag("div", tag("span", ""), tag("div", *ticks, class_="axis"), class_="row"))
    return tag(
        "div",
        *rows,
        remark(f"From {moment(start)} to {moment(end)}; the axis shows the time since the start."),
        class_="timeline",
    )


def _stages(record: ReportData) -> list[_Span]:
    spans = []
    for stage in record.stages:
        start = datetime.fromisoformat(stage["started_at"])
        end = start + timedelta(seconds=stage["seconds"])
        kind = {"failed": "bad", "cancelled": "warn"}.get(stage["state"], "stage")
        text = f"{stage['name']}: {stage['state']}, {duration(stage['seconds'])}"
        spans.append(_Span(stage["name"], start, end, kind, text))
    return spans


def _restarts(record: ReportData, latest: datetime) -> list[_Span]:
    spans = []
    for restart in record.restarts:
        start = as_time(restart["started_at"])
        if start is None:
            continue
        end = as_time(restart["ended_at"]) or max(start, latest)
        attempt, number = restart["attempt"], restart["restart"]
        kind = "attempt" if number % 2 == 0 else "attempt other"
        made = (
            "no step" if restart["first_step"] is None else f"steps {restart['first_step']} to {restart['last_step']}"
        )
        text = f"attempt {attempt}, start {number + 1} of its workers, {made}: {clock(start)} to {clock(end)}"
        spans.append(_Span(f"attempt {attempt}", start, end, kind, text))
    return spans


def _moments(record: ReportData) -> list[_Moment]:
    found = []
    for row in record.checkpoints:
        time = datetime.fromisoformat(row["completed_at"])
        found.append(_Moment("checkpoints", time, "saved", f"checkpoint at step {row['step']}, {clock(time)}"))
    for incident in (one.incident for one in record.timeline.incidents):
        text = f"{incident.failure_kind.value}, {clock(incident.seen_at)}: {incident.message}"
        found.append(_Moment("incidents", incident.seen_at, "incident", text))
    return found


def _ticks(length_s: float) -> list[int]:
    """Round times for the axis, at most six."""
    days = 86400 * (1 + int(length_s / 86400 / _MAX_TICKS))
    step = next((step for step in _TICKS_S if length_s / step <= _MAX_TICKS), days)
    return list(range(0, int(length_s) + 1, step))


def _tick_text(seconds: int) -> str:
    """``0``, ``30 s``, ``5 min``, ``1 h 30 min``: zero parts are omitted."""
    hours, rest = divmod(seconds, 3600)
    minutes, rest = divmod(rest, 60)
    parts = [f"{amount} {unit}" for amount, unit in ((hours, "h"), (minutes, "min"), (rest, "s")) if amount]
    return " ".join(parts) or "0"
