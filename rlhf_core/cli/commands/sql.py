"""``rlhf sql``: statements and saved queries on the history."""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_core.cli import output
from rlhf_core.cli.commands.history import open_history
from rlhf_core.cli.query_deadline import enforce_deadline
from rlhf_core.errors import BadInput
from rlhf_core.history.sql_limits import WorkClock

if TYPE_CHECKING:
    from rlhf_core.history.saved_queries import SavedQuery, SqlResult

_TABLE_ROWS = 1000
"""Maximum number of rows of a table by default."""


def sql(
    query: Annotated[
        str,
        typer.Argument(
            metavar="QUERY",
            help='One statement, for instance "SELECT name, state FROM runs"; the name of a saved query; '
            "or - to read a statement from standard input.",
            show_default=False,
        ),
    ] = "",
    values: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME=VALUE", help="Values for the arguments of the query.", show_default=False),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the saved queries and their arguments.")] = False,
    show_it: Annotated[
        bool, typer.Option("--show", help="Print the statement of a saved query instead of running it.")
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help=f"Maximum number of rows. Default: {_TABLE_ROWS} in a table, all with --json."),
    ] = None,
    as_json: output.JsonOption = False,
) -> None:
    """Query the history with SQL, or run a saved query by its name.

    Read-only: the database itself refuses anything else, and stops after five minutes. Values are bound to the
    parameters :name of the statement and never become part of its text.

    Tables: runs, stages, checks, attempts, restarts, attempt_nodes,
    node_speeds, node_telemetry, metric_keys, metrics, latest_metrics, incidents, decisions,
    checkpoints, evaluations, evaluation_samples, weight_versions, weight_syncs,
    node_strikes, events, run_tags, goodput_cache, controllers, promotions, leases,
    ingest_offsets.

    Views: run_curve (the metrics that count, by step), run_goodput (all_goodput for all
    runs), attempt_times, undriven_times (without a controller), duplicate_incidents,
    interruptions, run_lost_time, incident_lost_time, run_recoveries, run_step_time, node_health,
    node_figures (telemetry over time), node_imbalance (what stood out).
    """
    from rlhf_core.history import read_only, saved_queries

    if listed:
        _list_queries(as_json)
        return
    if not query:
        raise BadInput("nothing to run: pass a statement or the name of a saved query (`rlhf sql --list`)")
    text = _read_statement() if query == "-" else query
    found = saved_queries.find(text) if saved_queries.is_name(text) else saved_queries.parse(text)
    clock = WorkClock(read_only.QUERY_TIMEOUT_S)
    with open_history() as store, enforce_deadline(clock):
        if show_it:
            output.print_text(saved_queries.statement(found, saved_queries.dialect_of(store)).rstrip())
            return
        given = _parse_values(values or [])
        if as_json:
            with saved_queries.stream(store, found, given, clock) as streamed:
                _require_distinct(streamed.columns)
                rows = (dict(zip(streamed.columns, row, strict=True)) for row in streamed.rows)
                more = output.print_json_rows(rows, limit)
        else:
            limit = limit or _TABLE_ROWS
            result = saved_queries.run(store, found, given, limit, clock)
            more = result.truncated
            _print_result(result, found, given)
    if more:
        output.warn(f"only the first {limit} rows are shown; use --limit for more")


def _read_statement() -> str:
    """Read a statement from standard input.

    Raises:
        BadInput: it is not text.
    """
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise BadInput(f"standard input is not {error.encoding} text: {error.reason} at byte {error.start}") from None


def _require_distinct(columns: Sequence[str]) -> None:
    """Refuse columns of one name, as of a join: an object of JSON keeps only the last of them.

    Raises:
        BadInput: two columns have the same name.
    """
    twice = [name for name in dict.fromkeys(columns) if columns.count(name) > 1]
    if twice:
        raise BadInput(
            f"found several columns named {', '.join(twice)}, of which JSON would keep only the last; give them names "
            f"of their own with AS, for instance runs.{twice[0]} AS run_{twice[0]}"
        )


def _print_result(result: "SqlResult", query: "SavedQuery", given: Mapping[str, str]) -> None:
    if result.columns and not result.rows and query.name:
        with_what = " ".join(f"{one.name}={given.get(one.name, one.default)}" for one in query.arguments)
        output.print_text(f"No rows for {with_what}." if with_what else "No rows.")
    elif result.columns and output.fits(result.columns, result.rows):
        output.print_table(result.columns, result.rows)
    elif result.columns:
        output.print_records(result.columns, result.rows)


def _list_queries(as_json: bool) -> None:
    from rlhf_core.history import saved_queries

    found = saved_queries.saved()
    if as_json:
        output.print_json([{**vars(one), "arguments": [vars(argument) for argument in one.arguments]} for one in found])
        return
    rows = [
        (
            one.name,
            one.title,
            " ".join(
                argument.name + ("=" + argument.default if argument.default is not None else "=...")
                for argument in one.arguments
            ),
        )
        for one in found
    ]
    output.print_table(("query", "meaning", "arguments"), rows)


def _parse_values(values: Sequence[str]) -> dict[str, str]:
    """Parse values given as ``NAME=VALUE``.

    Raises:
        BadInput: a value has no name.
    """
    found = {}
    for given in values:
        name, separator, value = given.partition("=")
        if not separator or not name:
            raise BadInput(f"found {given!r}, expected NAME=VALUE, for instance days=7")
        found[name] = value
    return found
