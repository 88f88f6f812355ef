"""Requests in Prefect that have not become runs, for `rlhf runs`, from the file that the site daemon writes."""

from typing import TYPE_CHECKING

from rlhf_core.cli import output

if TYPE_CHECKING:
    from rlhf_core.schemas.site import Requests


def show(*, as_json: bool) -> None:
    """Show only the requests."""
    found = _read()
    if as_json:
        output.print_json([] if found is None else found.model_dump(mode="json")["requests"])
    elif found is None:
        output.print_text("Unknown: the site daemon (`rlhf up`) lists the requests made in Prefect.")
    elif not found.requests:
        output.print_text(f"No request is waiting or refused (as of {found.as_of:%Y-%m-%d %H:%M:%S} UTC).")
    else:
        _print(found)


def show_below_runs() -> None:
    """Show the requests below a list of runs, if there are any."""
    found = _read()
    if found is not None and found.requests:
        output.print_text("")
        _print(found)


def _read() -> "Requests | None":
    from rlhf_core.config.site import load_site
    from rlhf_core.files.whole import read_model
    from rlhf_core.schemas.site import Requests, requests_file

    return read_model(requests_file(load_site().home), Requests)


def _print(found: "Requests") -> None:
    rows = [(one.run_id, one.state, one.asked_at, " ".join(one.why.split())) for one in found.requests]
    title = f"Requests in Prefect that are not runs (as of {found.as_of:%Y-%m-%d %H:%M:%S} UTC)"
    output.print_table(("run", "state", "asked (UTC)", "why"), rows, title)
