"""TensorBoard event files as a source of progress: files written by torch, whole, torn and damaged."""

import struct
import sys
import time
from pathlib import Path

import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from watched_programs import Polls, append, make_old, watched

from rlhf_core.worker.command.observation import StepFigures
from rlhf_core.worker.command.sources.tensorboard import MAX_RECORD_BYTES, TensorBoard


def event(step: int, *, wall_time: float | None = None, **values: float) -> Event:
    summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
    return Event(step=step, wall_time=wall_time or time.time(), summary=summary)


def write(folder: Path, *events: Event) -> Path:
    """Write a new event file and return its path."""
    before = set(folder.glob("events*"))
    writer = EventFileWriter(str(folder))
    for one in events:
        writer.add_event(one)
    writer.close()
    (path,) = set(folder.glob("events*")) - before
    return path


@pytest.mark.training
def test_scalars_of_torch_come_by_step(tmp_path: Path) -> None:
    import torch
    from torch.utils.tensorboard import SummaryWriter

    polls = Polls(TensorBoard(watched(tmp_path)))
    assert not polls.poll().moved
    with SummaryWriter(str(tmp_path / "runs" / "Nov22")) as writer:
        writer.add_text("args", "{}")
        writer.flush()
        assert not polls.poll().moved  # no step has been made yet
        for step in (1, 2):
            writer.add_scalar("train/loss", step / 2, step)
            writer.add_scalar("train/grad_norm", float("nan"), step)
        writer.add_histogram("weights", torch.arange(1000), 2)
        writer.flush()
        first = polls.poll()
        writer.add_scalar("train/loss", 1.5, 3)
        writer.flush()
        second = polls.poll()
    assert (first.moved, first.step, [one.step for one in first.metrics]) == (True, 2, [1, 2])
    assert str(first.metrics[0].values) == "{'train/loss': 0.5, 'train/grad_norm': nan}"
    assert second.metrics == [StepFigures(3, {"train/loss": 1.5})]
    assert not polls.poll().moved


def test_scalars_by_samples_are_progress_and_no_steps(tmp_path: Path) -> None:
    """Megatron and DeepSpeed write them among others: a number of samples would end every run."""
    source = TensorBoard(watched(tmp_path))
    write(tmp_path, event(3, loss=1.5), event(1536, **{"lm loss vs samples": 1.5}))
    reading = source.poll(0)
    assert (reading.step, reading.metrics) == (3, [StepFigures(3, {"loss": 1.5})])
    write(tmp_path, event(2048, **{"Train/Samples/lr": 1e-6}))
    reading = source.poll(10)
    assert (reading.moved, reading.step, reading.metrics) == (True, 3, [])


def test_seconds_of_a_monitor_are_no_steps(tmp_path: Path) -> None:
    """NeMo-RL's monitor of GPUs writes at the seconds since its start: all losses would be of earlier steps."""
    write(tmp_path, event(300, **{"ray/node.0.gpu.0.util": 97.0}), event(2, **{"train/loss": 1.5}))
    reading = TensorBoard(watched(tmp_path)).poll(0)
    assert (reading.step, reading.metrics) == (2, [StepFigures(2, {"train/loss": 1.5})])


def test_epochs_and_tokens_are_no_steps(tmp_path: Path) -> None:
    """Some programs write a validation at its epoch, or use the number of tokens as axis."""
    write(tmp_path, event(4001, loss=1.5), event(3, val=1.0), event(2**31, loss=1.5))
    reading = TensorBoard(watched(tmp_path)).poll(0)
    assert (reading.moved, reading.step, [one.step for one in reading.metrics]) == (True, 4001, [4001, 3])


def test_a_torn_last_record_waits_for_its_end(tmp_path: Path) -> None:
    whole = write(tmp_path / "made", event(1, loss=1.0), event(2, loss=2.0)).read_bytes()
    (tmp_path / "run").mkdir()
    target = tmp_path / "run" / "events.out.tfevents.1.host"
    polls = Polls(TensorBoard(watched(tmp_path / "run")))
    steps = []
    for end in range(0, len(whole) + 7, 7):
        target.write_bytes(whole[:end])
        reading = polls.poll()
        assert reading.problem == ""
        steps += [one.step for one in reading.metrics]
    assert steps == [1, 2]


