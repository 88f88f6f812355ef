"""This machine as a scheduler, for development, tests and single-node runs.

A small controller process, that of submitit's local executor, starts the agent, captures its output and enforces the
time limit (with SIGUSR2 before it: save and stop). Two things differ here. The controller runs the agent's own command
line, so there is no pickle. And it gets its own session, so that the job survives the process that submitted it and is
not reached by a Ctrl-C in its terminal.

No state is kept in memory: status, find and cancel work from any process of this user on this machine.
"""

import contextlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from rlhf_core.errors import SubmissionFailed
from rlhf_core.machine import amd_gpus
from rlhf_core.machine.amd_gpus import AmdGpus
from rlhf_core.machine.main_memory import memory_bytes
from rlhf_core.scheduler.base import JobRequest, JobState, JobStatus, LivingJob
from rlhf_core.scheduler.passed_environment import without_private
from rlhf_core.schemas.resources import (
    JOB_END_VARIABLE,
    JOB_VARIABLE,
    Inventory,
    Submission,
    job_marker,
    parse_job_marker,
)

SHUTDOWN_TIMEOUT_S = 15.0
"""Time that an agent has to end its workers and write its outcome before it is killed."""
KILL_TIMEOUT_S = 10.0
"""Time that killed processes have to disappear."""

_CONTROLLER_MODULE = "submitit.local._local"
_COMMAND_VARIABLE = "SUBMITIT_LOCAL_COMMAND"
_START_TOLERANCE_S = 2.0
"""Start times are derived from the boot time, which clock corrections shift slightly."""
_PID = re.compile(r"[1-9][0-9]{0,9}")

_children: dict[int, "subprocess.Popen[bytes]"] = {}
"""Controllers started by this process, which must reap them, or they stay as zombies."""


