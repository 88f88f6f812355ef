"""The history as commands use it: opened, brought up to date, and the texts that ``rlhf runs`` and ``show`` share."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_core.cli import output
from rlhf_core.errors import HistoryError, RlhfError

if TYPE_CHECKING:
    from rlhf_core.config.site import Site
    from rlhf_core.history.queries.rows import ListedRun, RunRow
    from rlhf_core.history.store import HistoryStore
    from rlhf_core.run_dir.run import RunDir
    from rlhf_core.schemas.regression import Regression

RunArgument = Annotated[
    str,
    typer.Argument(metavar="RUN", help="Its id or a prefix of it, its name (the newest of that name), or `last`."),
]


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


def catch_up(store: "HistoryStore", run_dir: "RunDir", warn: Callable[[str], None] = output.warn) -> None:
    """Update the history from the run directory: the controller may be gone while the agents continue."""
    from rlhf_core.watchdog.ingest import sync

    try:
        sync(run_dir, store)
    except (RlhfError, OSError) as error:
        warn(f"showing the stored history, which could not be updated: {error}")


def find_undriven(store: "HistoryStore", runs: "Sequence[ListedRun | RunRow]") -> dict[str, datetime]:
    """Find the active runs without a controller. Returns, by id, the time since when."""
    from rlhf_core.control.undriven import undriven_since

    return undriven_since(store, [run["run_id"] for run in runs if run["ended_at"] is None])


def state_text(run: "ListedRun | RunRow", regressed: "Sequence[Regression]", undriven_since: datetime | None) -> str:
    """State of a run, and whether its held-out score fell, its nodes do not start, or no controller drives it."""
    from rlhf_core.schemas import regression

    text = regression.state_text(run["state"], regressed)
    if undriven_since is not None:
        return f"{text}, no controller"
    return text if run["no_nodes_since"] is None else f"{text}, no nodes"


def undriven_text(run: "ListedRun | RunRow", since: datetime) -> str:
    """Sentence about an active run that no controller drives, and the command that continues it."""
    from rlhf_core.control import undriven

    return undriven.undriven_text(run["trial_of"] or run["run_id"], since)


def no_nodes_text(run: "ListedRun | RunRow") -> str:
    """Sentence about a run whose nodes do not start, and the command that ends it; empty for others."""
    if run["no_nodes_since"] is None:
        return ""
    since = datetime.fromisoformat(run["no_nodes_since"])
    return (
        f"The scheduler has started no node for this run since {since:%Y-%m-%d %H:%M} UTC, as when a cloud has no "
        f"capacity. The run goes on asking; `rlhf cancel {run['trial_of'] or run['run_id']}` ends it."
    )


def moment(iso: str) -> str:
    """Format an ISO time to the second."""
    return f"{datetime.fromisoformat(iso):%Y-%m-%d %H:%M:%S}"
