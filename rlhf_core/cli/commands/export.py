"""``rlhf export``: export of runs for other programs."""

from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rlhf_core.cli import output
from rlhf_core.cli.commands.history import catch_up, open_history


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
            "--out", metavar="PATH", help="Folder to write to; for mlflow also a tracking URI.", show_default=False
        ),
    ],
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
    folder or on a server. tensorboard: event files. wandb: an offline run, to be sent with `wandb sync`; this command
    sends nothing.
    """
    from rlhf_core.history import queries
    from rlhf_core.render.exports import files, mlflow, tensorboard, wandb
    from rlhf_core.render.exports.common import writing_to

    with open_history() as store:
        run_ids = list(dict.fromkeys(queries.resolve_run(store, run) for run in runs))
        for run_id in run_ids:
            catch_up(store, run_id)
        written: list[Path] | list[str]
        with nullcontext() if "://" in out else writing_to(Path(out)):
            match to:
                case Target.PARQUET:
                    written = files.to_parquet(store, run_ids, Path(out))
                case Target.CSV:
                    written = files.to_csv(store, run_ids, Path(out))
                case Target.MLFLOW:
                    written = mlflow.to_mlflow(store, run_ids, out, artifacts=artifacts)
                case Target.TENSORBOARD:
                    written = tensorboard.to_tensorboard(store, run_ids, Path(out))
                case Target.WANDB:
                    written = wandb.to_wandb(store, run_ids, Path(out))
    if as_json:
        output.print_json({"runs": run_ids, "to": to.value, "out": out, "written": written})
        return
    for one in written:
        output.print_text(f"MLflow run {one}" if to is Target.MLFLOW else str(one))
