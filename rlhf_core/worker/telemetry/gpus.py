"""Metrics of the node's GPUs, read from the driver through NVML (nvidia-ml-py).

Metrics that a device does not support (old driver, MIG slice, consumer card) are omitted; the rest are still read.
Names and units of the calls follow NVIDIA's "NVML API Reference Guide".
"""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

GIB = 2**30


@dataclass
class _Device:
    """One GPU visible to the job."""

    handle: Any
    xids: Any = None
    """NVML event set for its XIDs; None if the driver does not support it."""
    last_xid: int = 0


class GpuTelemetry:
    """Reads the GPUs visible to the job, numbered as the job numbers them."""

    def __init__(self) -> None:
        """Load NVML.

        Raises:
            OSError: NVML or the driver is missing or fails to initialise; the message says which.
        """
        try:
            import pynvml
        except ImportError as error:
            raise OSError(f"nvidia-ml-py is not installed ({error})") from error
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
        return [_text(self._nvml.nvmlDeviceGetName(device.handle)) for device in self._devices]

    def driver(self) -> str:
        """Version of the driver."""
        return _text(self._nvml.nvmlSystemGetDriverVersion())

    def _visible(self) -> list[str]:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            return [device for device in visible.split(",") if device]
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
        found: dict[str, float] = {}
        for read in (self._load, self._memory, self._power, self._limit, self._heat, self._slowdown, self._clock):
            self._try(read, device, found)
        for read in (self._corrected, self._uncorrected, self._throttling, self._xid):
            self._try(read, device, found)
        return found

    def _try(self, read: Callable[[_Device], dict[str, float]], device: _Device, found: dict[str, float]) -> None:
        """Read a metric if the device supports it; record the device as lost if it is."""
        try:
            found |= read(device)
        except AttributeError:
            pass  # a newer nvidia-ml-py has dropped this call
        except self._nvml.NVMLError as error:
            if error.value == self._nvml.NVML_ERROR_GPU_IS_LOST:
                found["lost"] = 1.0

    def _load(self, device: _Device) -> dict[str, float]:
        return {"util_percent": float(self._nvml.nvmlDeviceGetUtilizationRates(device.handle).gpu)}

    def _memory(self, device: _Device) -> dict[str, float]:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(device.handle)
        return {
            "memory_used_gb": round(memory.used / GIB, 3),
            "memory_total_gb": round(memory.total / GIB, 3),
        }

    def _power(self, device: _Device) -> dict[str, float]:
        return {"power_w": self._nvml.nvmlDeviceGetPowerUsage(device.handle) / 1000}

    def _limit(self, device: _Device) -> dict[str, float]:
        return {"power_limit_w": self._nvml.nvmlDeviceGetEnforcedPowerLimit(device.handle) / 1000}

    def _heat(self, device: _Device) -> dict[str, float]:
        nvml = self._nvml
        return {"temperature_c": float(nvml.nvmlDeviceGetTemperature(device.handle, nvml.NVML_TEMPERATURE_GPU))}

    def _slowdown(self, device: _Device) -> dict[str, float]:
        nvml = self._nvml
        limit = nvml.nvmlDeviceGetTemperatureThreshold(device.handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
        return {"temperature_slowdown_c": float(limit)}

    def _clock(self, device: _Device) -> dict[str, float]:
        return {"sm_clock_mhz": float(self._nvml.nvmlDeviceGetClockInfo(device.handle, self._nvml.NVML_CLOCK_SM))}

    def _corrected(self, device: _Device) -> dict[str, float]:
        return {"ecc_corrected": self._ecc_errors(device, self._nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED)}

    def _uncorrected(self, device: _Device) -> dict[str, float]:
        return {"ecc_uncorrected": self._ecc_errors(device, self._nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)}

    def _ecc_errors(self, device: _Device, kind: int) -> float:
        return float(self._nvml.nvmlDeviceGetTotalEccErrors(device.handle, kind, self._nvml.NVML_VOLATILE_ECC))

    def _throttling(self, device: _Device) -> dict[str, float]:
        nvml = self._nvml
        # The power cap is omitted: a healthy GPU under load runs at it. So is HwSlowdown, which is set with the others.
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device.handle)
        heat = nvml.nvmlClocksThrottleReasonSwThermalSlowdown | nvml.nvmlClocksThrottleReasonHwThermalSlowdown
        return {
            "throttle_thermal": float(bool(reasons & heat)),
            "throttle_power_brake": float(bool(reasons & nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown)),
        }

    def _xid(self, device: _Device) -> dict[str, float]:
        with contextlib.suppress(self._nvml.NVMLError_Timeout):
            # The loop ends with a timeout once there are no more events.
            while device.xids is not None:
                event = self._nvml.nvmlEventSetWait_v2(device.xids, 0)
                device.last_xid = int(event.eventData)
        return {"xid": float(device.last_xid)} if device.last_xid else {}


def _text(name: str | bytes) -> str:
    """Decode a name: NVML's Python bindings returned bytes before version 12."""
    return name.decode() if isinstance(name, bytes) else name
