"""What happened to a run, in words and tables: incidents and decisions, attempts, checkpoints, checks."""

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_core.reports.evidence import Evidence
from rlhf_core.reports.gather import RunRecord, find_row
from rlhf_core.reports.markup import (
    Markup,
    badge,
    code,
    duration,
    facts,
    fold,
    join,
    moment,
    section,
    table,
    tag,
    words,
)
from rlhf_core.reports.timeline import timeline
from rlhf_core.words import count, place_text

_ACTIONS = {
    "restart_in_place": "start the workers again in the same allocation",
    "new_attempt": "submit again and go on from the last complete checkpoint",
    "stop": "stop the run",
}


def what_happened(record: RunRecord) -> Markup:
    """The clock, what went wrong and what was done about it, and the attempts."""
    return section(
        "What happened",
        timeline(record) or tag("p", "Nothing was started.", class_="note"),
        _incidents(record),
        _lost_time(record),
        _attempts(record),
        _probes(record),
        _checkpoints(record),
        _checks(record),
    )


def _incidents(record: RunRecord) -> Markup:
    if not record.incidents and not record.decisions:
        return tag("p", "No incident was recorded.", class_="note")
    told = [_incident(record, incident) for incident in record.incidents]
    known = {incident.get("incident_id") for incident in record.incidents}
    # A decision of the controller may be about an incident that an agent found, or about none.
    told += [
        tag("li", tag("b", "decision"), f" · {moment(decision['decided_at'])}", tag("p", _decision(decision)))
        for decision in record.decisions
        if decision.get("decision_id") not in known
    ]
    return tag("ol", *told, class_="incidents")


def _incident(record: RunRecord, incident: Mapping[str, Any]) -> Markup:
    place = place_text(incident["attempt"], incident["restart"])
    if incident["step"] is not None:
        place += f", step {incident['step']}"
    if incident["phase"]:
        place += f", phase {incident['phase']}"
    suspects = [f"rank {rank}" for rank in incident["suspect_ranks"]] + list(incident["suspect_nodes"])
    found_after = incident["detected_after_s"]
    decision = find_row(record.decisions, decision_id=incident["incident_id"])
    return tag(
        "li",
        tag("b", words(incident["failure_kind"])),
        f" · {moment(incident['seen_at'])} · {place}",
        tag("p", incident["message"]),
        facts(
            [
                ("suspects", ", ".join(suspects)),
                ("found after", duration(found_after) if found_after is not None else ""),
                ("evidence", code(incident["evidence_dir"]) if incident["evidence_dir"] else ""),
                ("decision", _decision(decision) if decision else ""),
            ]
        ),
        *_excerpts(record.evidence.get(incident["incident_id"])),
    )


def _excerpts(evidence: Evidence | None) -> Iterator[Markup]:
    """Stacks and ends of logs, closed at first but for the first stack: a diagnosis is read with it."""
    if evidence is None:
        return
    for number, stack in enumerate(evidence.stacks):
        yield fold(stack.name, tag("pre", "\n".join(stack.lines)), is_open=number == 0)
    for log in evidence.logs:
        yield fold(f"end of {log.name}", tag("pre", "\n".join(log.lines)))


def _decision(decision: Mapping[str, Any]) -> str:
    """A decision as a sentence or more."""
    action = _ACTIONS.get(decision["action"], decision["action"])
    said = [f"{action} (by the {decision['decided_by']}): {decision['reason']}."]
    if decision["delay_s"]:
        said.append(f"Waited {duration(decision['delay_s'])}.")
    if decision["excluded_nodes"]:
        said.append(f"Without {', '.join(decision['excluded_nodes'])}.")
    if decision["config_diff"]:
        said.append(
            "Changed: " + ", ".join(f"{name} = {value}" for name, value in decision["config_diff"].items()) + "."
        )
    if decision["resume_checkpoint"]:
        said.append(f"Going on from {decision['resume_checkpoint']}.")
    return " ".join(said).replace("..", ".")


def _lost_time(record: RunRecord) -> Markup:
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


def _attempts(record: RunRecord) -> Markup:
    if not record.attempts:
        return tag("p", "No attempt was submitted.", class_="note")
    rows = []
    for attempt in record.attempts:
        starts = [row for row in record.restarts if row["attempt"] == attempt["number"]]
        steps = [row for row in starts if row["first_step"] is not None]
        made = f"{steps[0]['first_step']}–{max(row['last_step'] for row in steps)}" if steps else None
        rows.append(
            [
                attempt["number"],
                badge(attempt["state"]),
                attempt["scheduler_job_id"],
                attempt["nodes"],
                record.restarts_in_place(attempt["number"]),
                attempt["resumed_from_step"],
                made,
                attempt.get("outcome_message") or attempt["message"],
            ]
        )
    headers = ["attempt", "state", "job", "nodes", "restarts", "from step", "steps made", "how it ended"]
    return join([tag("h3", "Attempts"), table(headers, rows)])


def _probes(record: RunRecord) -> Markup:
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


def _checkpoints(record: RunRecord) -> Markup:
    if not record.checkpoints:
        return tag("p", "No checkpoint was completed.", class_="note")
    rows = [
        [
            row["step"],
            str(row["stage"]).upper(),
            f"{row['bytes'] / 2**20:,.1f} MiB",
            moment(row["completed_at"]),
            "removed" if row["removed_at"] else "kept",
        ]
        for row in record.checkpoints
    ]
    return fold(count(len(rows), "checkpoint"), table(["step", "loop", "size", "complete at", "now"], rows))


def _checks(record: RunRecord) -> Markup:
    if not record.checks:
        return Markup("")
    rows = [[badge(row["status"]), code(row["id"]), row["found"], row["advice"]] for row in record.checks]
    findings = sum(row["status"] in ("warning", "blocked") for row in record.checks)
    title = count(len(rows), "preflight check") + (f", {count(findings, 'finding')}" if findings else ", no finding")
    found = table(["status", "check", "found", "advice"], rows)
    if any(row["status"] == "blocked" for row in record.checks):
        return join([tag("h3", title), found])
    return fold(title, found)
