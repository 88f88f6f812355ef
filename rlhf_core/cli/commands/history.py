"""``rlhf runs``, ``show`` and ``nodes``: the history, as text and (``--json``) for programs.

Heavy modules are imported inside the functions, so that ``rlhf --help`` stays fast.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf_core.cli import output, pending_requests
from rlhf_core.errors import BadInput, HistoryError, RlhfError
from rlhf_core.machine.accounts import attributed_here
from rlhf_core.render.weight_syncs import weight_sync_text
from rlhf_core.schemas.attempts import RunState
from rlhf_core.text.formatting import attributed, count, figure

if TYPE_CHECKING:
    from rlhf_core.config.site import Site
    from rlhf_core.history.store import HistoryStore
    from rlhf_core.watchdog.node_records import NodeRecord

Facts = Mapping[str, Any]

RunArgument = Annotated[
    str,
    typer.Argument(metavar="RUN", help="Its id or a prefix of it, its name (the newest of that name), or `last`."),
]

_SHOWN_METRICS = 30


def runs(
    state: Annotated[RunState | None, typer.Option(help="Only runs in this state.")] = None,
    name: Annotated[str | None, typer.Option(help="Only runs of this name.")] = None,
    tag: Annotated[str | None, typer.Option(help="Only runs with this tag.")] = None,
    owner: Annotated[str | None, typer.Option(help="Only runs of this owner.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Largest number of runs, newest first.")] = 50,
    trials: Annotated[bool, typer.Option("--trials", help="Also list the trials of runs.")] = False,
    queued: Annotated[
        bool,
        typer.Option("--queued", help="List only requests in Prefect that are not runs: waiting or refused."),
    ] = False,
    as_json: output.JsonOption = False,
) -> None:
    """List runs, newest first, followed by waiting or refused requests in Prefect as the site daemon last saw them."""
    if queued:
        pending_requests.show(as_json=as_json)
        return
    from rlhf_core.history import queries

    with open_history() as store:
        wanted = state.value if state else None
        listed = queries.list_runs(store, wanted, name, limit + 1, trials=trials, tag=tag, owner=owner)
        found = _with_undriven(store, listed[:limit])
    if as_json:
        output.print_json(found)
        return
    is_whole = (state, name, tag, owner) == (None,) * 4
    if not found:
        output.print_text("No runs yet." if is_whole else "No such runs.")
    else:
        _print_runs(found, trials=trials)
        if len(listed) > limit:
            output.print_text(f"These are the newest {limit}; --limit {2 * limit} lists more.")
    if is_whole:
        pending_requests.show_below_runs()


def _print_runs(found: Sequence[Facts], *, trials: bool) -> None:
    rows = [
        (
            run["run_id"],
            _state(run, run["regressed"], run["undriven_since"]),
            # the id contains the date too; both are too wide
            run["trial_of"] if trials else _moment(run["created_at"]),
            output.seconds_text(run["seconds"]),
            f"{run['last_step'] or 0}/{run['total_steps']}",
            run["num_attempts"],
        )
        for run in found
    ]
    columns = ("run", "state", "trial of" if trials else "created (UTC)", "took", "step", "attempts")
    output.print_table(columns, rows, spare=columns[2])
    for run in found:
        if run["missing_steps"]:
            output.print_text(f"{run['run_id']}: {run['missing_steps']}")
        if run["undriven_since"] is not None:
            output.print_text(f"{run['run_id']}: {_undriven_text(run, run['undriven_since'])}.")


def show(run: RunArgument = "last", as_json: output.JsonOption = False) -> None:
    """Show one run: its stages, attempts, incidents, decisions, evaluations, checkpoints and newest metrics."""
    from rlhf_core.history import queries

    with open_history() as store:
        run_id = queries.resolve_run(store, run)
        catch_up(store, run_id)
        shown = queries.show_run(store, run_id)
        (with_undriven,) = _with_undriven(store, [shown["run"]])
        shown["undriven_since"] = with_undriven["undriven_since"]
    if as_json:
        output.print_json(shown)
        return
    _print_head(shown)
    _print_stages(shown["stages"])
    _print_checks(shown["checks"])
    _print_attempts(shown["attempts"])
    _print_timeline(shown)
    _print_evaluations(shown["evaluations"])
    _print_checkpoints(shown["checkpoints"])
    _print_metrics(shown["metrics"])
    _print_time(shown)


def nodes(
    clear: Annotated[
        str, typer.Option("--clear", metavar="NODE", help="Record that this node was repaired; takes --reason.")
    ] = "",
    reason: Annotated[str, typer.Option(help="With --clear: the repair; it is recorded.")] = "",
    by: Annotated[
        str, typer.Option("--by", help="With --clear: the name to record, beside your user name. Default: you.")
    ] = "",
    as_json: output.JsonOption = False,
) -> None:
    """Show the strikes against nodes from the incidents of all runs, and which nodes are currently excluded.

    A strike counts half after three days. A lost node, or one with a failed GPU, is excluded for a day; one
    with repeated strikes for six hours. New attempts on Slurm avoid these nodes as long as enough others are available.
    With --clear, previous strikes no longer count; the history keeps them.
    """
    from rlhf_core.config.site import load_site
    from rlhf_core.schemas.base import utc_now
    from rlhf_core.watchdog.node_records import clear_node, node_records

    if (reason or by) and not clear:
        raise BadInput("--reason and --by require --clear NODE")
    runs = load_site().runs_dir
    with open_history() as store:
        if clear:
            found = [clear_node(store, runs, clear, attributed_here(by), reason, utc_now())]
        else:
            found = node_records(store, utc_now(), runs)
    if as_json:
        output.print_json(
            [{**vars(one.standing), "cleared": one.cleared, "num_cleared": one.num_cleared} for one in found]
        )
    elif clear:
        _print_cleared(found[0])
    elif not found:
        output.print_text("No node has strikes.")
    else:
        _print_nodes(found)


def _print_nodes(found: "Sequence[NodeRecord]") -> None:
    rows = [
        (
            one.standing.node,
            f"{one.standing.score:.2f}",
            one.standing.num_strikes,
            one.standing.last_kind.value,
            one.standing.last_at,
            one.standing.excluded_until,
            _cleared(one),
        )
        for one in found
    ]
    output.print_table(("node", "score", "strikes", "last", "when (UTC)", "excluded until", "cleared"), rows)


def _print_cleared(found: "NodeRecord") -> None:
    node = found.standing.node
    output.print_text(
        f"{node} is cleared ({_cleared(found)}). New attempts may use it again, and later strikes count. A run that "
        "already excluded it continues without it."
    )


def _cleared(one: "NodeRecord") -> str:
    if one.cleared is None:
        return ""
    when = f"{one.cleared.time:%Y-%m-%d %H:%M:%S}"
    return f"{count(one.num_cleared, 'strike')}, {when} by {one.cleared.by}: {one.cleared.reason}"


# ---------------------------------------------------------------------------------------------------------------------
# The history


def catch_up(store: "HistoryStore", run_id: str) -> None:
    """Update the history from the run directory: the controller may be gone while the agents continue."""
    from rlhf_core.history import queries
    from rlhf_core.run_dir.run import RunDir
    from rlhf_core.watchdog.ingest import sync

    run_dir = RunDir(Path(queries.run_dir_of(store, run_id)))
    try:
        sync(run_dir, store)
    except (RlhfError, OSError) as error:
        output.warn(f"showing the stored history, which could not be updated: {error}")


def _with_undriven(store: "HistoryStore", found: Sequence[Facts]) -> list[dict[str, Any]]:
    """Add ``undriven_since`` to runs: the time since which an active run has had no controller; otherwise None."""
    from rlhf_core.control.undriven import undriven_since

    since = undriven_since(store, [run["run_id"] for run in found if run["ended_at"] is None])
    return [{**run, "undriven_since": since.get(run["run_id"])} for run in found]


# ---------------------------------------------------------------------------------------------------------------------
# Text and tables


def _state(run: Facts, regressed: Sequence[Facts], undriven_since: datetime | None) -> str:
    text = output.state_text(run["state"], regressed)
    return text if undriven_since is None else f"{text}, no controller"


def _undriven_text(run: Facts, since: datetime) -> str:
    from rlhf_core.control.undriven import undriven_text

    return undriven_text(run["trial_of"] or run["run_id"], since)


def _print_head(shown: Facts) -> None:
    from rlhf_core.history import queries
    from rlhf_core.schemas.command_trainer import steps_hint

    run = shown["run"]
    step = queries.last_step(shown["metrics"])
    output.print_table(
        ("run", "state", "took", "step"),
        [
            (
                run["run_id"],
                _state(run, shown["regressed"], shown["undriven_since"]),
                output.seconds_text(run["seconds"]),
                f"{step}/{run['total_steps']}",
            )
        ],
    )
    if run["message"]:
        output.print_text(run["message"])
    if shown["undriven_since"] is not None:
        output.print_text(f"{_undriven_text(run, shown['undriven_since'])}.")
    if run["undriven_s"] >= 1:
        output.print_text(f"Not counted: {output.seconds_text(run['undriven_s'])} in which nothing drove the run.")
    if run["missing_steps"]:
        output.print_text(f"The run left {run['missing_steps']}.")
    if hint := steps_hint(run["spec"].get("trainer", {}).get("kind", ""), run["state"], step):
        output.print_text(f"The trainer reported no steps; {hint}.")
    if shown["regressed"]:
        output.print_text(f"Regressed: {output.regression_text(shown['regressed'])}")
    output.print_text(
        f"Created: {_moment(run['created_at'])} UTC, asked for by {attributed(run['owner'], run['owner_account'])}"
    )
    if run["trial_of"]:
        output.print_text(f"Trial of: {run['trial_of']}")
    if run["tags"]:
        output.print_text(f"Tags: {', '.join(run['tags'])}")
    output.print_text(f"Directory: {run['run_dir']}")
    _print_controllers(shown["controllers"], is_driven=shown["undriven_since"] is None)
    _print_promotion(shown["promotion"])


def _print_controllers(controllers: Sequence[Facts], *, is_driven: bool) -> None:
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


def _print_promotion(promotion: Facts) -> None:
    if not promotion:
        return
    parts = [f"Promotion: {promotion['state']}, checkpoint of step {promotion['checkpoint_step']}"]
    parts += [f"by {promotion['decided_by']}"] if promotion["decided_by"] else []
    parts += [promotion["path"]] if promotion["path"] else []
    reason = f" ({promotion['reason']})" if promotion["reason"] else ""
    output.print_text(", ".join(parts) + reason)


def _print_stages(stages: Sequence[Facts]) -> None:
    rows = [
        (stage["name"], stage["state"], output.seconds_text(stage["seconds"]), stage["attempt"] or "", stage["message"])
        for stage in stages
    ]
    output.print_section(("stage", "state", "took", "attempt", ""), rows, "Stages")


def _print_checks(checks: Sequence[Facts]) -> None:
    rows = [
        (check["id"], check["status"], check["found"], check["advice"])
        for check in checks
        if check["status"] in ("warning", "blocked")
    ]
    output.print_section(("check", "status", "found", "advice"), rows, "Findings before training")


def _print_attempts(attempts: Sequence[Facts]) -> None:
    rows = [
        (
            attempt["number"],
            attempt["state"],
            attempt["scheduler_job_id"],
            attempt["nodes"],
            attempt["resumed_from_step"] or "the beginning",
            attempt["num_restarts"],
            attempt["message"],
        )
        for attempt in attempts
    ]
    output.print_section(("attempt", "state", "job", "nodes", "from step", "restarts", "why"), rows, "Attempts")


def _print_timeline(shown: Facts) -> None:
    from rlhf_core.render.timeline import timeline_from_rows
    from rlhf_core.run_dir.run import RunDir

    run = shown["run"]
    timeline = timeline_from_rows(
        RunDir(Path(run["run_dir"])), run, shown["incidents"], shown["decisions"], shown["restarts"]
    )
    entries = timeline.entries()
    if entries:
        output.print_text("\nIncidents and decisions")
    for entry in entries:
        output.print_text(f"  {entry.time:%Y-%m-%d %H:%M:%S}  {entry.text}")


def _print_evaluations(evaluations: Sequence[Facts]) -> None:
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


def _change(before: Facts | None, after: Facts | None) -> str:
    if before is None or after is None or before["value"] is None or after["value"] is None:
        return "-"
    return f"{after['value'] - before['value']:+.3f}"


def _print_checkpoints(checkpoints: Sequence[Facts]) -> None:
    kept = [checkpoint for checkpoint in checkpoints if checkpoint["removed_at"] is None]
    rows = [
        (
            checkpoint["step"],
            checkpoint["path"],
            f"{checkpoint['bytes'] / 2**20:.1f} MiB",
            _moment(checkpoint["completed_at"]),
            f"end of {checkpoint['loop']}" if checkpoint["loop_finished"] else checkpoint["loop"],
        )
        for checkpoint in kept
    ]
    removed = len(checkpoints) - len(kept)
    title = "Checkpoints" + (f" ({removed} more removed by retention)" if removed else "")
    output.print_section(("step", "folder", "size", "complete (UTC)", "loop"), rows, title)


def _print_metrics(metrics: Mapping[str, Facts]) -> None:
    names = sorted(metrics, key=lambda name: (name.split("/")[0] in ("time", "speed"), name))
    rows = [(name, _number(metrics[name]["value"]), metrics[name]["step"]) for name in names[:_SHOWN_METRICS]]
    more = len(names) - len(rows)
    title = "Newest metrics" + (f" ({more} more with --json)" if more > 0 else "")
    output.print_section(("metric", "value", "step"), rows, title)


def _print_time(shown: Facts) -> None:
    goodput, syncs = shown["goodput"], weight_sync_text(shown["weight_syncs"])
    if syncs:
        output.print_text(f"\nWeight syncs: {syncs}.")
    lines = []
    if goodput and goodput["productive_s"]:
        share = f" ({goodput['ettr']:.0%} of the time outside of queues)" if goodput["ettr"] is not None else ""
        lines.append(f"Productive training: {output.seconds_text(goodput['productive_s'])}{share}.")
    for loss in shown["lost_time"]:
        kind, lost = loss["failure_kind"].replace("_", " "), output.seconds_text(loss["lost_s"])
        lines.append(f"Lost to {kind}: {lost} in {count(loss['num_incidents'], 'incident')}.")
    if lines:
        output.print_text("\n" + "\n".join(lines))


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else figure(value, 5)


def _moment(iso: str) -> str:
    return f"{datetime.fromisoformat(iso):%Y-%m-%d %H:%M:%S}"


def open_history() -> "HistoryStore":
    """Open the history of this site."""
    from rlhf_core.config.site import load_site
    from rlhf_core.history.store import HistoryStore

    return HistoryStore(load_site().database_url)


def history_if_usable(site: "Site", without: str) -> "AbstractContextManager[HistoryStore | None]":
    """Open the history; None if it cannot be used, with a warning that ends in what the command does ``without`` it."""
    from rlhf_core.history.store import HistoryStore

    try:
        return HistoryStore(site.database_url)
    except HistoryError as error:
        output.warn(f"{error} {without}")
        return nullcontext()
