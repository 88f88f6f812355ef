"""Waiting for free GPU memory: the rule with made-up readings, and the real driver on machines with a GPU."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from amd_node import device, make_amd_node, write

from rlhf_core.machine import amd_gpus
from rlhf_core.worker.agent import gpu_wait
from rlhf_core.worker.agent.gpu_wait import TOLERANCE_BYTES, GpuWait
from rlhf_core.worker.event_log import EventLog
from rlhf_core.worker.telemetry.gpus import GpuTelemetry

GIB = 1 << 30


def read(monkeypatch: pytest.MonkeyPatch, *readings: list[int]) -> Iterator[list[int]]:
    """Replace the driver: each reading is made once, then the GPUs have fallen off the bus."""
    left = iter(readings)

    class Readings:
        def used_bytes(self) -> list[int]:
            for reading in left:
                return reading
            raise OSError("NVML: GPU is lost")

    monkeypatch.setattr(gpu_wait, "open_gpus", Readings)
    return left


def test_it_waits_until_all_devices_are_free(monkeypatch: pytest.MonkeyPatch, events: EventLog) -> None:
    full = [[40 * GIB, 2 * GIB], [40 * GIB, GIB]]
    left = read(monkeypatch, [GIB, GIB], *full, [GIB + TOLERANCE_BYTES, GIB], [0, 0])
    assert len(list(GpuWait(events).wait())) == len(full)
    assert list(left) == [[0, 0]]


def test_it_names_the_devices_that_stay_full(
    monkeypatch: pytest.MonkeyPatch, events: EventLog, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_wait, "GPU_TIMEOUT_S", 0.0)
    read(monkeypatch, [GIB, GIB], [GIB, 40 * GIB], [GIB, 40 * GIB])
    waiting = GpuWait(events)
    assert list(waiting.wait(without=(1,))) == []
    assert capsys.readouterr().out == "", "the memory belongs to workers that stay"
    assert list(waiting.wait()) == []
    assert "GPUs [1] still hold memory" in capsys.readouterr().out


def test_a_lost_gpu_does_not_end_the_agent(
    monkeypatch: pytest.MonkeyPatch, events: EventLog, capsys: pytest.CaptureFixture[str]
) -> None:
    """A GPU that has fallen off the bus responds only before the first start."""
    read(monkeypatch, [GIB])
    waiting = GpuWait(events)
    for _ in range(2):
        assert list(waiting.wait()) == []
    assert capsys.readouterr().out.count("without waiting for GPU memory: NVML: GPU is lost") == 1


def test_without_nvml_it_waits_for_the_memory_of_amd_gpus(
    tmp_path: Path, events: EventLog, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(amd_gpus, "SYSFS", make_amd_node(tmp_path / "sys"))
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    waiting = GpuWait(events)
    used = device(tmp_path / "sys", 1) / "mem_info_vram_used"
    write(used, f"{GIB + TOLERANCE_BYTES + 1}\n")
    assert list(waiting.wait(without=(1,))) == []
    steps = waiting.wait()
    assert next(steps, "free") is None, "it waits"
    write(used, f"{GIB}\n")
    assert list(steps) == []
    used.unlink()
    assert list(waiting.wait()) == []
    assert "without waiting for GPU memory" in capsys.readouterr().out


@pytest.mark.gpu
def test_memory_of_a_tensor_is_measured_and_freed(events: EventLog) -> None:
    torch = pytest.importorskip("torch")
    torch.cuda.init()
    block = torch.zeros(1, device="cuda")
    waiting, memory = GpuWait(events), GpuTelemetry()
    before = memory.used_bytes()
    block = torch.zeros(GIB, dtype=torch.uint8, device="cuda")
    assert max(now - base for now, base in zip(memory.used_bytes(), before, strict=True)) > TOLERANCE_BYTES
    assert next(waiting.wait(), "free") is None, "it waits"
    del block
    torch.cuda.empty_cache()
    for _ in waiting.wait():
        time.sleep(0.01)
    assert max(now - base for now, base in zip(memory.used_bytes(), before, strict=True)) <= TOLERANCE_BYTES
