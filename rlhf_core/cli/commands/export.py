"""``rlhf export``: export of runs for other programs."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_core.cli import output
from rlhf_core.cli.commands.history import catch_up, open_history
from rlhf_core.condition_log import ConditionLog
from rlhf_core.errors import BadInput, DatabaseUnavailable
from rlhf_core.text.formatting import PRUNED_METRICS

if TYPE_CHECKING:
    from rlhf_core.history.store import HistoryStore


class Target(StrEnum):
    """Systems that runs can be exported to."""

    PARQUET = "parquet"
    CSV = "csv"
    MLFLOW = "mlflow"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"


def export(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Ids or their prefixes, names (the newest of that name), or `last`."),
    ],
    to: Annotated[Target, typer.Option("--to", help="Format.", show_default=False)],
    out: Annotated[
        str,
        typer.Option(
            "--out",
            metavar="PATH",
            help="Folder to write to; for mlflow also a tracking URI, for wandb also the address of a server.",
            show_default=False,
        ),
    ],
    follow: Annotated[
        bool,
        typer.Option("--follow", help="For mlflow, tensorboard and wandb: continue until the runs have ended."),
    ] = False,
    artifacts: Annotated[
        bool,
        typer.Option(
            "--artifacts/--no-artifacts",
            help="For mlflow: also the report, the settings, the evaluation tables and the model card.",
        ),
    ] = True,
    as_json: output.JsonOption = False,
) -> None:
    """Export runs to files or to an experiment tracker. Exporting again replaces old data or adds what is new.

    parquet and csv: one file per table of the history. mlflow: parameters, metrics, evaluations and tags, with the
    report, the settings, the evaluation tables and the model card as artifacts (never weights), in a database in that
    folder or on a server. tensorboard: event files. wandb: a run on a server (`https://api.wandb.ai`), or an offline
    run in a folder, to be sent with `wandb sync`.

    With --follow, new steps are added every ten seconds until the runs have ended. You can interrupt this at any time
    and call it again. A tracker that does not respond is tried again. To export all runs of a site in this way, name
    the trackers in `[export]` of `rlhf.toml`.
    """
    from rlhf_core.history import queries
    from rlhf_core.render.exports.destination import writing_to
    from rlhf_core.schemas.site import TRACKERS

    if follow and to.value not in TRACKERS:
        raise BadInput(
            f"found --follow with --to {to.value}, expected --to {', '.join(TRACKERS[:-1])} or {TRACKERS[-1]}"
        )
    with open_history() as store:
        run_ids = list(dict.fromkeys(queries.resolve_run(store, run) for run in runs))
        with nullcontext() if "://" in out else writing_to(Path(out)):
            make = _follow if follow else _export
            written = make(store, run_ids, to, out, artifacts=artifacts)
    if as_json:
        output.print_json({"runs": run_ids, "to": to.value, "out": out, "written": written})
        return
    for one in written:
        output.print_text(f"MLflow run {one}" if to is Target.MLFLOW else str(one))


def _export(
    store: "HistoryStore", run_ids: Sequence[str], to: Target, out: str, *, artifacts: bool
) -> Sequence[Path | str]:
    """Export runs as they are now. Returns the places of what was written."""
    from rlhf_core.history import queries
    from rlhf_core.history.queries.exports import pruned_runs
    from rlhf_core.render.exports import files, mlflow, tensorboard, wandb

    for run_id in run_ids:
        catch_up(store, queries.run_dir_of(store, run_id))
    for run_id in pruned_runs(store, run_ids):
        output.warn(f"{run_id}: {PRUNED_METRICS}.")
    match to:
        case Target.PARQUET:
            return files.to_parquet(store, run_ids, Path(out))
        case Target.CSV:
            return files.to_csv(store, run_ids, Path(out))
        case Target.MLFLOW:
            return mlflow.to_mlflow(store, run_ids, out, artifacts=artifacts)
        case Target.TENSORBOARD:
            return tensorboard.to_tensorboard(store, run_ids, Path(out))
        case Target.WANDB:
            return wandb.to_wandb(store, run_ids, out)


def _follow(store: "HistoryStore", run_ids: Sequence[str], to: Target, out: str, *, artifacts: bool) -> Sequence[str]:
    """Export runs to a tracker until they have ended. Returns their places there."""
    from rlhf_core.history import queries
    from rlhf_core.render.exports.following import INTERVAL_S, LiveExport

    live = LiveExport(store, to.value, out, output.warn, artifacts=artifacts)
    problems = ConditionLog(output.warn)
    places: dict[str, str] = {}
    output.note(f"exporting {', '.join(run_ids)} to {to.value} until the end; Ctrl-C stops the export, not the run")
    while True:
        try:
            active = [run_id for run_id in run_ids if run_id not in places]
            for run_id in active:
                catch_up(store, queries.run_dir_of(store, run_id), problems.log_change)
            places |= live.update({run_id: store.ingest_state(run_id).stamp for run_id in active})
        except DatabaseUnavailable as error:
            problems.log_change(str(error))
        if len(places) == len(run_ids):
            return [places[run_id] for run_id in run_ids]
        time.sleep(INTERVAL_S)
