"""Requests in Prefect that are no run, as `rlhf runs` shows them: from the file that the site daemon writes."""

from datetime import datetime
from typing import TYPE_CHECKING

from rlhf_core.cli import output

if TYPE_CHECKING:
    from rlhf_core.schemas.site import Requests


def show(*, as_json: bool) -> None:
    """Show them alone."""
    found = _read()
    if as_json:
        output.print_json([] if found is None else found.model_dump(mode="json")["requests"])
    elif found is None:
        output.print_text("Nothing is known: the daemon of the site (`rlhf up`) lists what was asked for in Prefect.")
    elif not found.requests:
        output.print_text(f"Nothing waits, and nothing was refused (as of {_moment(found.as_of)} UTC).")
    else:
        _print(found)


def show_below_runs() -> None:
    """Show them below a list of runs; nothing where there is nothing of the kind."""
    found = _read()
    if found is not None and found.requests:
        output.print_text("")
        _print(found)


def _read() -> "Requests | None":
    from rlhf_core.config import load_site
    from rlhf_core.run_dir import read_model
    from rlhf_core.schemas.site import Requests, requests_file

    return read_model(requests_file(load_site().home), Requests)


def _print(found: "Requests") -> None:
    rows = [(one.run_id, one.state, _moment(one.asked_at), " ".join(one.why.split())) for one in found.requests]
    title = f"Asked for in Prefect, and no run (as of {_moment(found.as_of)} UTC)"
    output.print_table(("run", "state", "asked (UTC)", "why"), rows, title)


def _moment(time: datetime | None) -> str:
    return "" if time is None else f"{time:%Y-%m-%d %H:%M:%S}"
