"""``rlhf runs``: the runs of this site.

Heavy modules are imported inside the functions, so that ``rlhf --help`` stays fast.
"""

from collections.abc import Sequence
from typing import Annotated

import typer

from rlhf_core.cli import output, pending_requests
from rlhf_core.cli.commands.history import Facts, moment, open_history, state_text, undriven_text, with_undriven
from rlhf_core.schemas.attempts import RunState


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
        found = with_undriven(store, listed[:limit])
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
            state_text(run, run["regressed"], run["undriven_since"]),
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
        if run["undriven_since"] is not None:
            output.print_text(f"{run['run_id']}: {undriven_text(run, run['undriven_since'])}.")
