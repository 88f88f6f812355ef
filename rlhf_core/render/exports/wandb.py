"""Offline runs of Weights & Biases: a folder that its owner can upload with ``wandb sync``.

The export itself uploads nothing and needs no login.
"""

import secrets
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rlhf_core.files.whole import remove_tree
from rlhf_core.history import queries
from rlhf_core.history.queries import RunDetails
from rlhf_core.history.store import HistoryStore
from rlhf_core.render.exports.common import all_points, make_folder, require
from rlhf_core.schemas.base import storable_text
from rlhf_core.schemas.regression import REGRESSED

_LONGEST_TAG = 64


def to_wandb(store: HistoryStore, run_ids: Sequence[str], out: Path) -> list[Path]:
    """Write a folder ``wandb/offline-run-...-<run_id>`` to ``out`` for each run; one from an earlier export is
    replaced.

    Raises:
        BadInput: wandb is missing.
    """
    require("wandb", "wandb")
    make_folder(out)
    return [_write(store, run_id, out) for run_id in run_ids]


def _write(store: HistoryStore, run_id: str, out: Path) -> Path:
    details = queries.show_run(store, run_id)
    # A separate folder, because two exports within a second would get the same name and write to one file.
    temporary = out / f".{run_id}.{secrets.token_hex(4)}.tmp"
    temporary.mkdir()
    try:
        made = _written(details, store, temporary)
        for earlier in sorted(out.glob(f"wandb/offline-run-*-{run_id}")):
            remove_tree(earlier)
        written = out / "wandb" / made.name
        written.parent.mkdir(exist_ok=True)
        made.rename(written)
    finally:
        remove_tree(temporary)
    return written


def _written(details: RunDetails, store: HistoryStore, folder: Path) -> Path:
    """Write one run to a folder, and return the folder in it that wandb has made."""
    import wandb

    run, run_id = details.run, details.run["run_id"]
    # The state of the exporting machine says nothing about the run.
    settings = wandb.Settings(
        mode="offline",
        console="off",
        disable_git=True,
        save_code=False,
        silent=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
    )
    exported = wandb.init(
        project=run["name"],
        name=run_id,
        id=run_id,
        config=run["spec"],
        tags=tags(details),
        notes=run["message"],
        dir=str(folder),
        settings=settings,
    )
    try:
        for step, points in groupby(all_points(store, details), key=lambda point: point.step):
            here = list(points)
            values = {point.key: point.value for point in here}
            exported.log({**values, "_timestamp": here[0].time.timestamp()}, step=step)
        exported.summary.update(_summary(details))
    finally:
        exported.finish(exit_code=0 if run["state"] == "completed" else 1)
    (made,) = folder.glob(f"wandb/offline-run-*-{run_id}")
    return made


def tags(details: RunDetails) -> list[str]:
    """Tags of the exported run: its own, its algorithm, its state, and ``regressed`` if a held-out score dropped.
    Longer ones than wandb accepts are truncated."""
    run = details.run
    found = [*run["tags"], run["algorithm"], run["state"], *([REGRESSED] if details.regressed else [])]
    return list(dict.fromkeys(storable_text(tag, _LONGEST_TAG) for tag in found if tag))


def _summary(details: RunDetails) -> dict[str, Any]:
    known = {f"goodput/{name}": details.goodput.get(name) for name in ("ettr", "wall_s", "lost_s")}
    return {
        **{name: value for name, value in known.items() if value is not None},
        "num_attempts": len(details.attempts),
        "num_incidents": len(details.counted_incidents),
    }
