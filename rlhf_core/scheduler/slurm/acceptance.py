"""The answer of sbatch to a job: accepted, refused for now, refused for good, or unknown."""

import re
import subprocess

from rlhf_core.errors import SchedulerUnavailable, SubmissionDeferred, SubmissionFailed


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
