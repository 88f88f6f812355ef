"""Translation of Slurm's answers into job states, node names and refusals."""

import contextlib
import functools
import os
import re
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from rlhf_core.errors import SchedulerError, SchedulerUnavailable, SubmissionDeferred, SubmissionFailed
from rlhf_core.scheduler import slurm_queue
from rlhf_core.scheduler.base import JobState, JobStatus
from rlhf_core.scheduler.slurm_queue import QueuedJob
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
    r"AccountNotAllowed|BadConstraints|Invalid(Account|QOS)|JobHeld(Admin|User)|JobHoldMaxRequeue|Partition(Node|Time)Limit"
    r"|QOSNotAllowed|ReservationDeleted|launch.failed.requeued.held|(QOS|Assoc)(Max\w+PerJob\w*|Min\w+)"
)
"""Reasons for which a job waits although resources become free: limits that it exceeds by itself, and holds."""


def has_ended(row: QueuedJob) -> bool:
    """Return True if a job in the queue has ended."""
    return row.state.partition(" ")[0] in _ENDED


def status_of(row: QueuedJob, marker: str = "") -> JobStatus:
    """Translate a row of the queue into a job status.

    Args:
        marker: Marker of the job that is meant. Slurm gives numbers again, for instance after a new installation: a
            job with the marker of another attempt must be neither waited for nor cancelled.
    """
    if marker and row.marker != marker and parse_job_marker(row.marker) is not None:
        return JobStatus(JobState.ENDED, f"Slurm has given the number of the job again, to {row.marker}")
    word = row.state.partition(" ")[0] or "?"
    if word == "CANCELLED" and (failed := _without_prolog(row)):
        reason = f"Slurm says CANCELLED, because the Prolog failed on {', '.join(failed)}"
        return JobStatus(JobState.ENDED, reason, _names(row.nodes), scheduler_state="LAUNCH_FAILED", lost_nodes=failed)
    if word in _ENDED:
        why = f" ({row.reason})" if row.reason not in ("None", "") else ""
        states = _node_states(row.nodes) if word in ("NODE_FAIL", "BOOT_FAIL") else []
        lost = _down(states)
        off = tuple(dict.fromkeys(node for node, state in states if state[-1] in _POWERED_OFF))
        if off and set(lost) <= set(off):
            reason = f"Slurm says {word}{why}, because {', '.join(off)} did not start or were switched off"
            return JobStatus(JobState.ENDED, reason, _names(row.nodes), scheduler_state="POWERED_OFF")
        state = _by_whom(_accounted_state(row.job_id)) or word if word == "CANCELLED" else word
        reason = f"Slurm says {state}{why}"
        return JobStatus(JobState.ENDED, reason, _names(row.nodes), scheduler_state=state, lost_nodes=lost)
    if word in _AT_WORK:
        reason = "" if word == "RUNNING" else f"Slurm says {word}"
        return JobStatus(JobState.RUNNING, reason, _names(row.nodes), scheduler_state=word)
    if word in _WAITING:
        if _NEEDS_ACTION.fullmatch(row.reason):
            reason = f"{row.reason}, until its user or an administrator acts"
            return JobStatus(JobState.PENDING, reason, scheduler_state=word, needs_action=True)
        start = _time(row.start)
        why = "the scheduler has not considered it yet" if row.reason == "None" else row.reason
        reason = f"{why}, expected to start {start:%Y-%m-%d %H:%M} UTC" if start else why
        return JobStatus(JobState.PENDING, reason, scheduler_state=word)
    return JobStatus(JobState.UNKNOWN, f"Slurm says {word}", scheduler_state=word)


def another_cluster(name: str) -> str:
    """Describe the problem if this host's Slurm may be another cluster than the one of that name; empty if it is not,
    or if ``name`` is empty. That a cluster does not know a job of another one says nothing about the job."""
    here = slurm_queue.cluster_name() if name else ""
    if here == name:
        return ""
    found = f"this host belongs to the cluster {here}" if here else "the name of this host's cluster could not be read"
    return f"the job belongs to the Slurm cluster {name}, but {found}"


