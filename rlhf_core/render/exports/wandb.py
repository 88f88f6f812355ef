"""Runs of Weights & Biases: in a folder, from which their owner can upload them with ``wandb sync``, or on a server.

The export to a folder uploads nothing and needs no login.
"""

import atexit
import os
import secrets
import ssl
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from http import HTTPStatus
from http.client import HTTPException
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlhf_core.errors import BadInput
from rlhf_core.files.whole import remove_tree
from rlhf_core.history.queries import RunDetails
from rlhf_core.history.queries.exports import CurvePoint
from rlhf_core.history.store import HistoryStore
from rlhf_core.render.exports.destination import make_folder, require
from rlhf_core.render.exports.tracked_run import export_whole
from rlhf_core.schemas.attempts import RunState
from rlhf_core.schemas.base import storable_text
from rlhf_core.schemas.regression import REGRESSED
from rlhf_core.text.redaction import masked

if TYPE_CHECKING:
    from wandb import Run, Settings

INIT_TIMEOUT_S = 60.0
"""Longest wait for a server that takes no run, in seconds."""

_ANSWER_TIMEOUT_S = 10.0
"""Longest wait for a server that does not answer at all, in seconds."""

_AWAY = (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)
"""Answers of a proxy whose server is away."""

_LONGEST_TAG = 64


def to_wandb(store: HistoryStore, run_ids: Sequence[str], out: str) -> list[str]:
    """Write each run to a folder ``wandb/offline-run-...-<run_id>`` in ``out``, in place of an earlier one, or to a
    server, which is sent what it lacks.

    Args:
        out: a folder, or the address of a W&B server (``https://api.wandb.ai``).

    Returns:
        The folder or address of each run.

    Raises:
        BadInput: wandb is missing, or the server does not take the run.
    """
    if "://" in out:
        return [export_whole(store, run_id, WandbServerRun(out, run_id)) for run_id in run_ids]
    require("wandb", "wandb")
    make_folder(Path(out))
    return [_replaced(store, run_id, Path(out)) for run_id in run_ids]


def _replaced(store: HistoryStore, run_id: str, out: Path) -> str:
    """Export a run to a folder, in which an earlier export is complete until it is replaced."""
    temporary = out / f".{run_id}.{secrets.token_hex(4)}.tmp"
    temporary.mkdir()
    try:
        made = Path(export_whole(store, run_id, WandbRun(str(temporary), run_id)))
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
    """One offline run of W&B in a folder, open from :meth:`write` to :meth:`end`."""

    def __init__(self, out: str, run_id: str) -> None:
        """Prepare the export; the arguments and errors are those of :func:`to_wandb`."""
        require("wandb", "wandb")
        self._out, self._run_id = out, run_id
        self._open: Run | None = None
        self._step = 0
        self.place = ""
        """Folder or address of the run, once it is written."""

    def write(self, details: RunDetails, points: Iterable[CurvePoint]) -> None:
        """Write a new folder in place of an earlier one."""
        if self._open is not None:
            self._finish(details)
            time.sleep(1)  # wandb names its folders by the second
        make_folder(Path(self._out))
        _remove_earlier(Path(self._out), self._run_id)
        opened = self._begin(details, self._run_id, dir=self._out, settings=_settings("offline"))
        self.place = str(Path(opened.dir).parent)
        self._step = 0
        self._log(opened, points)

    def add(self, details: RunDetails, points: Sequence[CurvePoint]) -> bool:
        """Log points. False if one belongs to an earlier step than the newest: W&B takes steps in their order only."""
        if self._open is None or (points and points[0].step < self._step):
            return False
        self._open.tags = tuple(tags(details))
        self._log(self._open, points)
        return True

    def end(self, store: HistoryStore, details: RunDetails) -> None:
        """Write the summary and finish the run."""
        if self._open is not None:
            self._open.summary.update(_summary(details))
            self._finish(details)

    def _begin(self, details: RunDetails, wandb_id: str, **more: Any) -> "Run":
        import wandb

        run = details.run
        try:
            self._open = wandb.init(
                project=run["name"],
                name=wandb_id,
                id=wandb_id,
                config=run["spec"],
                tags=tags(details),
                notes=run["message"],
                reinit="create_new",
                **more,
            )
        except wandb.Error as error:
            if wandb.setup().most_recent_active_run is None:
                wandb.teardown()  # its service would keep the id as in use
            raise self._refused(str(error)) from error
        return self._open

    def _refused(self, problem: str) -> BadInput:
        return BadInput(f"W&B at {masked(self._out)} does not take the export: {masked(problem).rstrip('.')}")

    def _log(self, opened: "Run", points: Iterable[CurvePoint]) -> None:
        """Log points. wandb stores a step when the next one is logged, or the run finished."""
        for step, here in groupby(points, key=lambda point: point.step):
            values = list(here)
            row = {point.key: point.value for point in values}
            opened.log({**row, "_timestamp": values[0].time.timestamp()}, step=step)
            self._step = step

    def _finish(self, details: RunDetails) -> None:
        assert self._open is not None
        self._open.finish(exit_code=0 if details.run["state"] == RunState.COMPLETED else 1)
        self._open = None


