"""``rlhf nodes``: the strikes against nodes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_core.cli import output
from rlhf_core.cli.commands.history import open_history
from rlhf_core.errors import BadInput
from rlhf_core.machine.accounts import attributed_here
from rlhf_core.text.formatting import count

if TYPE_CHECKING:
    from rlhf_core.watchdog.node_records import NodeRecord


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

    A run counts once against a node, half after three days. A lost node, or one with a failed GPU, is excluded for a
    day; one with strikes by several runs for six hours. New attempts on Slurm avoid these nodes as long as enough
    others are available. With --clear, previous strikes no longer count; the history keeps them.
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
