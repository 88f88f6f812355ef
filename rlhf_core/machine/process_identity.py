"""Facts that the kernel shows of a process, and its identity on this machine.

That is the boot and the kernel's tick at which it started. Unlike a start time by the clock, neither moves when the
clock is set, by NTP or after a virtual machine was suspended.
"""

from pathlib import Path


def stat_fields(pid: int) -> list[str]:
    """Fields of ``/proc/<pid>/stat`` from the state on, the third in proc(5); empty if the process is gone."""
    try:
        # A process may name itself, and the kernel cuts its name after 15 bytes, also within a character.
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def started_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot (proc(5), field 22); None if it is gone.

    Together with the boot id it distinguishes a process from a later one with the same pid.
    """
    fields = stat_fields(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


def boot_id() -> str:
    """Identity of the current boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
