"""Metrics of the node's GPUs, read from NVIDIA's driver through NVML (nvidia-ml-py), from AMD's through its files.

Metrics that a device does not support (old driver, MIG slice, consumer card) are omitted; the rest are still read.
Names and units of the calls follow NVIDIA's "NVML API Reference Guide".
"""

import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from rlhf_core.machine.amd_gpus import AmdGpus, nvidia_or_amd
from rlhf_core.machine.gpus import listed_gpus

GIB = 2**30


@dataclass
class _Device:
    """One GPU visible to the job."""

    handle: Any
    xids: Any = None
    """NVML event set for its XIDs; None if the driver does not support it."""
    last_xid: int | None = None


def open_gpus() -> "GpuTelemetry | AmdGpus":
    """Reader of the GPUs visible to the job: through NVML, and where that is missing, AMD's if the machine has some.

    Raises:
        OSError: their driver is missing or fails to initialise; the message says which.
    """
    return nvidia_or_amd(GpuTelemetry)


class GpuTelemetry:
    """Reads the NVIDIA GPUs visible to the job, numbered as the job numbers them."""

    package = "nvidia-driver"
    """Name under which the driver's version is compared between nodes."""
    tool = "nvidia-smi -q"

    def __init__(self) -> None:
        """Load NVML.

        Raises:
            OSError: NVML or the driver is missing or fails to initialise; the message says which.
        """
        try:
            import pynvml
        except ImportError as error:
            raise OSError(f"nvidia-ml-py is not installed ({error}); it comes with rlhf-flows[training]") from error
        self._nvml: Any = pynvml
        try:
            self._nvml.nvmlInit()
            self._devices = [self._open(device) for device in self._visible()]
        except self._nvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from error

    def read(self) -> dict[str, float]:
        """Metrics of each GPU in a flat mapping: ``gpu0_util_percent`` and so on.

        Returns:
            Per GPU, if its driver supports them: ``util_percent`` (time a kernel was running), ``memory_used_gb``,
            ``memory_total_gb``, ``power_w``, ``power_limit_w``, ``temperature_c``, ``temperature_slowdown_c`` (from
            which on the hardware slows down), ``sm_clock_mhz``, ``ecc_corrected`` and ``ecc_uncorrected`` (errors since
            the driver was loaded), ``throttle_thermal`` and ``throttle_power_brake`` (0 or 1: slowed down by heat, by
            the power supply), ``xid`` (the last one since the agent started; absent when there was none), ``lost`` (1
            when it has fallen off the bus; absent otherwise).
        """
        found: dict[str, float] = {}
        for index, device in enumerate(self._devices):
            found |= {f"gpu{index}_{name}": value for name, value in self._read_one(device).items()}
        return found

    def names(self) -> list[str]:
        """Types of the GPUs, in order."""
        return [str(self._nvml.nvmlDeviceGetName(device.handle)) for device in self._devices]

    def driver(self) -> str:
        """Version of the driver."""
        return str(self._nvml.nvmlSystemGetDriverVersion())

    def used_bytes(self) -> list[int]:
        """Memory in use on each GPU, in bytes.

        Raises:
            OSError: the driver refuses to answer, as for a GPU that has fallen off the bus.
        """
        try:
            return [int(self._nvml.nvmlDeviceGetMemoryInfo(device.handle).used) for device in self._devices]
        except self._nvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from error

    def are_used_by(self, pids: Collection[int]) -> bool:
        """True if a GPU used by one of these processes was busy during the driver's last sample."""
        for device in self._devices:
            with contextlib.suppress(self._nvml.NVMLError):
                present = {process.pid for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(device.handle)}
                if present & set(pids) and self._nvml.nvmlDeviceGetUtilizationRates(device.handle).gpu > 0:
                    return True
        return False

    def _visible(self) -> list[str]:
        listed = listed_gpus()
        if listed is not None:
            return listed
        return [str(index) for index in range(self._nvml.nvmlDeviceGetCount())]

    def _open(self, name: str) -> _Device:
        nvml = self._nvml
        by_index = name.isdigit()
        handle = nvml.nvmlDeviceGetHandleByIndex(int(name)) if by_index else nvml.nvmlDeviceGetHandleByUUID(name)
        device = _Device(handle)
        # Without these events (containers, Windows, some virtual GPUs) XIDs appear only in the kernel log.
        with contextlib.suppress(nvml.NVMLError):
            xids = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, xids)
            device.xids = xids
        return device

    def _read_one(self, device: _Device) -> dict[str, float]:
        nvml, gpu = self._nvml, device.handle

        def is_throttled_by(reasons: int) -> bool:
            return bool(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu) & reasons)

        def ecc_errors(kind: int) -> int:
            return int(nvml.nvmlDeviceGetTotalEccErrors(gpu, kind, nvml.NVML_VOLATILE_ECC))

        # The power cap is omitted: a healthy GPU under load runs at it. So is HwSlowdown, which is set with the others.
        readers: dict[str, Callable[[], float | None]] = {
            "util_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
            "memory_used_gb": lambda: round(nvml.nvmlDeviceGetMemoryInfo(gpu).used / GIB, 3),
            "memory_total_gb": lambda: round(nvml.nvmlDeviceGetMemoryInfo(gpu).total / GIB, 3),
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
            "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
            "temperature_slowdown_c": lambda: nvml.nvmlDeviceGetTemperatureThreshold(
                gpu, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
            ),
            "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
            "ecc_corrected": lambda: ecc_errors(nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            "ecc_uncorrected": lambda: ecc_errors(nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            "throttle_thermal": lambda: is_throttled_by(
                nvml.nvmlClocksThrottleReasonSwThermalSlowdown | nvml.nvmlClocksThrottleReasonHwThermalSlowdown
            ),
            "throttle_power_brake": lambda: is_throttled_by(nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown),
            "xid": lambda: self._last_xid(device),
        }
        found: dict[str, float] = {}
        for name, read in readers.items():
            try:
                value = read()
            except AttributeError:
                continue  # a newer nvidia-ml-py has dropped this call
            except nvml.NVMLError as error:  # not supported by this device
                if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
                    found["lost"] = 1.0
                continue
            if value is not None:
                found[name] = float(value)
        return found

    def _last_xid(self, device: _Device) -> int | None:
        with contextlib.suppress(self._nvml.NVMLError_Timeout):
            # The loop ends with a timeout once there are no more events.
            while device.xids is not None:
                event = self._nvml.nvmlEventSetWait_v2(device.xids, 0)
                device.last_xid = int(event.eventData)
        return device.last_xid
