"""Process management on a node: workers die with their agent, and the agent kills everything it started."""

import contextlib
import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import NoReturn

import psutil

from rlhf_core.machine.main_memory import control_group
from rlhf_core.machine.process_identity import stat_fields
from rlhf_core.schemas.resources import JOB_VARIABLE

_PR_SET_NAME = 15
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)

MAX_OPEN_FILES = 1 << 16
"""Open files that suffice for thousands of ranks. Some programs try to close as many as their limit allows, which may
be a billion."""


def allow_stack_dumps() -> None:
    """Let a sibling (py-spy, started by the agent) inspect this process even if Yama restricts tracing."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


def name_thread(name: str) -> None:
    """Set the calling thread's name in the kernel, which keeps 15 characters."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def allow_open_files() -> None:
    """Raise the soft limit of open files for this process and its descendants: agent 0 has a connection to every rank,
    and ranks have one to each other. Slurm takes the limit over from the shell of the user, where it is often 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def process_state(pid: int) -> str:
    """State letter from ``/proc/<pid>/stat`` (R, S, D, T, Z ...); ``-`` if the process is gone."""
    return next(iter(stat_fields(pid)), "-")


def peek_exit(pid: int) -> int | None:
    """Exit code of a child (negative for a signal) without reaping it; None while it is alive."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def exit_as(code: int) -> NoReturn:
    """Exit with the exit code or signal of another process, so that the agent and the diagnosis see the real cause.

    Args:
        code: Exit code, negative for a signal.
    """
    sys.stdout.flush()
    if code < 0:
        number = signal.Signals(-code)
        if number is not signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        # A core dump of this process would be useless.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), number)
        time.sleep(1.0)
    os._exit(code if 0 < code < 256 else 1)


def kill_group(pid: int) -> None:
    """Send SIGKILL to a process group; each worker leads its own. A no-op if it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


class ForkedWorker:
    """A forked worker's process: a child of the agent, with the subset of ``subprocess.Popen`` in use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Reap it and return its exit code, negative for a signal; None while it is alive."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # reaped elsewhere: report 0, as Popen does
                pid, status = self.pid, 0
            if pid == self.pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for it to exit.

        Raises:
            subprocess.TimeoutExpired: it is still alive.
        """
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout)
            time.sleep(0.01)
        return code


Child = subprocess.Popen[bytes] | ForkedWorker
"""A started process, which leads its own process group."""


def kill_and_reap(children: Collection[Child], timeout_s: float) -> list[int]:
    """Kill the process groups of the children that are still running, and reap all children.

    Returns:
        Process ids of those that have not exited in time: one that is blocked in the kernel, as by a hung file system
        or a broken driver, does not end when it is killed.
    """
    for child in children:
        if child.poll() is None:
            kill_group(child.pid)
    deadline = time.monotonic() + timeout_s
    left = []
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            left.append(child.pid)
    return left


GROUP_VARIABLE = "RLHF_GROUP"
"""Environment variable with the role of a process's group and, for individually restarted workers, their local rank.
Set by the agent."""


def end_descendants(
    timeout_s: float = 10.0, group: str = "", sessions: Collection[int] = (), spared: Collection[int] = ()
) -> list[str]:
    """Kill every descendant of this process and wait until they are gone.

    In a process that adopts orphans (``machine/parent_death.py``), this covers everything it ever caused to start,
    including daemons.

    Args:
        timeout_s: Longest wait, in seconds.
        group: Value of :data:`GROUP_VARIABLE`: only processes that have it are killed, while others keep running. A
            process that has removed it from its environment survives until all are killed. Empty for all descendants.
        sessions: Sessions of that group, one led by each worker. Needed because forked workers show the fork server's
            environment.
        spared: Processes to leave alone, such as the fork server.

    Returns:
        Processes that could not be killed in time (blocked in the kernel), as ``pid (command)``; normally empty.
    """
    deadline = time.monotonic() + timeout_s
    own = psutil.Process()
    while descendants := [
        one for one in own.children(recursive=True) if one.pid not in spared and _is_meant(one, group, sessions)
    ]:
        if time.monotonic() > deadline:
            return [_describe(process) for process in descendants]
        for process in descendants:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.02)
    return []


def end_older_attempts(run_id: str, attempt: int) -> list[str]:
    """Kill leftovers of a run's earlier attempts on this node, whose workers would interfere with this attempt.

    Slurm leaves tasks running on a node whose slurmd was killed.

    Returns:
        The killed processes, as ``pid (command)``.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            owner, _, number = process.environ().get(JOB_VARIABLE, "").rpartition("/")
            if owner == run_id and number.isdigit() and int(number) < attempt:
                found.append(_describe(process))
                process.kill()
    return found


def reap_orphans(owned: Collection[int], min_age_s: float = 0.0) -> None:
    """Reap adopted children that have exited.

    Args:
        min_age_s: Minimum age of reaped children: a younger one may be a worker that is just being started.
        owned: Children that another thread waits for; reaping them here would make their exit look like success.
    """
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error, ChildProcessError):
            is_orphan = process.pid not in owned and time.time() - process.create_time() >= min_age_s
            if is_orphan and process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)


def _is_meant(process: psutil.Process, group: str, sessions: Collection[int]) -> bool:
    """True for a living process of a group, or of any if none is given."""
    with contextlib.suppress(psutil.Error, ProcessLookupError):
        if process.status() != psutil.STATUS_ZOMBIE:
            return not group or os.getsid(process.pid) in sessions or process.environ().get(GROUP_VARIABLE) == group
    return False


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} ({' '.join(process.cmdline())[:200]})"
    except psutil.Error:
        return str(process.pid)


def oom_kills() -> int:
    """Number of OOM kills: in this cgroup if it counts them, otherwise on the node."""
    for path in (control_group() / "memory.events", Path("/proc/vmstat")):
        with contextlib.suppress(OSError):
            found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
            if found is not None:
                return int(found[1])
    return 0
