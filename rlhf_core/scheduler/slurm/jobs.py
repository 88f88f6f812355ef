"""State of a job of Slurm: by its row in the queue or, if Slurm has forgotten it, by accounting."""

import os
import re
from contextlib import suppress

from rlhf_core.errors import SchedulerError
from rlhf_core.scheduler.base import JobState, JobStatus
from rlhf_core.scheduler.slurm import commands
from rlhf_core.scheduler.slurm.nodes import down_nodes, node_names, node_states, powered_off_nodes, unprepared_nodes
from rlhf_core.scheduler.slurm.queue import QueuedJob, selected
from rlhf_core.schemas.resources import Submission, parse_job_marker

_WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD"})
_AT_WORK = frozenset({"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"})
_ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "SPECIAL_EXIT",
        "TIMEOUT",
    }
)


_NEEDS_ACTION = re.compile(
    r"AccountNotAllowed|BadConstraints|DependencyNeverSatisfied|Invalid(Account|QOS)|JobHeld(Admin|User)"
    r"|JobHoldMaxRequeue|Partition(Node|Time)Limit|QOSNotAllowed|ReservationDeleted|launch.failed.requeued.held"
    r"|(QOS|Assoc)(Max\w+PerJob\w*|Min\w+)"
)
"""Reasons for which a job waits although resources become free: limits that it exceeds by itself, and holds."""


def has_ended(row: QueuedJob) -> bool:
    """Return True if a job in the queue has ended."""
    return row.state.partition(" ")[0] in _ENDED


def status_of(row: QueuedJob, marker: str = "") -> JobStatus:
    """Translate a row of the queue into a job status.

    Args:
        marker: Marker of the job that is meant. Slurm gives numbers again, for instance after a new installation: a
            job of another attempt, or one that is no run's, must be neither waited for nor cancelled.
    """
    other = _other_job(row, marker)
    if other:
        return JobStatus(JobState.ENDED, f"Slurm has given the number of the job again, to {other}")
    word = row.state.partition(" ")[0] or "?"
    if word in _ENDED:
        return _ended(row, word)
    if word in _AT_WORK:
        reason = "" if word == "RUNNING" else f"Slurm says {word}"
        return JobStatus(JobState.RUNNING, reason, node_names(row.nodes), scheduler_state=word)
    if word in _WAITING:
        return _waiting(row, word)
    return JobStatus(JobState.UNKNOWN, f"Slurm says {word}", scheduler_state=word)


def _other_job(row: QueuedJob, marker: str) -> str:
    """Name of the job in a row if it cannot be the one with this marker; otherwise empty. Plug-ins of a site may
    rewrite a comment, but hardly a name and a folder as well."""
    meant = parse_job_marker(marker)
    if meant is None or row.marker == marker:
        return ""
    if parse_job_marker(row.marker) is not None:
        return row.marker
    is_meant = row.name in ("", meant[0]) or row.attempt == meant
    return "" if is_meant else row.name


def _ended(row: QueuedJob, word: str) -> JobStatus:
    why = f" ({row.reason})" if row.reason not in ("None", "") else ""
    state, lost = word, tuple[str, ...]()
    if word == "CANCELLED":
        lost = unprepared_nodes(row.nodes, commands.parse_time(row.start))
        if lost:
            reason = f"Slurm says CANCELLED, because the Prolog failed on {', '.join(lost)}"
            return _ended_as("LAUNCH_FAILED", reason, row, lost)
        state = _by_whom(_accounted_state(row.job_id)) or word
    elif word in ("NODE_FAIL", "BOOT_FAIL"):
        states = node_states(row.nodes)
        lost, off = down_nodes(states), powered_off_nodes(states)
        if off and set(lost) <= set(off):
            reason = f"Slurm says {word}{why}, because {', '.join(off)} did not start or were switched off"
            return _ended_as("POWERED_OFF", reason, row)
    return _ended_as(state, f"Slurm says {state}{why}", row, lost)


def _ended_as(state: str, reason: str, row: QueuedJob, lost: tuple[str, ...] = ()) -> JobStatus:
    return JobStatus(JobState.ENDED, reason, node_names(row.nodes), scheduler_state=state, lost_nodes=lost)


def _waiting(row: QueuedJob, word: str) -> JobStatus:
    if _NEEDS_ACTION.fullmatch(row.reason):
        reason = f"{row.reason}, until its user or an administrator acts"
        return JobStatus(JobState.PENDING, reason, scheduler_state=word, needs_action=True)
    start = commands.parse_time(row.start)
    why = "the scheduler has not considered it yet" if row.reason == "None" else row.reason
    reason = f"{why}, expected to start {start:%Y-%m-%d %H:%M} UTC" if start else why
    return JobStatus(JobState.PENDING, reason, scheduler_state=word)


def query_job(submission: Submission) -> JobStatus:
    """Query a job that is missing from the cached queue because it is too new or Slurm has forgotten it."""
    job_id = submission.job_id
    try:
        row = next(iter(selected(f"--jobs={commands.require_job_id(job_id)}").values()), None)
    except SchedulerError as error:
        if "Invalid job id" not in str(error):
            return JobStatus(JobState.UNKNOWN, str(error))
        row = None
    return _from_accounting(job_id) if row is None else status_of(row, submission.marker)


def _from_accounting(job_id: str) -> JobStatus:
    """Query accounting, if there is any, for a job that slurmctld has forgotten, and which has therefore ended."""
    state = _accounted_state(job_id)
    word = state.partition(" ")[0]
    if word not in _ENDED:
        return JobStatus(JobState.ENDED, "Slurm no longer has a record of the job")
    reported = _by_whom(state) or word
    return JobStatus(JobState.ENDED, f"Slurm's accounting reports {reported}", scheduler_state=reported)


def _accounted_state(job_id: str) -> str:
    """State of a job in accounting, for instance ``CANCELLED by 1000``; empty without accounting."""
    with suppress(SchedulerError):
        text = commands.run("sacct", "--noheader", "--allocations", "--parsable2", "--format=State", f"--jobs={job_id}")
        return text.partition("\n")[0].strip()
    return ""


def _by_whom(state: str) -> str:
    """State of a job that another user cancelled: an administrator, an operator or the scheduler. Empty if it was the
    job's own user, or if accounting, the only one to know, does not tell."""
    found = re.fullmatch(r"CANCELLED by (\d+)", state)
    if found is None or int(found[1]) == os.getuid():
        return ""
    return state if found[1] == "0" else f"CANCELLED by another user (uid {found[1]})"


def only_the_lost_remain(status: JobStatus) -> bool:
    """Return True if Slurm is only waiting for a job's last nodes, which do not answer."""
    if status.scheduler_state != "COMPLETING":
        return False
    return set(status.nodes) == set(down_nodes(node_states(",".join(status.nodes))))
