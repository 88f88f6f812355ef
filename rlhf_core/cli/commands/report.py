"""``rlhf report``: the HTML report of a run."""

from pathlib import Path
from typing import Annotated

import typer

from rlhf_core.cli import output
from rlhf_core.cli.commands.history import RunArgument, catch_up
from rlhf_core.errors import BadInput


def report(
    run: RunArgument = "last",
    out: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; default: report.html in the run directory.")
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open it in a browser as well.")] = False,
    as_json: output.JsonOption = False,
) -> None:
    """Write the report of a run: one self-contained HTML file with plots, facts, incidents and samples.

    Works for a run in any state, including active and failed runs.
    """
    from rlhf_core.config.site import load_site
    from rlhf_core.history import queries
    from rlhf_core.history.store import HistoryStore
    from rlhf_core.render.run_page import write_report
    from rlhf_core.run_dir.run import RunDir

    site = load_site()
    with HistoryStore(site.database_url) as store:
        on_disk = RunDir.find(site.runs_dir, run)  # it may be one that the history does not know yet
        run_dir = on_disk or queries.run_dir_of(store, queries.resolve_run(store, run))
        if out is None and not run_dir.root.is_dir():
            raise BadInput(f"the run directory {run_dir.root} no longer exists; choose a file with --output")
        catch_up(store, run_dir)
        target = (out or run_dir.report).absolute()
        try:
            path = write_report(store, run_dir, target)
        except OSError as error:
            raise BadInput(f"cannot write {target}: {error.strerror}; choose another file with --output") from None
    if as_json:
        output.print_json({"run_id": run_dir.run_id, "report": path})
    else:
        output.print_text(f"Report: {path}")
    if show:
        output.open_page(path)
