"""Drawing the curves of a run while it trains, from its directory alone.

``python -m rlhf_core.control.views.curves RUN_DIRECTORY`` writes a PNG to standard output, or nothing before the first
step. It needs no database. :mod:`rlhf_core.control.views.drawing` runs it.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from rlhf_core.control.views.timeline import all_incidents
from rlhf_core.files.appended import parse_lines, read_blocks
from rlhf_core.garbage import collect_rarely
from rlhf_core.launch.journal import read_record
from rlhf_core.render.curves_image import draw, plots_of
from rlhf_core.render.line_plots import stages_of
from rlhf_core.render.series import Marks, finite
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.reports import MetricsLine
from rlhf_core.schemas.run import RunSpec


def effective_curves(run_dir: RunDir, keys: frozenset[str]) -> dict[str, list[tuple[int, float]]]:
    """Read metrics by step as the history has them: a restart discards everything from its first step on, even steps
    that it has not yet reached again."""
    curves: dict[str, dict[int, float]] = {key: {} for key in keys}
    for lines in _by_restart(run_dir):
        first = True
        for line in lines:
            if first:
                curves = {key: {s: v for s, v in curve.items() if s < line.step} for key, curve in curves.items()}
                first = False
            for key in keys & line.metrics.keys():
                curves[key][line.step] = line.metrics[key]
    return {key: finite(sorted(curve.items())) for key, curve in curves.items()}


def _by_restart(run_dir: RunDir) -> Iterator[Iterator[MetricsLine]]:
    for restart in run_dir.restarts():
        blocks = read_blocks(restart.metrics)
        yield (line for lines, _ in blocks for line in parse_lines(lines, MetricsLine))


def marks_of(run_dir: RunDir, spec: RunSpec, last_step: int) -> Marks:
    """Positions of checkpoints, incidents and rollbacks on the step axis."""
    found = all_incidents(run_dir, read_record(run_dir))
    first_steps = [line.step for lines in _by_restart(run_dir) if (line := next(lines, None)) is not None]
    return Marks(
        last_step=max(last_step, 1),
        warm_start_steps=spec.warm_start_steps,
        checkpoints=tuple(checkpoint.step for checkpoint in run_dir.checkpoints()),
        incidents=tuple(incident.step for incident in found if incident.step is not None),
        resumes=tuple(step - 1 for step in first_steps[1:]),
    )


def picture_of(run_dir: RunDir) -> bytes:
    """Draw the curves of a run as PNG; empty before its first step.

    Raises:
        RunDirError: the folder is not a run directory.
    """
    spec = run_dir.read_spec().spec
    plots = plots_of(spec)
    curves = effective_curves(run_dir, frozenset(key for plot in plots for key, _ in plot.keys))
    last_step = max((curve[-1][0] for curve in curves.values() if curve), default=0)
    return draw(plots, curves, marks_of(run_dir, spec, last_step), stages_of(spec))


if __name__ == "__main__":
    collect_rarely()
    os.nice(10)  # the controllers on this machine come first
    sys.stdout.buffer.write(picture_of(RunDir(Path(sys.argv[1]))))