class LocalScheduler:
    """Scheduler that runs jobs on this machine; :mod:`rlhf_core.scheduler.base` documents the interface."""

    name = "local"

    def inventory(self) -> Inventory:
        """Return the cores and memory available to this process, NVIDIA GPUs by their device files, or AMD GPUs."""
        name, kind, num_gpus = socket.gethostname(), _gpu_type(), _num_nvidia_gpus()
        if num_gpus == 0 and amd_gpus.are_present():
            with contextlib.suppress(OSError):  # none that this process may use
                kinds = AmdGpus().names()
                num_gpus, kind = len(kinds), kinds[0] if len(set(kinds)) == 1 else ""
        return Inventory(
            node_names=(name,),
            cpus_per_node=len(os.sched_getaffinity(0)),
            memory_gb=memory_bytes()[1] / 2**30,
            gpus_per_node=num_gpus,
            node_gpus={name: num_gpus},
            node_gpu_types={name: kind} if kind else {},
        )

    def script(self, request: JobRequest) -> str:
        """Render the command line, with the variables added to its environment."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in request.environment().items()]
        variables += [f'{name}="${name}"' for name in request.passed.names]
        return " ".join([*variables, shlex.join(request.command)])

    def submit(self, request: JobRequest) -> Submission:
        """Start the job's controller.

        Raises:
            SubmissionFailed: the request is for more than one node, the interpreter does not exist, a variable of
                ``slurm.pass_environment`` has no value here, or the system refused.
        """
        if request.placement.num_nodes != 1:
            raise SubmissionFailed(
                f"the local scheduler has 1 node, the placement asks for {request.placement.num_nodes}; set "
                "resources.num_nodes = 1"
            )
        if shutil.which(request.command[0]) is None:
            raise SubmissionFailed(
                f"{request.command[0]} is not an executable program here; set RLHF_COMPUTE_PYTHON to the Python "
                "interpreter of the compute environment"
            )
        try:
            process = _start_controller(request)
        except OSError as error:
            raise SubmissionFailed(f"failed to start the job: {error}") from error
        pid = process.pid
        _children[pid] = process
        return _submission(request.run_id, request.placement.attempt, pid, request.command, _start_time(pid))

    def status(self, submissions: Sequence[Submission]) -> dict[str, JobStatus]:
        """Return the state of jobs, by job id. A job whose controller and agent are gone has ended."""
        return {submission.job_id: _status(submission) for submission in submissions}

    def find(self, run_id: str, attempt: int, cluster: str = "") -> Submission | None:
        """Find the active job of an attempt by the marker of its processes; the first of several."""
        return next(iter(_jobs(run_id, attempt)), None)

    def living(self) -> Sequence[LivingJob]:
        """List the jobs of this user on this machine by the marker of their processes."""
        markers = {_marker_of(process) for process in psutil.process_iter()} - {""}
        parsed = [named for marker in sorted(markers) if (named := parse_job_marker(marker)) is not None]
        return [LivingJob(run_id, job) for run_id, attempt in parsed for job in _jobs(run_id, attempt)]

    def cancel(self, submission: Submission) -> bool:
        """End the job: its agent first, so that it can write its outcome, then all processes with its attempt's marker.

        Takes up to ``SHUTDOWN_TIMEOUT_S + KILL_TIMEOUT_S`` seconds. Returns False if a process remains, or if the job
        is on another machine.
        """
        if not _is_here(submission):
            return False
        # Listed before anything ends: processes without the marker are only found while their parents live.
        known = _processes(submission)
        agents = [process for process in known if _line(process) == submission.command]
        for agent in agents:
            with contextlib.suppress(psutil.Error):
                agent.terminate()
        psutil.wait_procs(agents, timeout=SHUTDOWN_TIMEOUT_S)
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while remaining := {*_processes(submission), *filter(_is_alive, known)}:
            if time.monotonic() > deadline:
                return False
            for process in remaining:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.05)
        return True


def _start_controller(request: JobRequest) -> "subprocess.Popen[bytes]":
    """Start the controller of a job, like ``submitit.local.local.start_controller``, except for the session, the output
    and the extra variables."""
    environment = without_private(os.environ) | request.environment() | request.passed.values()
    environment |= _controller_variables(shlex.join(request.command), request.time_limit_s)
    folder = request.scheduler_dir
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "controller.log").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", _CONTROLLER_MODULE, str(folder)],
            env=environment,
            # Not the current folder: that of a flow run is temporary, and differs for a later attempt.
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _controller_variables(command: str, time_limit_s: int) -> Mapping[str, str]:
    # SIGUSR2 (save and stop) is sent a tenth of the limit early, within 10 s to 2 min, but not in the first half.
    lead_s = min(max(time_limit_s // 10, 10), 120, time_limit_s // 2)
    return {
        "SUBMITIT_LOCAL_NTASKS": "1",
        _COMMAND_VARIABLE: command,
        "SUBMITIT_LOCAL_TIMEOUT_S": str(time_limit_s),
        JOB_END_VARIABLE: f"{time.time() + time_limit_s:.0f}",
        "SUBMITIT_LOCAL_SIGNAL_DELAY_S": str(lead_s),
        "SUBMITIT_LOCAL_NODEID": "0",
        "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
        "SUBMITIT_STDERR_TO_STDOUT": "1",
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_LOCAL_WITH_SHELL": "",
    }


# ---------------------------------------------------------------------------------------------------------------------
# Processes of a job


def _status(submission: Submission) -> JobStatus:
    if not _is_here(submission):
        return JobStatus(JobState.UNKNOWN, f"the job is on {submission.host}, this is {socket.gethostname()}")
    if _controller(submission) is not None:
        return JobStatus(JobState.RUNNING, nodes=(submission.host,))
    if any(_drives(process, submission.command) for process in _marked(submission.marker)):
        return JobStatus(JobState.RUNNING, "its controller is gone, but its agent is running", nodes=(submission.host,))
    return JobStatus(JobState.ENDED, "its process has ended")


def _jobs(run_id: str, attempt: int) -> list[Submission]:
    """List the active jobs of an attempt, oldest first: their controllers, and agents without one."""
    drivers: dict[int, tuple[psutil.Process, tuple[str, ...]]] = {}
    for process in _marked(job_marker(run_id, attempt)):
        with contextlib.suppress(psutil.Error):
            command = tuple(shlex.split(process.environ().get(_COMMAND_VARIABLE, "")))
            if command and _drives(process, command):
                drivers[process.pid] = process, command
    found = []
    for process, command in drivers.values():
        with contextlib.suppress(psutil.Error):
            if process.ppid() in drivers:
                continue  # the agent of a listed controller
            found.append(_submission(run_id, attempt, process.pid, command, process.create_time()))
    return sorted(found, key=lambda job: (job.process_started, int(job.job_id)))


def _submission(run_id: str, attempt: int, pid: int, command: tuple[str, ...], started: float) -> Submission:
    return Submission(
        attempt=attempt,
        scheduler=LocalScheduler.name,
        job_id=str(pid),
        command=command,
        host=socket.gethostname(),
        process_started=started,
        marker=job_marker(run_id, attempt),
    )


def _is_here(submission: Submission) -> bool:
    return submission.host in ("", socket.gethostname())


def _controller(submission: Submission) -> psutil.Process | None:
    """Return the job's own process, unless it has ended or its id was reused."""
    if _PID.fullmatch(submission.job_id) is None:
        return None  # a submission.json may contain anything
    pid = int(submission.job_id)
    if pid in _children:
        _children[pid].poll()
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - submission.process_started) <= _START_TOLERANCE_S
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.Error:
        return None


