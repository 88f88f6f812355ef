"""``rlhf db``: the schema and the content of the history.

Heavy modules are imported inside the functions, so that ``rlhf --help`` stays fast.
"""

import sys
from typing import Annotated

import typer

from rlhf_core.cli import output
from rlhf_core.cli.commands.history import open_history
from rlhf_core.errors import BadInput
from rlhf_core.text.formatting import count


def upgrade() -> None:
    """Migrate the history database to the schema of this program, in one transaction. Does nothing if it is up to
    date."""
    from rlhf_core.config.site import load_site
    from rlhf_core.history import database, migrate

    url = database.parse_url(load_site().database_url)
    done = migrate.upgrade(url)
    if done.before == done.after:
        output.print_text(f"{database.displayed(url)} is up to date (schema {done.after}).")
    else:
        output.print_text(
            f"{database.displayed(url)}: upgraded from {done.before or 'nothing'} to schema {done.after}."
        )


def rebuild(as_json: output.JsonOption = False) -> None:
    """Rebuild the history from the run directories.

    Runs whose directory is gone keep their rows. Leases are left alone, so running controllers are not disturbed.
    """
    from rlhf_core.config.site import load_site
    from rlhf_core.watchdog.ingest import rebuild

    runs_dir = load_site().runs_dir
    with open_history() as store:
        report = rebuild(runs_dir, store, on_run=lambda run_id: output.note(f"reading {run_id}"))
    if as_json:
        output.print_json({"rebuilt": sorted(report.runs), "failed": report.failed, "kept": report.kept})
    else:
        output.print_text(f"{count(len(report.runs), 'run')} rebuilt from {runs_dir}.")
        if report.kept:
            output.print_text(f"{count(len(report.kept), 'run')} without a readable directory there left unchanged.")
    for run_id, why in report.failed.items():
        output.warn(f"{run_id}: {why}")
    for run_id, done in report.runs.items():
        if done.skipped:
            first = done.skipped[0]
            where = f"the first in {first.path} at byte {first.position}"
            output.note(f"{run_id}: {count(done.num_skipped, 'line')} could not be read, {where}")
    if report.failed:
        raise typer.Exit(1)


def reader(
    owner: Annotated[
        str, typer.Option(help="User who owns the tables. Default: the one in RLHF_DATABASE_URL.", show_default=False)
    ] = "",
) -> None:
    """Print the psql script that creates rlhf_reader, the PostgreSQL role that can only read.

    `rlhf sql` runs statements as this role, and Grafana logs in as it. After `rlhf db upgrade`, pipe the script into
    psql as a superuser, in the database of the history: rlhf db reader | psql -d DATABASE. You can run it again.
    """
    from rlhf_core.config.site import load_site
    from rlhf_core.history import database, read_only

    url = database.parse_url(load_site().database_url)
    if database.sqlite_file(url) is not None:
        raise BadInput(
            f"found the SQLite history {database.displayed(url)}, which has no roles: `rlhf sql` opens it read-only. "
            "The script is for PostgreSQL (RLHF_DATABASE_URL=postgresql://user@host/database)"
        )
    name = owner or url.username
    if not name:
        raise BadInput("RLHF_DATABASE_URL names no user: name the owner of the tables with --owner USER")
    quoted = name.replace("\\", "\\\\").replace("'", "\\'")
    sys.stdout.write(f"\\set owner '{quoted}'\n{read_only.reader_script()}")
