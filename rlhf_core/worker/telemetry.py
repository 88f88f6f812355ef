"""Figures of the node, published beside the beats."""

import contextlib
import os
from collections.abc import Collection

import psutil

GIB = 2**30


class Telemetry:
    """Reads the node's figures; processor use is measured since the reading before."""

    def __init__(self) -> None:
        psutil.cpu_percent()

    def read(self, worker_pids: Collection[int]) -> dict[str, float]:
        """``cpu_percent`` (of all cores), ``memory_used_gb``, ``memory_total_gb``, ``workers_rss_gb``, ``load_1min``.

        Args:
            worker_pids: Workers of this node; what has ended counts nothing.
        """
        memory = psutil.virtual_memory()
        resident = 0
        for pid in worker_pids:
            with contextlib.suppress(psutil.Error):
                resident += psutil.Process(pid).memory_info().rss
        return {
            "cpu_percent": psutil.cpu_percent(),
            "memory_used_gb": round(memory.used / GIB, 3),
            "memory_total_gb": round(memory.total / GIB, 3),
            "workers_rss_gb": round(resident / GIB, 3),
            "load_1min": round(os.getloadavg()[0], 2),
        }