class WandbServerRun(WandbRun):
    """One run on a W&B server, resumed by its id: the server keeps the steps that it has, and takes later ones only.

    When steps have ceased to count, another run of W&B is begun, in the same group, with all steps that count.
    """

    def __init__(self, out: str, run_id: str) -> None:
        """Prepare the export; the arguments and errors are those of :func:`to_wandb`."""
        super().__init__(out, run_id)
        self._unsent = _unsent()

    def write(self, details: RunDetails, points: Iterable[CurvePoint]) -> None:
        """Resume or begin the run of W&B, and log what it lacks."""
        if self._open is not None:
            self._finish(details)
        self._require_answer()
        opened = self._begin(
            details,
            wandb_id(details),
            group=self._run_id,
            resume="allow",
            dir=self._unsent,
            settings=_settings("online", base_url=self._out, init_timeout=INIT_TIMEOUT_S),
        )
        self.place = str(opened.url)
        self._step = opened.starting_step
        summary: Any = opened.summary  # its methods have no types
        known = set(summary.keys()) if opened.resumed else set()
        self._log_in_order(opened, [one for one in points if one.step >= self._step or one.key not in known])

    def add(self, details: RunDetails, points: Sequence[CurvePoint]) -> bool:
        """Log points. False if the run of W&B has been finished."""
        if self._open is None:
            return False
        self._open.tags = tuple(tags(details))
        self._log_in_order(self._open, points)
        return True

    def end(self, store: HistoryStore, details: RunDetails) -> None:
        """Write the summary, finish the run, and remove its files from this machine."""
        files = Path(self._open.dir).parent if self._open is not None else None
        super().end(store, details)
        if files is not None:
            remove_tree(files)

    def _require_answer(self) -> None:
        """Check that a server answers at the address: wandb keeps the id of a run that could not be begun as in use
        while this process has other runs open.

        Raises:
            BadInput: none does, or it is away behind its proxy.
        """
        try:
            urllib.request.urlopen(self._out, timeout=_ANSWER_TIMEOUT_S).close()
        except urllib.error.HTTPError as error:
            if error.code in _AWAY:
                raise self._refused(str(error)) from error
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            if not isinstance(reason, ssl.SSLError):  # wandb may have been told to trust it
                raise self._refused(str(reason)) from error

    def _log_in_order(self, opened: "Run", points: Sequence[CurvePoint]) -> None:
        """Log points, those of earlier steps at the newest one: an evaluation may end after later steps."""
        newest = self._step
        self._log(opened, sorted((replace(p, step=max(p.step, newest)) for p in points), key=lambda p: p.step))


def wandb_id(details: RunDetails) -> str:
    """Id of the run of W&B that has the steps that count: with a number, if others had steps that do not any more."""
    num_rewinds = sum((one["last_step"] or 0) > (one["last_valid_step"] or 0) for one in details.restarts)
    run_id: str = details.run["run_id"]
    return f"{run_id}-{num_rewinds + 1}" if num_rewinds else run_id


@cache
def _unsent() -> str:
    """Folder in which wandb keeps what it has not sent to a server yet: that of its variable, or a temporary one."""
    if not os.environ.get("WANDB_DIR"):
        folder = tempfile.TemporaryDirectory(prefix="rlhf-wandb-", ignore_cleanup_errors=True)
        atexit.register(folder.cleanup)
        return folder.name
    return os.environ["WANDB_DIR"]


def _settings(mode: Literal["online", "offline"], **more: Any) -> "Settings":
    import wandb

    # The state of the exporting machine says nothing about the run.
    return wandb.Settings(
        mode=mode,
        console="off",
        disable_git=True,
        save_code=False,
        silent=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
        **more,
    )


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
