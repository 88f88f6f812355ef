"""TensorBoard event files, written without TensorFlow or torch."""

from collections.abc import Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path

from rlhf_core.files.whole import remove_tree
from rlhf_core.history import queries
from rlhf_core.history.store import HistoryStore
from rlhf_core.render.exports.common import all_points, make_folder, require

_FILE_VERSION = "brain.Event:2"
"""Format of the file, which its first event names."""


def to_tensorboard(store: HistoryStore, run_ids: Sequence[str], out: Path) -> list[Path]:
    """Write a fresh folder ``<run_id>`` in ``out`` for each run: effective metrics and evaluations, with the wall time
    of their measurement. ``tensorboard --logdir OUT`` shows them side by side.

    Raises:
        BadInput: tensorboard is missing.
    """
    require("tensorboard", "tensorboard")
    make_folder(out)
    return [_write(store, run_id, out) for run_id in run_ids]


def _write(store: HistoryStore, run_id: str, out: Path) -> Path:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    folder, temporary = out / run_id, out / f".{run_id}.tmp"
    details = queries.show_run(store, run_id)
    begin_s = datetime.fromisoformat(details.run["created_at"]).timestamp()
    remove_tree(temporary)  # left by a killed export
    temporary.mkdir()
    try:
        # Not tensorboard's EventFileWriter, whose thread fails with a traceback on a full disk.
        with (temporary / f"events.out.tfevents.{begin_s:.0f}.{run_id}").open("wb") as file:
            writer = RecordWriter(file)
            writer.write(Event(wall_time=begin_s, file_version=_FILE_VERSION).SerializeToString())
            for (step, time), here in groupby(all_points(store, details), key=lambda point: (point.step, point.time)):
                values = [Summary.Value(tag=point.key, simple_value=point.value) for point in here]
                event = Event(wall_time=time.timestamp(), step=step, summary=Summary(value=values))
                writer.write(event.SerializeToString())
        remove_tree(folder)
        temporary.rename(folder)
    finally:
        remove_tree(temporary)
    return folder