def query_job(submission: Submission) -> JobStatus:
    """Query a job that is missing from the cached queue because it is too new or Slurm has forgotten it."""
    job_id = submission.job_id
    try:
        text = slurm_queue.run("scontrol", "--oneliner", "show", "job", slurm_queue.require_job_id(job_id))
    except SchedulerError as error:
        if "Invalid job id" not in str(error):
            return JobStatus(JobState.UNKNOWN, str(error))
        return _from_accounting(job_id)
    fields = dict(re.findall(r"(\w+)=(\S*)", text))
    nodes = fields.get("NodeList", "").replace("(null)", "")
    start = fields.get("StartTime", "N/A").replace("Unknown", "N/A")
    state, reason, comment = fields.get("JobState", "?"), fields.get("Reason", ""), fields.get("Comment", "")
    folder = re.search(r" WorkDir=(.*?)(?= \w+=|$)", text)  # which may contain blanks
    name = fields.get("JobName", "")
    job = QueuedJob(job_id, state, reason, nodes, start, comment, folder[1] if folder else "", name)
    return status_of(job, submission.marker)


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
    with contextlib.suppress(SchedulerError):
        text = slurm_queue.run(
            "sacct", "--noheader", "--allocations", "--parsable2", "--format=State", f"--jobs={job_id}"
        )
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
    return set(status.nodes) == set(_down(_node_states(",".join(status.nodes))))


def _node_states(nodes: str) -> list[tuple[str, str]]:
    """Query the current state of nodes in ``sinfo``'s short spelling; empty if Slurm does not answer."""
    with contextlib.suppress(SchedulerError):
        text = slurm_queue.run("sinfo", "--all", "--noheader", "--Node", f"--nodes={nodes}", "--format=%N %t")
        return [(row[0], row[1]) for line in text.splitlines() if len(row := line.split()) == 2]
    return []


