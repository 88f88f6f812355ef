"""Telemetry of a node: figures of this machine, and a fake driver with exactly the names that NVML has."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from process_tools import until

from rlhf_core.worker.telemetry import node as telemetry
from rlhf_core.worker.telemetry.gpus import GpuTelemetry
from rlhf_core.worker.telemetry.node import Telemetry

pynvml = pytest.importorskip("pynvml")

GIB = 2**30

# ---------------------------------------------------------------------------------------------------------------------
# The node


@pytest.fixture
def reader() -> Iterator[Telemetry]:
    found = Telemetry(print, Path("/"))
    yield found
    found.stop()


def test_every_figure_of_the_node_is_a_number(reader: Telemetry) -> None:
    found = reader.read([os.getpid()])
    assert {
        "cpu_percent",
        "cpu_cores",
        "load_1min",
        "memory_used_gb",
        "memory_total_gb",
        "workers_rss_gb",
        "workers_cpu_percent",
        "network_received_mb_per_s",
        "network_sent_mb_per_s",
    } <= set(found)
    assert all(isinstance(value, float) and value >= 0 for value in found.values())
    assert found["workers_rss_gb"] > 0


def test_a_worker_that_has_ended_counts_nothing(reader: Telemetry) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    found = reader.read([ended.pid])
    assert (found["workers_rss_gb"], found["workers_cpu_percent"]) == (0.0, 0.0)


def test_the_processor_use_of_workers_excludes_the_rest_of_the_machine(reader: Telemetry) -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    idle = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    quiet = Telemetry(print, Path("/"))
    try:
        reader.read([busy.pid])
        quiet.read([idle.pid])
        assert until(lambda: time.sleep(0.3) or reader.read([busy.pid])["workers_cpu_percent"] > 5)
        # At first it uses the processor itself, to start.
        assert until(lambda: time.sleep(0.3) or quiet.read([idle.pid])["workers_cpu_percent"] <= 5)
    finally:
        quiet.stop()
        for process in (busy, idle):
            process.kill()
            process.wait()


def counts(received: int, sent: int) -> SimpleNamespace:
    return SimpleNamespace(bytes_recv=received, bytes_sent=sent)


def at_rates(monkeypatch: pytest.MonkeyPatch, before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    """A reading two seconds after a first one, with these interfaces."""
    clock = [100.0]
    monkeypatch.setattr(telemetry.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(telemetry.psutil, "net_io_counters", lambda pernic: before)
    found = Telemetry(print, Path("/"))
    clock[0] += 2.0
    monkeypatch.setattr(telemetry.psutil, "net_io_counters", lambda pernic: after)
    return found._rates()


def test_rates_are_sums_over_the_interfaces_with_loopback_separate(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {"lo": counts(0, 0), "eth0": counts(1_000_000, 0), "ib0": counts(0, 0)}
    after = {"lo": counts(8_000_000, 8_000_000), "eth0": counts(3_000_000, 500_000), "ib0": counts(0, 1_500_000)}
    found = at_rates(monkeypatch, before, after)
    assert found["network_received_mb_per_s"] == 1.0
    assert found["network_sent_mb_per_s"] == 1.0
    assert found["loopback_mb_per_s"] == 4.0


def test_a_counter_that_was_reset_is_no_negative_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    found = at_rates(monkeypatch, {"eth0": counts(9_000_000, 9_000_000)}, {"eth0": counts(5, 5)})
    assert found["network_received_mb_per_s"] == 0.0
    assert "loopback_mb_per_s" not in found


def test_rdma_is_counted_where_there_is_infiniband(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Counters are in four-byte words and summed over all adapters; an adapter without counters is left out."""
    monkeypatch.setattr(telemetry, "INFINIBAND", tmp_path)
    assert telemetry._infiniband() == {}, "no adapter, no reading"
    for adapter, received in (("mlx5_0", "250000"), ("mlx5_1", "50000")):
        counters = tmp_path / adapter / "ports" / "1" / "counters"
        counters.mkdir(parents=True)
        (counters / "port_rcv_data").write_text(f"{received}\n")
        (counters / "port_xmit_data").write_text("N/A\n")
    assert telemetry._infiniband() == {"infiniband_received_mb_per_s": 1_200_000}


def test_hidden_disks_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry.psutil, "disk_io_counters", lambda: None)
    assert not any(name.startswith("disk") for name in telemetry._counters())


