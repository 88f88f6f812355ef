"""Identity of a process on this machine: the boot, and the kernel's tick at which it started.

Unlike a start time by the clock, neither moves when the clock is set, by NTP or after a virtual machine was suspended.
"""

from pathlib import Path


def started_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot (proc(5), field 22); None if it is gone.

    Together with the boot id it distinguishes a process from a later one with the same pid.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def boot_id() -> str:
    """Identity of the current boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