def _down(states: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """List the nodes that are out of service.

    A drained node counts only if no other is: an administrator may have drained it while the job ran, but Slurm also
    says ``drain`` of a node that was drained and went down.
    """
    for pattern in (r"down|fail|unk|inval|.*\*$", r"drain"):
        found = tuple(dict.fromkeys(node for node, state in states if re.match(pattern, state)))
        if found:
            return found
    return ()


_POWERED_OFF = "~#!%"
"""Last characters of the state of a node that Slurm switches on or off, as in a cloud. It marks one that does not start
in time, for lack of capacity for instance, as ``down~``."""


_BEFORE_PROLOG = -timedelta(seconds=10)
"""A node that was drained earlier was drained for another job. Times of Slurm are in whole seconds."""
_PROLOG_WITHIN = timedelta(minutes=30)
"""Time after the start of a job in which its Prolog may fail; a later failure is that of another job on the node."""


def _without_prolog(row: QueuedJob) -> tuple[str, ...]:
    """List the nodes that Slurm drained because they could not be prepared for a job. It then cancels the job, unless
    the job may be requeued."""
    start = _time(row.start)
    if not row.nodes or start is None:
        return ()
    with contextlib.suppress(SchedulerError):
        query = ("--all", "--noheader", "--Node", f"--nodes={row.nodes}", "--format=%N|%H|%E")
        text = slurm_queue.run("sinfo", *query)
        found = [line.split("|", 2) for line in text.splitlines() if line.count("|") >= 2]
        failed = [(name, _time(since)) for name, since, why in found if why.startswith(_NOT_PREPARED)]
        return tuple(dict.fromkeys(name for name, at in failed if at and _BEFORE_PROLOG < at - start < _PROLOG_WITHIN))
    return ()


_NOT_PREPARED = ("Prolog error", "Job env setup error")
"""Reasons with which Slurm drains such a node (``validate_node_specs`` in its ``node_mgr.c``)."""


def _time(text: str) -> datetime | None:
    """Read a time of Slurm, which is local; None if there is none."""
    with contextlib.suppress(ValueError):
        return datetime.fromisoformat(text).astimezone(UTC)
    return None


def _names(nodes: str) -> tuple[str, ...]:
    """Expand ``node[1-3]`` to three names."""
    if not re.search(r"[\[,]", nodes):
        return (nodes,) if nodes else ()
    try:
        return _expanded(nodes)
    except SchedulerError:
        return (nodes,)


@functools.lru_cache(maxsize=1024)
def _expanded(nodes: str) -> tuple[str, ...]:
    """Expand names with scontrol, which does not need slurmctld. Cached, because every poll of a job calls it."""
    return tuple(slurm_queue.run("scontrol", "show", "hostnames", nodes).split())


def leading_number(text: str) -> int:
    """Number at the start of a text such as ``128+``; 0 if there is none."""
    digits = re.match(r"\d+", text)
    return int(digits[0]) if digits else 0


def num_gpus(gres: str) -> int:
    """Count the GPUs in a node's generic resources, for instance ``gpu:h100:8(S:0-1),nvme:1``."""
    return sum(int(number) for number in re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)", gres))


def gpu_type(gres: str) -> str:
    """Return the type of a node's GPUs; empty if Slurm reports none, or several."""
    kinds = set(re.findall(r"(?:^|,)gpu:([^:,(]+):\d+", gres))
    return kinds.pop() if len(kinds) == 1 else ""


def reserved_nodes() -> dict[str, str]:
    """Query the nodes of each reservation, in Slurm's short form; empty if Slurm does not answer."""
    with contextlib.suppress(SchedulerError):
        text = slurm_queue.run("scontrol", "--oneliner", "show", "reservation")
        found = re.findall(r"^ReservationName=(\S+).*? Nodes=(\S+)", text, re.MULTILINE)
        return {name: nodes for name, nodes in found if nodes != "(null)"}
    return {}


def accepted_job(sbatch: subprocess.CompletedProcess[str]) -> str:
    """Return the number of the job that sbatch submitted.

    Raises:
        SchedulerUnavailable: sbatch did not confirm the job, which may have been accepted.
        SubmissionDeferred: Slurm refused the job for now; the message quotes Slurm.
        SubmissionFailed: Slurm refused it for good.
    """
    # A wrapper of the site may print more, with numbers of its own, and may fail after the submission.
    confirmed = re.findall(r"Submitted batch job ([0-9]+)", sbatch.stdout)
    if confirmed:
        return str(confirmed[-1])
    said = sbatch.stdout.strip()[-500:]
    # Wrappers print what they have checked also before an sbatch that is killed after the job was accepted.
    refused = refusal(sbatch.stderr) or (said if _REFUSES.search(said) else "")
    answer = refused or said
    if sbatch.returncode == 0:
        numbers = re.findall(r"job ([0-9]+)", sbatch.stdout)
        if numbers:
            return str(numbers[-1])
        answer = f"found no number of a job in {said!r}"
    elif sbatch.returncode > 0 and refused and not is_no_answer(refused):  # a refusal has a reason
        if will_pass(refused):
            raise SubmissionDeferred(f"Slurm does not accept the job for now: {refused}")
        raise SubmissionFailed(f"Slurm refused the job: {refused}")
    raise SchedulerUnavailable(f"Slurm did not confirm the job: {answer or 'sbatch was killed, or failed silently'}")


_REFUSES = re.compile(r"fail|error|denied|refus|reject|invalid|not (allowed|permitted|valid)|exceed", re.IGNORECASE)
"""Words with which a wrapper around sbatch refuses a job on standard output."""


def refusal(text: str) -> str:
    """Extract Slurm's own message from the errors of sbatch, which a program of the site may wrap."""
    lines = [line.strip() for line in text.splitlines() if "sbatch:" in line]
    return " ".join(line.removeprefix("sbatch: error: ") for line in lines) or text.strip()[-500:]


def is_no_answer(text: str) -> bool:
    """Return True if Slurm was not reached; the job may still have been accepted."""
    silent = ("Unable to contact slurm controller", "Socket timed out", "Zero Bytes were transmitted")
    return any(words.lower() in text.lower() for words in (*silent, "Connection refused", "timed out"))


_FOR_NOW = (
    "Required partition not available",  # inactive or drained
    "violates accounting/QOS policy",
    "job submit limit",
    "temporarily unable to accept job",
    "Resource temporarily unavailable",  # the same, by errno
    "I/O error writing script/environment to file",  # the disk of slurmctld is full
)
"""Refusals that end when an administrator or other jobs of the user do something."""
_OF_THE_JOB = re.compile(r"\b(QOS|Assoc)(?!\w*Submit)\w+")
"""Limits, in Slurm's names, that the job itself exceeds, whatever else is running. When a job is submitted, Slurm adds
what others use only for the number of submitted jobs (``acct_policy_validate`` in its ``acct_policy.c``); for the other
limits of a user, an account or a group, accepted jobs wait in the queue."""


def will_pass(text: str) -> bool:
    """Return True if Slurm refuses a job for now and may accept the same one later."""
    return any(words.lower() in text.lower() for words in _FOR_NOW) and _OF_THE_JOB.search(text) is None


def takes_no_job(state: str) -> bool:
    """True for a node state, in ``sinfo``'s spelling, in which the node gets no jobs until an administrator acts.

    A star marks a node that does not answer, and ``inval`` one that has less than its configuration says, for instance
    a GPU less. A busy node, or one powered down to save energy, takes jobs.
    """
    out = ("down", "drain", "fail", "error", "maint", "inval", "unknown", "future")
    return state.endswith("*") or state.startswith(out)
