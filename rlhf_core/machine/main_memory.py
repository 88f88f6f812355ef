"""Main memory that the processes of a job may use: the node's, or that of their control group."""

import contextlib
from pathlib import Path

import psutil


def memory_bytes() -> tuple[int, int]:
    """Free and total bytes that the processes of this job may use: those of the node, or of the control group if it has
    less. Unused pages of the page cache count as free: the kernel reclaims them before an allocation fails."""
    node = psutil.virtual_memory()
    free, total = node.available, node.total
    group = control_group()
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / "memory.max").read_text())
            used = int((folder / "memory.current").read_text()) - _unused_files(folder)
            free, total = min(free, max(limit - used, 0)), min(total, limit)
    return free, total


def _unused_files(group: Path) -> int:
    with contextlib.suppress(OSError, KeyError, ValueError):
        pairs = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int({pair[0]: pair[1] for pair in pairs if len(pair) == 2}["inactive_file"])
    return 0


def control_group() -> Path:
    """Folder of this process's control group (version 2)."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                return Path("/sys/fs/cgroup") / line[3:].lstrip("/")
    return Path("/sys/fs/cgroup")
