"""Liveness from the CPU time, I/O and GPU use of a rank's processes.

Detects ranks that are stopped, or that wait without using CPU, disk or GPU. Misses endless loops and ranks that spin in
a collective (NCCL does, and the GPU is then as busy as in training).
"""

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

from rlhf_core.machine import amd_gpus
from rlhf_core.machine.amd_gpus import AmdGpus
from rlhf_core.machine.gpus import HIDDEN_FROM_HIP, HIP_VARIABLE
from rlhf_core.schemas.command_trainer import ProgressSource
from rlhf_core.worker.command.observation import Reading, Watched
from rlhf_core.worker.telemetry.gpus import GpuTelemetry

SAMPLE_S = 2.0
"""Minimum time between samples, in seconds: CPU time is counted in hundredths of a second."""
MIN_CPU_SHARE = 0.02
"""Share of one core at or above which a rank counts as alive. Threads that wait with a timeout, such as those of NCCL,
progress bars and loggers, use less."""
MIN_IO_BYTES_PER_S = 1024.0
"""Bytes read and written per second at or above which a rank counts as alive; wake-ups through pipes are smaller."""
_DRIVER = Path("/dev/nvidiactl")


class _Usage(NamedTuple):
    """CPU time and I/O of a process since it started."""

    cpu_s: float
    io_bytes: float


class Activity:
    """CPU, I/O and GPU use of the rank's processes since the previous sample."""

    kind = ProgressSource.ACTIVITY

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._before: dict[tuple[int, float], _Usage] = {}
        self._sampled_at_s: float | None = None
        self._problem = ""
        self._gpus: GpuTelemetry | AmdGpus | None = None
        try:
            if _DRIVER.exists():
                self._gpus = GpuTelemetry()
            elif amd_gpus.are_present() and os.environ.get(HIP_VARIABLE) != HIDDEN_FROM_HIP:
                self._gpus = AmdGpus()
        except OSError as error:
            self._problem = f"GPU utilization is unavailable: {error}"

    def poll(self, now_s: float) -> Reading:
        """Take a sample every ``SAMPLE_S``; in between, return an empty reading."""
        if self._sampled_at_s is not None and now_s - self._sampled_at_s < SAMPLE_S:
            return Reading()
        own = _processes(self._watched.pids())
        usage = _usage(own)
        passed_s = 0.0 if self._sampled_at_s is None else now_s - self._sampled_at_s
        before, self._before, self._sampled_at_s = self._before, usage, now_s
        if not own or not before or _is_stopped(own[0]):
            return Reading(problem=self._problem)
        # Everything used by a process started after the previous sample counts.
        began_s = time.time() - passed_s
        used = [_difference(usage[key], before.get(key)) for key in usage if key in before or key[1] >= began_s]
        is_busy = (
            sum(one.cpu_s for one in used) >= MIN_CPU_SHARE * passed_s
            or sum(one.io_bytes for one in used) >= MIN_IO_BYTES_PER_S * passed_s
            or (self._gpus is not None and self._gpus.are_used_by({pid for pid, _ in usage}))
        )
        return Reading(moved=is_busy, problem=self._problem)


def _processes(pids: Iterable[int]) -> list[psutil.Process]:
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            found.append(psutil.Process(pid))
    return found


def _usage(processes: list[psutil.Process]) -> dict[tuple[int, float], _Usage]:
    found = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            found[process.pid, process.create_time()] = _Usage(times.user + times.system, _io_bytes(process))
    return found


def _io_bytes(process: psutil.Process) -> float:
    """Bytes passed through reads and writes, including cached ones; 0 if the kernel does not show them."""
    try:
        counters = process.io_counters()
    except (psutil.Error, NotImplementedError, AttributeError):
        return 0.0
    return float(counters.read_chars + counters.write_chars)


def _difference(now: _Usage, before: _Usage | None) -> _Usage:
    return now if before is None else _Usage(now.cpu_s - before.cpu_s, now.io_bytes - before.io_bytes)


def _is_stopped(process: psutil.Process) -> bool:
    """True for a stopped process: activity of its children does not make the rank alive."""
    try:
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return True