def _marked(marker: str) -> Iterator[psutil.Process]:
    """Yield the processes of this user with the marker in their environment, except this one."""
    if not marker:
        return
    for process in psutil.process_iter():
        if _marker_of(process) == marker:
            yield process


def _marker_of(process: psutil.Process) -> str:
    """Read the marker in the environment of a process of this user; empty for others, and for this process."""
    with contextlib.suppress(psutil.Error):
        if process.pid != os.getpid() and process.uids().real == os.getuid():
            marker = process.environ().get(JOB_VARIABLE, "")
            return marker if process.status() != psutil.STATUS_ZOMBIE else ""
    return ""


def _drives(process: psutil.Process, command: tuple[str, ...]) -> bool:
    """Return True if a process is the job's controller or agent, rather than something they left behind."""
    line = _line(process)
    return line == command or _CONTROLLER_MODULE in line


def _line(process: psutil.Process) -> tuple[str, ...]:
    """Read the command line of a process; empty if it is gone."""
    try:
        return tuple(process.cmdline())
    except psutil.Error:
        return ()


def _processes(submission: Submission) -> list[psutil.Process]:
    """List all processes of the job: those with its marker, its controller, and all their descendants."""
    found = set(_marked(submission.marker))
    controller = _controller(submission)
    if controller is not None:
        found.add(controller)
    for process in tuple(found):
        with contextlib.suppress(psutil.Error):
            found.update(process.children(recursive=True))
    found.discard(psutil.Process())
    return list(found)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _start_time(pid: int) -> float:
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        # It has already ended; any time will do, because no process with that id is the job any more.
        return time.time()


def _num_nvidia_gpus() -> int:
    return sum(path.name.removeprefix("nvidia").isdigit() for path in Path("/dev").glob("nvidia*"))


def _gpu_type() -> str:
    """Name of this machine's NVIDIA GPUs according to the driver; empty if unknown or if they differ."""
    kinds = set()
    for path in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        with contextlib.suppress(OSError):
            kinds |= {
                line.partition(":")[2].strip() for line in path.read_text().splitlines() if line.startswith("Model:")
            }
    return kinds.pop() if len(kinds) == 1 else ""
