"""Metrics of the node, published along with the heartbeats."""

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

import psutil

from rlhf_core.condition_log import ConditionLog
from rlhf_core.machine.amd_gpus import AmdGpus
from rlhf_core.worker.telemetry.gpus import GpuTelemetry, open_gpus

GIB = 2**30
MB = 1e6

PERIOD_S = 2.0
"""Time between two readings of sources that may block, in seconds."""

STALE_S = 15.0
"""Age beyond which a GPU or disk reading shows that the driver or the file system is hung, in seconds."""

_HIDDEN = (OSError, NotImplementedError, ValueError)
"""Errors of psutil where a file of ``/proc`` is missing, as in some containers, or has another form."""
LOOPBACK = "lo"
INFINIBAND = Path("/sys/class/infiniband")
_INFINIBAND_WORD = 4
"""Bytes per unit of InfiniBand's data counters (InfiniBand Architecture Specification, PortCounters)."""


class Telemetry:
    """Reads the node's metrics; percentages and rates cover the time since the previous reading.

    Sources that can block (a GPU driver, an unreachable file system) are read in a separate thread: supervision must
    continue when a broken GPU blocks every call into its driver.
    """

    def __init__(self, log: Callable[[str], None], folder: Path) -> None:
        """Start measuring.

        Args:
            log: Receives, once, the reason why there are no GPU metrics.
            folder: Folder of the run directories, whose free space is measured.
        """
        self._processes: dict[int, psutil.Process] = {}
        self._counters = _counters()
        self._read_at_s = time.monotonic()
        self._slow = _SlowReader(folder)
        self._problems = ConditionLog(log)
        psutil.cpu_percent()

    def read(self, worker_pids: Collection[int]) -> dict[str, float]:
        """Take one reading.

        Args:
            worker_pids: Process ids of this node's workers; exited ones are ignored.

        Returns:
            ``cpu_percent`` (of all cores), ``cpu_cores``, ``load_1min``, ``memory_used_gb``, ``memory_total_gb``;
            ``workers_rss_gb``, ``workers_cpu_percent`` (100 is one core); in 10^6 bytes a second
            ``network_received_mb_per_s``, ``network_sent_mb_per_s`` (all interfaces but loopback),
            ``loopback_mb_per_s`` (everything that stays on the node), ``infiniband_received_mb_per_s``,
            ``infiniband_sent_mb_per_s`` (if the node has InfiniBand), ``disk_read_mb_per_s``, ``disk_write_mb_per_s``;
            ``runs_free_gb``; per GPU the metrics of :class:`GpuTelemetry`; and ``slow_reading_age_s`` if the GPUs or
            the file system have not answered for a long time.
        """
        memory = psutil.virtual_memory()
        found = {
            "cpu_percent": psutil.cpu_percent(),
            "cpu_cores": float(psutil.cpu_count() or 1),
            "memory_used_gb": round(memory.used / GIB, 3),
            "memory_total_gb": round(memory.total / GIB, 3),
            "load_1min": round(os.getloadavg()[0], 2),
        }
        return found | self._workers(worker_pids) | self._rates() | self._slow_figures()

    def stop(self) -> None:
        """Stop the reading thread; a thread stuck in a driver does not keep the process alive."""
        self._slow.stop()

    def _workers(self, pids: Collection[int]) -> dict[str, float]:
        # Reuse the objects: psutil computes CPU shares since the previous call on the same object.
        self._processes = {pid: known for pid, known in self._processes.items() if pid in pids}
        resident, share = 0, 0.0
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                process = self._processes.setdefault(pid, psutil.Process(pid))
                share += process.cpu_percent()
                resident += process.memory_info().rss
        return {"workers_rss_gb": round(resident / GIB, 3), "workers_cpu_percent": round(share, 1)}

    def _rates(self) -> dict[str, float]:
        now_s, counters = time.monotonic(), _counters()
        passed_s = max(now_s - self._read_at_s, 1e-3)
        before, self._counters, self._read_at_s = self._counters, counters, now_s
        # A counter that decreased was reset (an interface came up again); its unknown rate is reported as 0.
        return {
            name: round(max(0, count - before[name]) / MB / passed_s, 3)
            for name, count in counters.items()
            if name in before
        }

    def _slow_figures(self) -> dict[str, float]:
        figures, problem, age_s = self._slow.newest()
        if problem:
            self._problems.log_once(f"no GPU metrics: {problem}")
        return figures | ({"slow_reading_age_s": round(age_s, 1)} if age_s > STALE_S else {})


class _SlowReader:
    """Reads GPUs and free space in a thread that starts on first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._figures: dict[str, float] = {}
        self._problem = ""
        self._read_at_s = time.monotonic()

    def newest(self) -> tuple[dict[str, float], str, float]:
        """The newest metrics, the reason for missing GPU metrics, and the age of the metrics in seconds."""
        if self._thread is None:
            self._read_at_s = time.monotonic()
            self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
            self._thread.start()
        with self._lock:
            return dict(self._figures), self._problem, time.monotonic() - self._read_at_s

    def stop(self) -> None:
        """Stop the thread, unless it is stuck."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        gpus: GpuTelemetry | AmdGpus | None = None
        try:
            gpus = open_gpus()
        except OSError as error:
            with self._lock:
                self._problem = str(error)
        while not self._stopping.is_set():
            figures = (gpus.read() if gpus is not None else {}) | self._free()
            with self._lock:
                self._figures, self._read_at_s = figures, time.monotonic()
            self._stopping.wait(PERIOD_S)

    def _free(self) -> dict[str, float]:
        with contextlib.suppress(OSError):
            return {"runs_free_gb": round(shutil.disk_usage(self._folder).free / GIB, 3)}
        return {}


def _counters() -> dict[str, int]:
    """Cumulative byte counts, by the name of the rate derived from them."""
    return _network() | _disks() | _infiniband()


def _network() -> dict[str, int]:
    """Byte counts of the network interfaces; empty if a container hides them."""
    with contextlib.suppress(*_HIDDEN):
        interfaces = psutil.net_io_counters(pernic=True)
        outer = [counts for name, counts in interfaces.items() if name != LOOPBACK]
        found = {
            "network_received_mb_per_s": sum(counts.bytes_recv for counts in outer),
            "network_sent_mb_per_s": sum(counts.bytes_sent for counts in outer),
        }
        return found | ({"loopback_mb_per_s": interfaces[LOOPBACK].bytes_sent} if LOOPBACK in interfaces else {})
    return {}


def _disks() -> dict[str, int]:
    """Byte counts of the disks; empty if a container hides them."""
    with contextlib.suppress(*_HIDDEN):
        disk = psutil.disk_io_counters()
        if disk is not None:
            return {"disk_read_mb_per_s": disk.read_bytes, "disk_write_mb_per_s": disk.write_bytes}
    return {}


def _infiniband() -> dict[str, int]:
    """Byte counts of the InfiniBand adapters: RDMA bypasses the kernel's network interfaces."""
    found: dict[str, int] = {}
    for name, counter in (("received", "port_rcv_data"), ("sent", "port_xmit_data")):
        for path in INFINIBAND.glob(f"*/ports/*/counters/{counter}"):
            with contextlib.suppress(OSError, ValueError):
                key = f"infiniband_{name}_mb_per_s"
                found[key] = found.get(key, 0) + int(path.read_text()) * _INFINIBAND_WORD
    return found
