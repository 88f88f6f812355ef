"""Waiting for free GPU memory: the rule with made-up readings, and the real library on machines with a GPU."""

import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from rlhf_core.run_dir.run import RunDir
from rlhf_core.worker.agent import gpu_wait
from rlhf_core.worker.agent.gpu_memory import TOLERANCE_BYTES, GpuMemory, wait_until_free
from rlhf_core.worker.event_log import EventLog

GIB = 1 << 30


def finished(waiting: Generator[None, None, list[int]]) -> list[int]:
    """Result of a wait."""
    while True:
        try:
            next(waiting)
        except StopIteration as end:
            return list(end.value)
        time.sleep(0.01)


def test_it_waits_until_all_devices_are_free() -> None:
    readings = iter([[40 * GIB, 2 * GIB], [40 * GIB, GIB], [GIB + TOLERANCE_BYTES, GIB]])
    assert finished(wait_until_free(lambda: next(readings), [GIB, GIB], timeout_s=10.0)) == []
    assert list(readings) == []


def test_it_names_the_devices_that_stay_full() -> None:
    assert finished(wait_until_free(lambda: [GIB, 40 * GIB], [GIB, GIB], timeout_s=0.0)) == [1]
    others = wait_until_free(lambda: [GIB, 40 * GIB], [GIB, GIB], timeout_s=60.0, without=(1,))
    assert finished(others) == [], "the memory belongs to workers that stay"


def test_without_a_driver_the_reason_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("rlhf_core.worker.agent.gpu_memory.ctypes.CDLL", absent)
    with pytest.raises(OSError, match="libnvidia-ml"):
        GpuMemory()


def test_a_lost_gpu_does_not_end_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A GPU that has fallen off the bus responds only before the first start."""

    class FallsOffTheBus:
        def __init__(self) -> None:
            self._readings: Iterator[list[int]] = iter([[GIB]])

        def used_bytes(self) -> list[int]:
            for reading in self._readings:
                return reading
            raise OSError("NVML: nvmlDeviceGetMemoryInfo answered 15")

    monkeypatch.setattr(gpu_wait, "GpuMemory", FallsOffTheBus)
    waiting = gpu_wait.GpuWait(EventLog("node1", RunDir(tmp_path).attempt(1).restart(0)))
    for _ in range(2):
        assert list(waiting.wait()) == []
    assert capsys.readouterr().out.count("without waiting for GPU memory: NVML: nvmlDeviceGetMemoryInfo") == 1


@pytest.mark.gpu
def test_memory_of_a_tensor_is_measured_and_freed() -> None:
    torch = pytest.importorskip("torch")
    torch.cuda.init()
    block = torch.zeros(1, device="cuda")
    memory = GpuMemory()
    before = memory.used_bytes()
    block = torch.zeros(GIB, dtype=torch.uint8, device="cuda")
    assert max(now - base for now, base in zip(memory.used_bytes(), before, strict=True)) > TOLERANCE_BYTES
    del block
    torch.cuda.empty_cache()
    assert finished(wait_until_free(memory.used_bytes, before, timeout_s=10.0)) == []