def test_what_a_container_hides_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As sandboxes do that show only a part of /proc, and no /sys/block."""
    monkeypatch.setattr(telemetry, "INFINIBAND", tmp_path)
    monkeypatch.setattr(telemetry.psutil, "PROCFS_PATH", str(tmp_path))
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: path != "/sys/block" and exists(path))
    assert telemetry._counters() == {}


# ---------------------------------------------------------------------------------------------------------------------
# GPUs


class Nvml:
    """A driver with two GPUs. Names that the real library lacks raise an error."""

    def __init__(self) -> None:
        self.answers: dict[str, Callable[..., Any]] = {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetHandleByUUID": lambda uuid: 0,
            "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=90 + handle, memory=3),
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=3 * GIB, total=80 * GIB, free=77 * GIB),
            "nvmlDeviceGetComputeRunningProcesses": lambda handle: [SimpleNamespace(pid=100 + handle)],
            "nvmlDeviceGetPowerUsage": lambda handle: 512_500,
            "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 700_000,
            "nvmlDeviceGetTemperature": lambda handle, sensor: 61,
            "nvmlDeviceGetTemperatureThreshold": lambda handle, kind: 92,
            "nvmlDeviceGetClockInfo": lambda handle, kind: 1980,
            "nvmlDeviceGetTotalEccErrors": lambda handle, kind, since: 7 if kind == 0 else 1,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0x4,
            "nvmlEventSetCreate": list,
            "nvmlDeviceRegisterEvents": lambda handle, kinds, events: None,
            "nvmlEventSetWait_v2": self._wait,
        }
        self.asked: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.asked.add(name)
        real = getattr(pynvml, name)
        return self.answers[name] if callable(real) and not isinstance(real, type) else real

    @staticmethod
    def _wait(events: list[int], timeout_ms: int) -> SimpleNamespace:
        if not events:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        return SimpleNamespace(eventType=pynvml.nvmlEventTypeXidCriticalError, eventData=events.pop(0))


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    driver = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    return driver


def refuses(code: int) -> Callable[..., Any]:
    def refuse(*_: object) -> Any:
        raise pynvml.NVMLError(code)

    return refuse


def test_every_figure_of_a_gpu_has_the_right_unit(nvml: Nvml) -> None:
    found = GpuTelemetry().read()
    assert {name: value for name, value in found.items() if name.startswith("gpu1_")} == {
        "gpu1_util_percent": 91.0,
        "gpu1_memory_used_gb": 3.0,
        "gpu1_memory_total_gb": 80.0,
        "gpu1_power_w": 512.5,
        "gpu1_power_limit_w": 700.0,
        "gpu1_temperature_c": 61.0,
        "gpu1_temperature_slowdown_c": 92.0,
        "gpu1_sm_clock_mhz": 1980.0,
        "gpu1_ecc_corrected": 7.0,
        "gpu1_ecc_uncorrected": 1.0,
        "gpu1_throttle_thermal": 0.0,
        "gpu1_throttle_power_brake": 0.0,
    }
    assert len(found) == 24


def test_the_real_library_has_every_name_that_is_used(nvml: Nvml) -> None:
    """The mock refuses unknown names; this test checks that all its names are used, so that none is made up."""
    GpuTelemetry().read()
    nvml.answers["nvmlDeviceGetPowerUsage"] = refuses(pynvml.NVML_ERROR_GPU_IS_LOST)
    GpuTelemetry().read()
    assert GpuTelemetry().are_used_by({100})
    assert set(nvml.answers) - nvml.asked == {"nvmlDeviceGetHandleByUUID"}
    assert all(hasattr(pynvml, name) for name in {*nvml.asked, *nvml.answers})
    with pytest.raises(AttributeError):
        _ = nvml.nvmlDeviceGetNonsense


def test_only_the_devices_of_the_job_are_read(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    found = GpuTelemetry().read()
    assert found["gpu0_util_percent"] == 91.0, "the job's number 0 is the node's number 1"
    assert not any(name.startswith("gpu1") for name in found)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-7a6b")
    assert GpuTelemetry().read()["gpu0_util_percent"] == 90.0
    nvml.answers["nvmlDeviceGetHandleByUUID"] = refuses(pynvml.NVML_ERROR_NOT_FOUND)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, 0")
    assert GpuTelemetry().read()["gpu1_util_percent"] == 90.0, "CUDA accepts spaces"


def test_thermal_throttling_is_distinguished_from_the_power_cap(nvml: Nvml) -> None:
    reads = GpuTelemetry()
    for reasons, heat, brake in ((0x4, 0, 0), (0x20, 1, 0), (0x48, 1, 0), (0x88, 0, 1)):
        nvml.answers["nvmlDeviceGetCurrentClocksThrottleReasons"] = lambda handle, reasons=reasons: reasons
        found = reads.read()
        assert (found["gpu0_throttle_thermal"], found["gpu0_throttle_power_brake"]) == (heat, brake), hex(reasons)


def test_an_xid_is_kept_from_its_occurrence_on(nvml: Nvml) -> None:
    events: list[int] = []
    nvml.answers["nvmlEventSetCreate"] = lambda: events
    reads = GpuTelemetry()
    assert not any("xid" in name for name in reads.read())
    events += [31, 79]
    assert reads.read()["gpu0_xid"] == 79.0
    assert reads.read()["gpu0_xid"] == 79.0


def test_figures_that_a_device_lacks_are_left_out_and_the_rest_is_read(nvml: Nvml) -> None:
    for name in ("nvmlDeviceGetUtilizationRates", "nvmlEventSetCreate", "nvmlDeviceGetTotalEccErrors"):
        nvml.answers[name] = refuses(pynvml.NVML_ERROR_NOT_SUPPORTED)
    found = GpuTelemetry().read()
    assert "gpu0_util_percent" not in found
    assert "gpu0_ecc_corrected" not in found
    assert found["gpu0_power_w"] == 512.5
    assert "gpu0_lost" not in found


def test_a_gpu_off_the_bus_is_lost(nvml: Nvml) -> None:
    reads = GpuTelemetry()
    for name in [name for name in nvml.answers if name.startswith("nvmlDeviceGet")]:
        nvml.answers[name] = refuses(pynvml.NVML_ERROR_GPU_IS_LOST)
    assert reads.read() == {"gpu0_lost": 1.0, "gpu1_lost": 1.0}
    assert not reads.are_used_by({100, 101})
    with pytest.raises(OSError, match="NVML: GPU is lost"):
        reads.used_bytes()


def test_memory_is_that_of_the_devices_of_the_job(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.answers["nvmlDeviceGetMemoryInfo"] = lambda handle: SimpleNamespace(used=handle * GIB)
    assert GpuTelemetry().used_bytes() == [0, GIB]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert GpuTelemetry().used_bytes() == [GIB]


@pytest.mark.parametrize(("pids", "percent", "is_used"), [({7, 101}, 90, True), ({101}, 0, False), ({7}, 90, False)])
def test_a_busy_gpu_is_used_by_the_processes_on_it(nvml: Nvml, pids: set[int], percent: int, is_used: bool) -> None:
    nvml.answers["nvmlDeviceGetUtilizationRates"] = lambda handle: SimpleNamespace(gpu=percent * handle)
    assert GpuTelemetry().are_used_by(pids) == is_used


def test_without_a_driver_there_are_no_gpu_figures_and_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Nvml()
    driver.answers["nvmlInit"] = refuses(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    messages: list[str] = []
    reads = Telemetry(messages.append, Path("/"))
    try:
        until(lambda: reads.read([]) and messages)
        assert not any(name.startswith("gpu") for name in reads.read([]))
        assert messages == ["no GPU metrics: NVML: NVML Shared Library Not Found"]
    finally:
        reads.stop()


def test_a_missing_package_is_reported_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(OSError, match="nvidia-ml-py is not installed"):
        GpuTelemetry()


def test_a_hanging_driver_does_not_block_supervision(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken GPU can block every driver call; the node's own figures still arrive, and the age is reported."""
    freed = threading.Event()
    monkeypatch.setattr(telemetry, "STALE_S", 0.2)
    nvml.answers["nvmlDeviceGetPowerUsage"] = lambda handle: freed.wait() and 512_500
    reads = Telemetry(print, Path("/"))
    try:
        assert "cpu_percent" in reads.read([])
        assert until(lambda: reads.read([]).get("slow_reading_age_s", 0.0) > 0.2)
        freed.set()
        assert until(lambda: reads.read([]).get("gpu1_power_w") == 512.5), "control: it continues with the driver"
    finally:
        freed.set()
        reads.stop()


@pytest.mark.gpu
def test_a_real_gpu_is_read() -> None:
    found = GpuTelemetry().read()
    assert found["gpu0_memory_total_gb"] > 1
    assert 0 <= found["gpu0_util_percent"] <= 100
