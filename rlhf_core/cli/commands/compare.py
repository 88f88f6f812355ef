"""``rlhf compare``: differences between runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_core.cli import output
from rlhf_core.cli.commands.history import catch_up, open_history
from rlhf_core.errors import BadInput
from rlhf_core.render.series import finite
from rlhf_core.text.formatting import figure

if TYPE_CHECKING:
    from rlhf_core.render.compare import Facts

_BARS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 32


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN RUN...",
            help="Two or more: ids or their prefixes, names (the newest of that name), or `last`. "
            "The others are compared with the first.",
        ),
    ],
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            "--metric", metavar="NAME", help="Metric to compare; may be given several times. Default: key ones."
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with curves.")] = None,
    show: Annotated[bool, typer.Option("--open", help="Open that page in a browser.")] = False,
    as_json: output.JsonOption = False,
) -> None:
    """Compare runs: settings that differ, evaluations with their intervals, metrics at the last common step, time and
    incidents. Runs of different algorithms and lengths may be compared."""
    from rlhf_core.history import queries
    from rlhf_core.render.compare import compare as compare_runs

    if show and html is None:
        raise BadInput("--open requires --html FILE")
    with open_history() as store:
        run_ids = [queries.resolve_run(store, run) for run in runs]
        for run_id in run_ids:
            catch_up(store, queries.run_dir_of(store, run_id))
        compared = compare_runs(store, run_ids, metrics or ())
    if html is not None:
        _write_page(compared, html.absolute(), show)
    if as_json:
        output.print_json(compared)
        return
    _print_runs(compared["runs"])
    _print_time(compared["runs"])
    _print_config(compared)
    _print_evaluations(compared)
    _print_metrics(compared)
    if html is not None:
        output.print_text(f"\nPage: {html.absolute()}")


def _write_page(compared: "Facts", path: Path, show: bool) -> None:
    from rlhf_core.render.compare_page import write_comparison

    try:
        write_comparison(compared, path)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}; choose another file with --html") from None
    if show:
        output.open_page(path)


def _print_runs(runs: "Sequence[Facts]") -> None:
    from rlhf_core.schemas.regression import state_text

    rows = [
        (
            run["label"],
            run["run_id"],
            state_text(run["state"], run["regressed"]),
            run["algorithm"],
            f"{run['last_step']}/{run['total_steps']}",
        )
        for run in runs
    ]
    output.print_table(("", "run", "state", "algorithm", "step"), rows, spare="algorithm")


def _print_time(runs: "Sequence[Facts]") -> None:
    rows = [
        (
            run["label"],
            output.seconds_text(run["wall_s"]),
            "-" if run["ettr"] is None else f"{run['ettr']:.0%}",
            run["num_attempts"],
            output.seconds_text(run["lost_s"]),
            ", ".join(f"{kind.replace('_', ' ')} x {number}" for kind, number in run["incidents"].items()),
        )
        for run in runs
    ]
    output.print_section(("run", "took", "goodput", "attempts", "lost to failures", "incidents"), rows)


def _print_config(compared: "Facts") -> None:
    from rlhf_core.render.config_text import setting_text

    output.print_text("")
    if not compared["config"]:
        output.print_text("No setting differs.")
        return
    rows = [(row["setting"], *(setting_text(value) for value in row["values"])) for row in compared["config"]]
    output.print_table(("setting", *(run["label"] for run in compared["runs"])), rows, "Settings that differ")


def _print_evaluations(compared: "Facts") -> None:
    rows = [
        (
            f"{evaluation['name']} {evaluation['metric'].replace('_', ' ')}",
            run["label"],
            output.measured_text(of_run["before"]),
            output.measured_text(of_run["after"]),
            "" if of_run["gain"] is None else f"{of_run['gain']:+.3f}",
            of_run["against_first"],
        )
        for evaluation in compared["evaluations"]
        for run, of_run in zip(compared["runs"], evaluation["runs"], strict=True)
    ]
    output.print_section(("evaluation", "run", "before", "after", "gain", "after, vs. A"), rows, spare="gain")


def _print_metrics(compared: "Facts") -> None:
    rows = []
    for metric in compared["metrics"]:
        lines = sparklines(compared["curves"][metric["key"]])
        for run, line, value in zip(compared["runs"], lines, metric["values"], strict=True):
            step = metric["step"] if metric["step"] is not None else "last"
            rows.append((metric["key"], run["label"], line, "" if value is None else figure(value, 5), step))
        if metric["note"]:
            rows.append(("", "", metric["note"], "", ""))
    output.print_section(("metric", "run", "curve", "value", "at step"), rows)


def sparklines(curves: Sequence[Sequence[tuple[int, float]]]) -> list[str]:
    """Draw each curve as a line of bars, all on the same axes; blank before its first step and after its last one."""
    finite_curves = [finite(curve) for curve in curves]
    points = [point for curve in finite_curves for point in curve]
    if not points:
        return [""] * len(curves)
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    low, high = min(value for _, value in points), max(value for _, value in points)
    cells = min(_CURVE_WIDTH, last - first + 1)
    return [_sparkline(curve, cells, (first, last), (low, high)) for curve in finite_curves]


def _sparkline(
    curve: Sequence[tuple[int, float]], cells: int, span: tuple[int, int], extremes: tuple[float, float]
) -> str:
    (first, last), (low, high) = span, extremes
    gathered: list[list[float]] = [[] for _ in range(cells)]
    for step, value in curve:
        gathered[(step - first) * cells // (last - first + 1)].append(value)
    drawn, bar = "", " "
    for position, values in enumerate(gathered):
        if values:
            share = (sum(values) / len(values) - low) / (high - low) if high > low else 0.5
            bar = _BARS[min(len(_BARS) - 1, int(share * len(_BARS)))]
        drawn += bar if any(gathered[position:]) else " "
    return drawn.rstrip()
