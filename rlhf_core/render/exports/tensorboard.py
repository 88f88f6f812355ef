"""TensorBoard event files, written without TensorFlow or torch."""

import os
import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from rlhf_core.history.queries import RunDetails
from rlhf_core.history.queries.exports import CurvePoint
from rlhf_core.history.store import HistoryStore
from rlhf_core.render.exports.destination import make_folder, require
from rlhf_core.render.exports.tracked_run import export_whole

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

_FILE_VERSION = "brain.Event:2"
"""Format of the file, which its first event names."""


def to_tensorboard(store: HistoryStore, run_ids: Sequence[str], out: Path) -> list[Path]:
    """Write a fresh folder ``<run_id>`` in ``out`` for each run: effective metrics and evaluations, with the wall time
    of their measurement. ``tensorboard --logdir OUT`` shows them side by side.

    Raises:
        BadInput: tensorboard is missing.
    """
    return [Path(export_whole(store, run_id, TensorBoardRun(str(out), run_id))) for run_id in run_ids]


class TensorBoardRun:
    """Event file of one run, in a folder of its own."""

    def __init__(self, out: str, run_id: str) -> None:
        """Prepare the export to a folder. Raises the errors of :func:`to_tensorboard`."""
        require("tensorboard", "tensorboard")
        self._out, self._run_id = Path(out), run_id
        self.place = ""
        """Folder of the file, once it is written."""
        self._file: Path | None = None
        make_folder(self._out)

    def write(self, details: RunDetails, points: Iterable[CurvePoint]) -> None:
        """Write a new file, and empty earlier ones.

        A TensorBoard that shows an earlier one continues with this one: it reads the files of a folder in the order of
        their names, and drops what it has read before a start of the program that writes them. If the earlier one were
        removed, it would stay there.
        """
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        begin_s = datetime.fromisoformat(details.run["created_at"]).timestamp()
        folder, temporary = self._out / self._run_id, self._out / f".{self._run_id}.events.tmp"
        new = folder / f"events.out.tfevents.{time.time_ns()}.{self._run_id}"
        start = SessionLog(status=SessionLog.START)
        try:
            with temporary.open("wb") as file:
                _append(file, [Event(wall_time=begin_s, file_version=_FILE_VERSION)])
                _append(file, [Event(wall_time=begin_s, step=0, session_log=start)])
                _append(file, _events(points))
            folder.mkdir(exist_ok=True)
            temporary.replace(new)
        finally:
            temporary.unlink(missing_ok=True)
        for earlier in folder.glob("events.out.tfevents.*"):
            if earlier != new:
                os.truncate(earlier, 0)
        self.place, self._file = str(folder), new

    def add(self, details: RunDetails, points: Sequence[CurvePoint]) -> bool:
        """Append to the file. False if another export has replaced it."""
        if self._file is None or not self._file.stat().st_size:
            return False
        with self._file.open("ab") as file:
            _append(file, _events(points))
        return True

    def end(self, store: HistoryStore, details: RunDetails) -> None:
        """Do nothing: event files have no end."""


def _events(points: Iterable[CurvePoint]) -> "Iterable[Event]":
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    for (step, moment), here in groupby(points, key=lambda point: (point.step, point.time)):
        values = [Summary.Value(tag=point.key, simple_value=point.value) for point in here]
        yield Event(wall_time=moment.timestamp(), step=step, summary=Summary(value=values))


def _append(file: BinaryIO, events: "Iterable[Event]") -> None:
    # Not tensorboard's EventFileWriter, whose thread fails with a traceback on a full disk.
    from tensorboard.summary.writer.record_writer import RecordWriter

    writer = RecordWriter(file)
    for event in events:
        writer.write(event.SerializeToString())
