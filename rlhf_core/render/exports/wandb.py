"""Runs of Weights & Biases: in a folder, from which their owner can upload them with ``wandb sync``, or on a server.

The export to a folder uploads nothing and needs no login.
"""

import atexit
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import BadInput
from rlhf_core.files.whole import remove_tree
from rlhf_core.history import queries
from rlhf_core.history.queries import RunDetails
from rlhf_core.history.queries.exports import CurvePoint
from rlhf_core.history.store import HistoryStore
from rlhf_core.render.exports.common import all_points, make_folder, require
from rlhf_core.schemas.attempts import RunState
from rlhf_core.schemas.base import storable_text
from rlhf_core.schemas.regression import REGRESSED
from rlhf_core.text.redaction import masked

if TYPE_CHECKING:
    from wandb import Run, Settings

_LONGEST_TAG = 64


def to_wandb(store: HistoryStore, run_ids: Sequence[str], out: str) -> list[str]:
    """Write each run to a folder ``wandb/offline-run-...-<run_id>`` in ``out``, or to a server. What an earlier export
    wrote is replaced.

    Args:
        out: a folder, or the address of a W&B server (``https://api.wandb.ai``).

    Returns:
        The folder or address of each run.

    Raises:
        BadInput: wandb is missing, or the server does not take the run.
    """
    if "://" in out:
        return [_whole(store, run_id, out).place for run_id in run_ids]
    require("wandb", "wandb")
    make_folder(Path(out))
    return [_replaced(store, run_id, Path(out)) for run_id in run_ids]


def _whole(store: HistoryStore, run_id: str, out: str) -> "WandbRun":
    run, details = WandbRun(out, run_id), queries.show_run(store, run_id)
    run.write(details, all_points(store, details))
    run.end(store, details)
    return run


def _replaced(store: HistoryStore, run_id: str, out: Path) -> str:
    """Export a run to a folder, in which an earlier export is complete until it is replaced."""
    temporary = out / f".{run_id}.{secrets.token_hex(4)}.tmp"
    temporary.mkdir()
    try:
        made = Path(_whole(store, run_id, str(temporary)).place)
        _remove_earlier(out, run_id)
        written = out / "wandb" / made.name
        written.parent.mkdir(exist_ok=True)
        made.rename(written)
    finally:
        remove_tree(temporary)
    return str(written)


def _remove_earlier(out: Path, run_id: str) -> None:
    for earlier in sorted(out.glob(f"wandb/offline-run-*-{run_id}")):
        remove_tree(earlier)


class WandbRun:
    """One run in W&B, open from :meth:`write` to :meth:`end`."""

    def __init__(self, out: str, run_id: str) -> None:
        """Prepare the export; the arguments and errors are those of :func:`to_wandb`."""
        require("wandb", "wandb")
        self._run_id = run_id
        self._server = out if "://" in out else ""
        # What a server has not got yet is in files of wandb as well.
        self._folder = Path(tempfile.mkdtemp(prefix="rlhf-wandb-") if self._server else out)
        if self._server:
            atexit.register(shutil.rmtree, self._folder, ignore_errors=True)
        make_folder(self._folder)
        self._open: Run | None = None
        self._step = 0
        self.place = ""
        """Folder or address of the run, once it is written."""

    def write(self, details: RunDetails, points: Iterable[CurvePoint]) -> None:
        """Begin the run again, and log the points. W&B drops what it has of a run that is begun again and not resumed,
        under whose id nothing else can be stored."""
        import wandb

        if self._open is not None:
            self._finish(details)
            time.sleep(1)  # wandb names its folders by the second
        if not self._server:
            _remove_earlier(self._folder, self._run_id)
        run = details.run
        try:
            self._open = wandb.init(
                project=run["name"],
                name=self._run_id,
                id=self._run_id,
                config=run["spec"],
                tags=tags(details),
                notes=run["message"],
                dir=str(self._folder),
                reinit="create_new",
                settings=self._settings(),
            )
        except wandb.Error as error:
            raise BadInput(
                f"W&B at {self._server or self._folder} does not take the export: {masked(str(error))}"
            ) from error
        self._step = 0
        self.place = str((self._open.url if self._server else None) or Path(self._open.dir).parent)
        self._log(points)

    def add(self, details: RunDetails, points: Sequence[CurvePoint]) -> bool:
        """Log points. False if one belongs to an earlier step than the newest: W&B takes steps in their order only."""
        if self._open is None or (points and points[0].step < self._step):
            return False
        self._open.tags = tuple(tags(details))
        self._log(points)
        return True

    def end(self, store: HistoryStore, details: RunDetails) -> None:
        """Write the summary and finish the run."""
        assert self._open is not None
        self._open.summary.update(_summary(details))
        self._finish(details)

    def _log(self, points: Iterable[CurvePoint]) -> None:
        """Log points. wandb stores a step when the next one is logged, or the run finished."""
        assert self._open is not None
        for step, here in groupby(points, key=lambda point: point.step):
            values = list(here)
            row = {point.key: point.value for point in values}
            self._open.log({**row, "_timestamp": values[0].time.timestamp()}, step=step)
            self._step = step

    def _finish(self, details: RunDetails) -> None:
        assert self._open is not None
        self._open.finish(exit_code=0 if details.run["state"] == RunState.COMPLETED else 1)
        self._open = None

    def _settings(self) -> "Settings":
        import wandb

        # The state of the exporting machine says nothing about the run.
        settings = wandb.Settings(
            mode="online" if self._server else "offline",
            console="off",
            disable_git=True,
            save_code=False,
            silent=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        if self._server:
            settings.base_url = self._server
        return settings


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
