"""Slurm's commands: how they are run, and the controller and cluster that they reach."""

import functools
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime

from rlhf_core.errors import SchedulerError, SchedulerUnavailable
from rlhf_core.scheduler.slurm.environment import for_queries

COMMAND_S = 30.0
"""Timeout of a Slurm command; if slurmctld is down, each blocks for about ten seconds."""
PING_S = 10.0
"""Timeout of the ping of slurmctld, which normally takes milliseconds."""
_JOB_ID = re.compile(r"[0-9]{1,18}([_+][0-9]{1,18})?")


def run(*words: str, seconds: float = COMMAND_S) -> str:
    """Run a Slurm command and return its output.

    Args:
        seconds: Timeout.

    Raises:
        SchedulerUnavailable: it failed or did not answer; the message includes its output.
        SchedulerError: it is not installed, or refuses for good.
    """
    done = run_to_end(words, for_queries(os.environ), seconds)
    if done.returncode != 0:
        output = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        advice = next((advice for words, advice in _FOR_GOOD.items() if words.lower() in output.lower()), "")
        if advice:
            raise SchedulerError(f"{words[0]}: {output}. {advice}")
        raise SchedulerUnavailable(f"{words[0]}: {output}")
    return done.stdout


_FOR_GOOD = {
    "Access/permission denied": (
        "Slurm denies this to the user. Ask its administrators; PrivateData in slurm.conf, for instance, may hide the "
        "nodes, by whose list jobs are placed"
    ),
    "Only one cluster can be used at a time": "Set SLURM_CLUSTERS to one cluster where the services start",
}
"""Refusals of a query that do not pass by themselves, each with the advice."""


def run_to_end(
    words: Sequence[str], environment: Mapping[str, str], seconds: float = COMMAND_S
) -> subprocess.CompletedProcess[str]:
    """Run a Slurm command to its end, successful or not.

    Raises:
        SchedulerUnavailable: it did not end in time, or could not be started, as on a crowded login node.
        SchedulerError: it is not installed.
    """
    try:
        # Comments of this user's other jobs, and messages in the language of the site, may not be UTF-8.
        return subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=seconds, check=False, env=environment
        )
    except FileNotFoundError:
        message = f"{words[0]} is not installed; RLHF_SCHEDULER=slurm cannot work on this machine, use local"
        raise SchedulerError(message) from None
    except subprocess.TimeoutExpired:
        raise SchedulerUnavailable(f"{words[0]} did not respond within {seconds:.0f} s") from None
    except OSError as error:
        raise SchedulerUnavailable(f"{words[0]} could not be started: {error.strerror}") from error


def require_controller() -> None:
    """Make sure that Slurm's controller answers.

    Raises:
        SchedulerUnavailable: it does not.
        SchedulerError: Slurm's commands are not installed, or refuse for good.
    """
    try:
        answer = run("scontrol", "ping", seconds=PING_S)
    except SchedulerUnavailable as error:
        answer = str(error)
    else:
        if " UP" in answer:
            return
    # Slurm adds a banner of asterisks.
    words = " ".join(line.strip() for line in answer.splitlines() if not line.startswith("**"))
    raise SchedulerUnavailable(f"Slurm's controller does not respond: {words}")


def cluster_name() -> str:
    """Return the name of the cluster that Slurm's commands reach from here; empty if they do not tell it."""
    try:
        return _cluster_name(cluster_variables())
    except SchedulerError:
        return ""


@functools.lru_cache(maxsize=8)
def _cluster_name(variables: tuple[str, ...]) -> str:
    """Name of the cluster of these variables. Raises an error where there is none, so that it is asked for again."""
    found = re.search(r"^ClusterName\s*=\s*(\S+)", run("scontrol", "show", "config"), re.MULTILINE)
    if found is None:
        raise SchedulerError("scontrol show config: found no ClusterName")
    return found[1]


def cluster_variables() -> tuple[str, ...]:
    """Variables that decide which cluster Slurm's commands reach."""
    return tuple(os.environ.get(name, "") for name in ("SLURM_CONF", "SLURM_CLUSTERS"))


def another_cluster(name: str) -> str:
    """Describe the problem if this host's Slurm may be another cluster than the one of that name; empty if it is not,
    or if ``name`` is empty. That a cluster does not know a job of another one says nothing about the job."""
    here = cluster_name() if name else ""
    if here == name:
        return ""
    found = f"this host belongs to the cluster {here}" if here else "the name of this host's cluster could not be read"
    return f"the job belongs to the Slurm cluster {name}, but {found}"


def require_job_id(text: str) -> str:
    """Validate the id of a Slurm job, array task or heterogeneous component before it goes onto a command line.

    Raises:
        SchedulerError: it is not a job id: a ``submission.json`` may contain anything.
    """
    if _JOB_ID.fullmatch(text) is None:
        raise SchedulerError(f"found the job id {text[:80]!r}, expected a Slurm job number such as 4711")
    return text


def parse_time(text: str) -> datetime | None:
    """Parse a time that Slurm prints, which is local; None if there is none."""
    with suppress(ValueError):
        return datetime.fromisoformat(text).astimezone(UTC)
    return None
