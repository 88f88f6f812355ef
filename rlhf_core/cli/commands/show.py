"""``rlhf show``: one run, as text and (``--json``) for programs."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.cli import output
from rlhf_core.cli.commands.history import (
    RunArgument,
    catch_up,
    find_undriven,
    moment,
    no_nodes_text,
    open_history,
    state_text,
    undriven_text,
)
from rlhf_core.render.weight_syncs import weight_sync_text
from rlhf_core.text.formatting import PRUNED_METRICS, attributed, count, figure

if TYPE_CHECKING:
    from rlhf_core.history.queries import RunDetails
    from rlhf_core.history.queries.rows import (
        AttemptRow,
        CheckpointRow,
        CheckResultRow,
        EvaluationRow,
        MetricValue,
        PromotionRow,
        RunControllerRow,
    )
    from rlhf_core.render.timeline import Timeline

_SHOWN_METRICS = 30


def show(run: RunArgument = "last", as_json: output.JsonOption = False) -> None:
    """Show one run: its stages, attempts, incidents, decisions, evaluations, checkpoints and newest metrics."""
    from rlhf_core.history import queries

    with open_history() as store:
        run_id = queries.resolve_run(store, run)
        catch_up(store, queries.run_dir_of(store, run_id))
        details = queries.show_run(store, run_id)
        undriven_since = find_undriven(store, [details.run]).get(run_id)
    if as_json:
        output.print_json({**details.document(), "undriven_since": undriven_since})
        return
    _print_head(details, undriven_since)
    _print_stages(details)
    _print_checks(details.checks)
    timeline = _timeline(details)
    _print_attempts(details.attempts, timeline)
    _print_timeline(timeline)
    _print_evaluations(details.evaluations)
    _print_checkpoints(details.checkpoints)
    _print_metrics(details.metrics)
    _print_time(details)


def _print_head(details: "RunDetails", undriven_since: datetime | None) -> None:
    from rlhf_core.schemas.command_trainer import steps_hint
    from rlhf_core.schemas.regression import regression_text

    run, step = details.run, details.last_step
    output.print_table(
        ("run", "state", "took", "step"),
        [
            (
                run["run_id"],
                state_text(run, details.regressed, undriven_since),
                output.seconds_text(run["seconds"]),
                f"{step}/{run['total_steps']}",
            )
        ],
    )
    if run["message"]:
        output.print_text(run["message"])
    if undriven_since is not None:
        output.print_text(f"{undriven_text(run, undriven_since)}.")
    elif waits := no_nodes_text(run):
        output.print_text(waits)
    if run["undriven_s"] >= 1:
        output.print_text(f"Not counted: {output.seconds_text(run['undriven_s'])} in which nothing drove the run.")
    if run["missing_steps"]:
        output.print_text(f"The run left {run['missing_steps']}.")
    if run["metrics_pruned"]:
        output.print_text(f"{PRUNED_METRICS}.")
    if hint := steps_hint(run["spec"].get("trainer", {}).get("kind", ""), run["state"], step):
        output.print_text(f"The trainer reported no steps; {hint}.")
    if details.regressed:
        output.print_text(f"Regressed: {regression_text(details.regressed)}")
    output.print_text(
        f"Created: {moment(run['created_at'])} UTC, asked for by {attributed(run['owner'], run['owner_account'])}"
    )
    if run["trial_of"]:
        output.print_text(f"Trial of: {run['trial_of']}")
    if run["tags"]:
        output.print_text(f"Tags: {', '.join(run['tags'])}")
    output.print_text(f"Directory: {run['run_dir']}")
    _print_controllers(details.controllers, is_driven=undriven_since is None)
    _print_promotion(details.promotion)


def _print_controllers(controllers: "Sequence[RunControllerRow]", *, is_driven: bool) -> None:
    if controllers:
        from rlhf_core.launch.lease import owner_text

        several = f", after {count(len(controllers) - 1, 'other')}" if len(controllers) > 1 else ""
        title = "Driven by" if is_driven else "Last driven by"
        newest = controllers[-1]
        since = datetime.fromisoformat(newest["started_at"])
        output.print_text(f"{title}: {owner_text(newest['controller'], since)}{several}")
    # The newest controller with a page: one that only ended the run, for instance, has none.
    pages = [one["flow_run_url"] for one in controllers if one["flow_run_url"]]
    if pages:
        output.print_text(f"In Prefect: {pages[-1]}")


def _print_promotion(promotion: "PromotionRow | None") -> None:
    if promotion is None:
        return
    parts = [f"Promotion: {promotion['state']}, checkpoint of step {promotion['checkpoint_step']}"]
    parts += [f"by {promotion['decided_by']}"] if promotion["decided_by"] else []
    parts += [promotion["path"]] if promotion["path"] else []
    reason = f" ({promotion['reason']})" if promotion["reason"] else ""
    output.print_text(", ".join(parts) + reason)


def _print_stages(details: "RunDetails") -> None:
    elsewhere = {_words(row["message"]) for row in (details.run, *details.attempts)}
    rows = [
        (
            stage["name"],
            stage["state"],
            output.seconds_text(stage["seconds"]),
            stage["attempt"] or "",
            "" if _words(stage["message"]) in elsewhere else stage["message"],
        )
        for stage in details.stages
    ]
    output.print_section(("stage", "state", "took", "attempt", ""), rows, "Stages")


def _words(message: str) -> str:
    return " ".join(message.split())


def _print_checks(checks: "Sequence[CheckResultRow]") -> None:
    rows = [
        (check["id"], check["status"], check["found"], check["advice"])
        for check in checks
        if check["status"] in ("warning", "blocked")
    ]
    output.print_section(("check", "status", "found", "advice"), rows, "Findings before training")


def _timeline(details: "RunDetails") -> "Timeline":
    from rlhf_core.render.timeline import timeline_from_rows
    from rlhf_core.run_dir.run import RunDir

    run = details.run
    return timeline_from_rows(RunDir(Path(run["run_dir"])), run, details.incidents, details.decisions, details.restarts)


def _print_attempts(attempts: "Sequence[AttemptRow]", timeline: "Timeline") -> None:
    rows = [
        (
            attempt["number"],
            attempt["state"],
            attempt["scheduler_job_id"],
            attempt["nodes"],
            attempt["resumed_from_step"] or "the beginning",
            attempt["num_restarts"],
            timeline.ending(attempt["number"], attempt["message"]),
        )
        for attempt in attempts
    ]
    output.print_section(("attempt", "state", "job", "nodes", "from step", "restarts", "why"), rows, "Attempts")
    for attempt in attempts:
        excluded = (attempt["placement"] or {}).get("exclusion_reasons", {})
        for node, why in excluded.items():
            output.print_text(f"Attempt {attempt['number']} excluded {node}: {why}")


def _print_timeline(timeline: "Timeline") -> None:
    entries = timeline.entries()
    if entries:
        output.print_text("\nIncidents and decisions")
    for entry in entries:
        output.print_text(f"  {entry.time:%Y-%m-%d %H:%M:%S}  {entry.text}")


def _print_evaluations(evaluations: "Sequence[EvaluationRow]") -> None:
    rows = []
    for name in dict.fromkeys(evaluation["name"] for evaluation in evaluations):
        found = {evaluation["when"]: evaluation for evaluation in evaluations if evaluation["name"] == name}
        before, after = found.get("before"), found.get("after")
        rows.append(
            (
                name,
                next(iter(found.values()))["metric"],
                output.measured_text(before),
                output.measured_text(after),
                _change(before, after),
            )
        )
    output.print_section(("", "measure", "before", "after", "change"), rows, "Evaluation (mean, confidence interval)")


def _change(before: "EvaluationRow | None", after: "EvaluationRow | None") -> str:
    if before is None or after is None or before["value"] is None or after["value"] is None:
        return "-"
    return f"{after['value'] - before['value']:+.3f}"


def _print_checkpoints(checkpoints: "Sequence[CheckpointRow]") -> None:
    kept = [checkpoint for checkpoint in checkpoints if checkpoint["removed_at"] is None]
    rows = [
        (
            checkpoint["step"],
            checkpoint["path"],
            f"{checkpoint['bytes'] / 2**20:.1f} MiB",
            moment(checkpoint["completed_at"]),
            f"end of {checkpoint['loop']}" if checkpoint["loop_finished"] else checkpoint["loop"],
        )
        for checkpoint in kept
    ]
    removed = len(checkpoints) - len(kept)
    title = "Checkpoints" + (f" ({removed} more removed by retention)" if removed else "")
    output.print_section(("step", "folder", "size", "complete (UTC)", "loop"), rows, title)


def _print_metrics(metrics: "Mapping[str, MetricValue]") -> None:
    names = sorted(metrics, key=lambda name: (name.split("/")[0] in ("time", "speed"), name))
    rows = [(name, _number(metrics[name]["value"]), metrics[name]["step"]) for name in names[:_SHOWN_METRICS]]
    more = len(names) - len(rows)
    title = "Newest metrics" + (f" ({more} more with --json)" if more > 0 else "")
    output.print_section(("metric", "value", "step"), rows, title)


def _print_time(details: "RunDetails") -> None:
    goodput, syncs = details.goodput, weight_sync_text(details.weight_syncs)
    if syncs:
        output.print_text(f"\nWeight syncs: {syncs}.")
    lines = []
    if goodput["productive_s"]:
        share = f" ({goodput['ettr']:.0%} of the time outside of queues)" if goodput["ettr"] is not None else ""
        lines.append(f"Productive training: {output.seconds_text(goodput['productive_s'])}{share}.")
    for loss in details.lost_time:
        kind, lost = loss["failure_kind"].replace("_", " "), output.seconds_text(loss["lost_s"])
        lines.append(f"Lost to {kind}: {lost} in {count(loss['num_incidents'], 'incident')}.")
    if lines:
        output.print_text("\n" + "\n".join(lines))


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else figure(value, 5)
