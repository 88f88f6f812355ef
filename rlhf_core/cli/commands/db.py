"""``rlhf db``: the schema and the content of the history."""

import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_core.cli import output
from rlhf_core.cli.commands.history import open_history
from rlhf_core.errors import BadInput
from rlhf_core.text.formatting import count

if TYPE_CHECKING:
    from rlhf_core.history.prune import PrunableRun


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


def prune(
    days: Annotated[
        int, typer.Option(min=30, help="Age above which metrics and telemetry are removed, from the end of the run.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    as_json: output.JsonOption = False,
) -> None:
    """Remove the metrics by step and the telemetry of runs that ended long ago.

    Step times, evaluations and the newest value of each metric stay, as does everything else about a run. The five
    completed runs of a shape that predictions are based on also keep the times of the parts of a step, and their
    telemetry. The last completed run of each name, and those whose model was promoted or may be, keep all.

    You can interrupt this at any time and call it again. Runs go on meanwhile. `rlhf db rebuild` reads everything again
    of the runs that still have a directory.
    """
    from rlhf_core.history import prune
    from rlhf_core.schemas.base import utc_now

    before = utc_now() - timedelta(days=days)
    with open_history() as store:
        found = prune.prunable(store, before)
        if not as_json:
            _print_prunable(found, before)
        for number, run in enumerate(() if dry_run else found, start=1):
            output.note(f"{number} of {len(found)}: {run.run_id}")
            prune.prune(store, run, before)
    if as_json:
        output.print_json({"before": before, "removed": not dry_run, "runs": [vars(run) for run in found]})
    elif found:
        output.print_text("Nothing was removed (--dry-run)." if dry_run else "Removed.")


def _print_prunable(found: "Sequence[PrunableRun]", before: datetime) -> None:
    rows = [
        (run.run_id, f"{run.ended_at:%Y-%m-%d %H:%M}", f"{run.num_metrics:,}", f"{run.num_telemetry:,}")
        for run in found
    ]
    output.print_section(("run", "ended (UTC)", "metric values", "telemetry readings"), rows)
    metrics, telemetry = (sum(run.num_metrics for run in found), sum(run.num_telemetry for run in found))
    output.print_text(
        f"To remove: {count(metrics, 'metric value')} and {count(telemetry, 'telemetry reading')} of "
        f"{count(len(found), 'run')} that ended before {before:%Y-%m-%d %H:%M} UTC."
    )


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
    from rlhf_core.files.shipped import shipped
    from rlhf_core.history import database

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
    script = shipped("history/reader.sql", "reader.sql").read_text(encoding="utf-8")
    sys.stdout.write(f"\\set owner '{quoted}'\n{script}")
