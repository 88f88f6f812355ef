"""Text and table sections of a report: incidents and decisions, attempts, checkpoints, checks."""

from collections.abc import Iterator

from rlhf_core.render.evidence import EvidenceExcerpts
from rlhf_core.render.gather import ReportData
from rlhf_core.render.markup import (
    Markup,
    badge,
    code,
    duration,
    facts,
    fold,
    join,
    moment,
    remark,
    section,
    table,
    tag,
    words,
)
from rlhf_core.render.timeline import TimelineIncident, decision_text, suspects_text
from rlhf_core.render.timeline_chart import timeline_chart
from rlhf_core.text.formatting import count, place_text


def timeline_section(record: ReportData) -> Markup:
    """The timeline section: its chart, incidents and decisions, attempts, checkpoints, checks."""
    return section(
        "Timeline",
        timeline_chart(record) or remark("Nothing was started."),
        _incidents(record),
        _lost_time(record),
        _attempts(record),
        _probes(record),
        _checkpoints(record),
        _checks(record),
    )


def _incidents(record: ReportData) -> Markup:
    timeline = record.timeline
    if not timeline.incidents and not timeline.decisions:
        return remark("No incident was recorded.")
    items = [_incident(record, found) for found in timeline.incidents]
    shown = [decision for found in timeline.incidents for decision in timeline.decisions_on(found)]
    # The controller also makes decisions without an incident.
    items += [
        tag("li", tag("b", "decision"), f" · {moment(one.decided_at)}", tag("p", decision_text(one)))
        for one in (made.decision for made in timeline.decisions)
        if one not in shown
    ]
    return tag("ol", *items, class_="incidents")


def _incident(record: ReportData, found: TimelineIncident) -> Markup:
    incident = found.incident
    place = place_text(incident.attempt, incident.restart)
    if incident.step is not None:
        place += f", step {incident.step}"
    if incident.phase:
        place += f", phase {incident.phase}"
    after = incident.detected_after_s
    return tag(
        "li",
        tag("b", words(incident.failure_kind.value)),
        f" · {moment(incident.seen_at)} · {place}",
        tag("p", incident.message),
        facts(
            [
                ("suspects", suspects_text(incident)),
                ("found after", duration(after) if after is not None else ""),
                ("evidence", code(incident.evidence_dir) if incident.evidence_dir else ""),
                *(("decision", decision_text(one)) for one in record.timeline.decisions_on(found)),
            ]
        ),
        *_excerpts(record.evidence.get(incident.evidence_dir)),
    )


def _excerpts(evidence: EvidenceExcerpts | None) -> Iterator[Markup]:
    """Stacks and ends of logs, collapsed except for the first stack, which belongs with the diagnosis."""
    if evidence is None:
        return
    for number, stack in enumerate(evidence.stacks):
        yield fold(stack.name, tag("pre", "\n".join(stack.lines)), is_open=number == 0)
    for log in evidence.logs:
        yield fold(f"end of {log.name}", tag("pre", "\n".join(log.lines)))


def _lost_time(record: ReportData) -> Markup:
    if not record.lost_time:
        return Markup("")
    rows = [
        [
            words(row["failure_kind"]),
            row["num_incidents"],
            duration(row["downtime_s"]),
            duration(row["repeated_s"]),
            duration(row["lost_s"]),
        ]
        for row in record.lost_time
    ]
    headers = ["failure", "incidents", "until working again", "steps made again", "lost in all"]
    return join([tag("h3", "Time lost to failures"), table(headers, rows)])


def _attempts(record: ReportData) -> Markup:
    if not record.attempts:
        return remark("No attempt was submitted.")
    rows = []
    for attempt in record.attempts:
        starts = [row for row in record.restarts if row["attempt"] == attempt["number"]]
        first = [step for row in starts if (step := row["first_step"]) is not None]
        last = [step for row in starts if (step := row["last_step"]) is not None]
        made = f"{first[0]}–{max(last)}" if first and last else None
        rows.append(
            [
                attempt["number"],
                badge(attempt["state"]),
                attempt["scheduler_job_id"],
                attempt["nodes"],
                record.restarts_in_place(attempt["number"]),
                attempt["resumed_from_step"],
                made,
                record.timeline.ending(attempt["number"], attempt["outcome_message"] or attempt["message"]),
            ]
        )
    headers = ["attempt", "state", "job", "nodes", "restarts", "from step", "steps made", "how it ended"]
    return join([tag("h3", "Attempts"), table(headers, rows)])


def _probes(record: ReportData) -> Markup:
    if not record.probes:
        return Markup("")
    rows = [
        [
            row["attempt"],
            row["node"],
            row["device"],
            row["matmul_tflops"],
            "–" if row["compute_share"] is None else f"{row['compute_share']:.0%}",
            row["bandwidth_gb_s"],
            row["latency_ms"],
        ]
        for row in record.probes
    ]
    headers = ["attempt", "node", "device", "TFLOP/s", "of the mean", "GB/s", "latency, ms"]
    return fold(f"Speed of the nodes before training, {count(len(rows), 'probe')}", table(headers, rows))


def _checkpoints(record: ReportData) -> Markup:
    if not record.checkpoints:
        return remark("No checkpoint was completed.")
    rows = [
        [
            row["step"],
            str(row["loop"]).upper(),
            f"{row['bytes'] / 2**20:,.1f} MiB",
            moment(row["completed_at"]),
            "removed" if row["removed_at"] else "kept",
        ]
        for row in record.checkpoints
    ]
    return fold(count(len(rows), "checkpoint"), table(["step", "loop", "size", "complete at", "now"], rows))


def _checks(record: ReportData) -> Markup:
    if not record.checks:
        return Markup("")
    rows = [[badge(row["status"]), code(row["id"]), row["found"], row["advice"]] for row in record.checks]
    findings = sum(row["status"] in ("warning", "blocked") for row in record.checks)
    title = count(len(rows), "preflight check") + (f", {count(findings, 'finding')}" if findings else ", no finding")
    found = table(["status", "check", "found", "advice"], rows, class_="checks")
    if any(row["status"] == "blocked" for row in record.checks):
        return join([tag("h3", title), found])
    return fold(title, found)
