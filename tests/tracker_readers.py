"""Contents of experiment trackers, read as they read them."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def scalars(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """Steps, values and times of each curve in the event files of a folder, as TensorBoard shows them."""
    return shown_scalars(tensorboard(folder))


def tensorboard(folder: Path) -> Any:
    """A reader of a folder, such as a running TensorBoard has."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"scalars": 0})


def shown_scalars(reader: Any) -> dict[str, list[tuple[int, float, float]]]:
    """The curves of such a reader, after it has looked for new events."""
    reader.Reload()
    return {
        tag: [(event.step, event.value, event.wall_time) for event in reader.Scalars(tag)]
        for tag in reader.Tags()["scalars"]
    }


def wandb_records(file: Path) -> Iterator[Any]:
    """Records of an offline run: a LevelDB log of protocol buffers after a seven-byte header."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    content, position, parts = file.read_bytes(), 7, b""
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:  # the rest of a block is padded
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def wandb_history(file: Path) -> list[dict[str, Any]]:
    """Rows of the history of an offline run."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in wandb_records(file)
        if record.WhichOneof("record_type") == "history"
    ]