def test_events_of_the_previous_start_are_no_progress(tmp_path: Path) -> None:
    make_old(write(tmp_path, event(1, wall_time=time.time() - 1000, loss=1.0)))
    # The previous writer ended a minute after this start.
    write(tmp_path, event(2, wall_time=time.time() - 1000, loss=1.0), event(3, loss=1.0))
    polls = Polls(TensorBoard(watched(tmp_path)))
    found = polls.poll()
    assert [one.step for one in found.metrics] == [3]


def test_a_new_file_is_found_among_old_ones(tmp_path: Path) -> None:
    polls = Polls(TensorBoard(watched(tmp_path)))
    write(tmp_path / "a", event(1, loss=1.0))
    assert polls.poll().step == 1
    write(tmp_path / "v0-1" / "runs" / "b", event(2, loss=1.0))
    assert polls.poll().step == 2


def test_folders_of_checkpoints_are_not_searched(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint-8" / "runs", event(1, loss=1.0))
    assert not Polls(TensorBoard(watched(tmp_path))).poll().moved


def test_scalars_as_tensors(tmp_path: Path) -> None:
    """TensorFlow 2 and JAX write scalars as tensors."""

    def tensor(**content: object) -> Event:
        return Event(
            step=4,
            wall_time=time.time(),
            summary=Summary(value=[Summary.Value(tag="loss", tensor=TensorProto(**content))]),
        )

    rows = TensorShapeProto(dim=[TensorShapeProto.Dim(size=2)])
    write(tmp_path / "a", tensor(dtype=1, float_val=[0.5]))
    write(tmp_path / "b", tensor(dtype=1, tensor_content=struct.pack("<f", 0.25)))
    write(tmp_path / "c", tensor(dtype=2, double_val=[0.125]))
    write(tmp_path / "d", tensor(dtype=1, float_val=[0.5, 1.0], tensor_shape=rows), tensor(dtype=7, string_val=[b"x"]))
    found = []
    for name in "abcd":
        found += Polls(TensorBoard(watched(tmp_path / name))).poll().metrics
    assert found == [StepFigures(4, {"loss": value}) for value in (0.5, 0.25, 0.125)]


def test_a_record_too_large_for_a_scalar_is_skipped(tmp_path: Path) -> None:
    image = Event(step=1, wall_time=time.time(), file_version="x" * (MAX_RECORD_BYTES + 1))
    write(tmp_path, image, event(2, loss=1.0))
    assert Polls(TensorBoard(watched(tmp_path))).poll().step == 2


def test_a_damaged_file_is_reported_and_the_others_are_read(tmp_path: Path) -> None:
    damaged = write(tmp_path / "a", event(1, loss=1.0))
    content = bytearray(damaged.read_bytes())
    content += b"\xff" * 100
    damaged.write_bytes(content)
    polls = Polls(TensorBoard(watched(tmp_path)))
    first = polls.poll()
    write(tmp_path / "b", event(2, loss=1.0))
    second = polls.poll()
    assert first.step == 1
    assert f"{damaged} is damaged at byte {len(content) - 100}" in first.problem
    assert (second.step, second.problem) == (2, first.problem)


def test_a_record_that_is_not_an_event_is_skipped(tmp_path: Path) -> None:
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    length = struct.pack("<Q", 4)
    framed = length + struct.pack("<I", masked_crc32c(length)) + b"\xff" * 8
    path = tmp_path / "events.out.tfevents.1.host"
    path.write_bytes(framed + write(tmp_path / "made", event(2, loss=1.0)).read_bytes())
    (tmp_path / "made").rename(tmp_path / "checkpoint-1")
    assert Polls(TensorBoard(watched(tmp_path))).poll().step == 2


def test_a_missing_tensorboard_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, event(1, loss=1.0))
    monkeypatch.setitem(sys.modules, "tensorboard.compat.tensorflow_stub.pywrap_tensorflow", None)
    reading = Polls(TensorBoard(watched(tmp_path))).poll()
    assert (reading.moved, "rlhf-flows[training]" in reading.problem) == (False, True)


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    append(tmp_path / "logging.jsonl", "{}\n")
    (tmp_path / "events.out.tfevents.1.link").symlink_to(tmp_path / "logging.jsonl")
    found = Polls(TensorBoard(watched(tmp_path))).poll()
    assert (found.moved, "symbolic link" in found.problem) == (False, True)
