"""``rlhf runs``: the runs of this site, and the requests in Prefect that have not become runs."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_core.cli import output
from rlhf_core.cli.commands.history import (
    find_undriven,
    moment,
    no_nodes_text,
    open_history,
    state_text,
    undriven_text,
)
from rlhf_core.errors import BadInput
from rlhf_core.schemas.attempts import RunState

if TYPE_CHECKING:
    from rlhf_core.history.queries.rows import ListedRun
    from rlhf_core.schemas.site import Requests


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
    is_whole = (state, name, tag, owner) == (None,) * 4
    if queued and not is_whole:
        raise BadInput(
            "found --queued with --state, --name, --tag or --owner, which select runs; expected --queued alone"
        )
    if queued:
        _show_requests(as_json=as_json)
        return
    from rlhf_core.history import queries

    with open_history() as store:
        wanted = state.value if state else None
        listed = queries.list_runs(store, wanted, name, limit + 1, trials=trials, tag=tag, owner=owner)
        found = listed[:limit]
        undriven = find_undriven(store, found)
    if as_json:
        output.print_json([{**run, "undriven_since": undriven.get(run["run_id"])} for run in found])
        return
    if not found:
        output.print_text("No runs yet." if is_whole else "No such runs.")
    else:
        _print_runs(found, undriven, trials=trials)
        if len(listed) > limit:
            output.print_text(f"These are the newest {limit}; --limit {2 * limit} lists more.")
    if is_whole and (pending := _read_requests()) is not None and pending.requests:
        output.print_text("")
        _print_requests(pending)


def _print_runs(found: "Sequence[ListedRun]", undriven: Mapping[str, datetime], *, trials: bool) -> None:
    rows = [
        (
            run["run_id"],
            state_text(run, run["regressed"], undriven.get(run["run_id"])),
            # the id contains the date too; both are too wide
            run["trial_of"] if trials else moment(run["created_at"]),
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
        if run["run_id"] in undriven:
            output.print_text(f"{run['run_id']}: {undriven_text(run, undriven[run['run_id']])}.")
        elif waits := no_nodes_text(run):
            output.print_text(f"{run['run_id']}: {waits}")


def _show_requests(*, as_json: bool) -> None:
    found = _read_requests()
    if as_json:
        output.print_json([] if found is None else found.model_dump(mode="json")["requests"])
    elif found is None:
        output.print_text("Unknown: the site daemon (`rlhf up`) lists the requests made in Prefect.")
    elif not found.requests:
        output.print_text(f"No request is waiting or refused (as of {found.as_of:%Y-%m-%d %H:%M:%S} UTC).")
    else:
        _print_requests(found)


def _read_requests() -> "Requests | None":
    """Requests as of the file that the site daemon writes; None without one."""
    from rlhf_core.config.site import load_site
    from rlhf_core.files.whole import read_model
    from rlhf_core.schemas.site import Requests, requests_file

    return read_model(requests_file(load_site().home), Requests)


def _print_requests(found: "Requests") -> None:
    rows = [(one.run_id, one.state, one.asked_at, " ".join(one.why.split())) for one in found.requests]
    title = f"Requests in Prefect that are not runs (as of {found.as_of:%Y-%m-%d %H:%M:%S} UTC)"
    output.print_table(("run", "state", "asked (UTC)", "why"), rows, title)
