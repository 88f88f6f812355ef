"""Queries to other programs: one subprocess with a time limit each; the last line of its output is the answer."""

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rlhf_core.config.site import Site
from rlhf_core.errors import SubmissionFailed
from rlhf_core.scheduler.passed_environment import PassedEnvironment, without_private
from rlhf_core.schemas.run import RunSpec

IMPORT_TIMEOUT_S = 120.0
"""Time limit to import a user's module. Generous: a cold shared file system is slow."""

Tick = Callable[[], None]
"""Called about every half second while waiting; may raise to stop."""


def secrets_of(spec: RunSpec, site: Site) -> PassedEnvironment:
    """Variables that are passed to the job of a run as secrets."""
    return PassedEnvironment(spec.slurm.over(site.slurm).pass_environment, site.job_secrets)


def ask_worker(
    spec: RunSpec, site: Site, *words: str, tick: Tick = lambda: None, timeout_s: float = IMPORT_TIMEOUT_S
) -> dict[str, Any] | str:
    """Answer of ``python -m rlhf_core.worker`` in the compute interpreter; the error as a sentence if it gives none."""
    command = [site.compute_python, "-P", "-m", "rlhf_core.worker", *words]
    return query_program(command, tick, secrets_of(spec, site), timeout_s=timeout_s)


def query_program(
    command: Sequence[str],
    tick: Tick,
    passed: PassedEnvironment | None = None,
    *,
    variables: Mapping[str, str] | None = None,
    folder: Path | None = None,
    timeout_s: float = IMPORT_TIMEOUT_S,
) -> dict[str, Any] | str:
    """Run a command and parse the last line of its output as a JSON object; return the error as a sentence if that
    fails.

    It runs without the private variables that jobs do not get, and with the secrets that are passed to the job.

    Args:
        variables: Further variables.
        folder: Folder to run it in; without one that exists, it runs in an empty one, because the nodes lack the
            current one.
        timeout_s: Time limit of the answer.
    """
    environment = without_private(os.environ)
    with contextlib.suppress(SubmissionFailed):  # reported by environment.passed
        environment |= passed.values() if passed is not None else {}
    environment |= variables or {}
    with (
        tempfile.TemporaryDirectory() as nowhere,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as complaints,
    ):
        try:
            process = subprocess.Popen(
                command,
                cwd=folder if folder is not None and folder.is_dir() else nowhere,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=complaints,
                start_new_session=True,
            )
        except OSError as error:
            return f"cannot be started: {error.strerror}"
        try:
            ended = _wait(process, timeout_s, tick)
        finally:
            _end(process)
        answer, complaint = _last_line(output), _last_line(complaints)
    if not ended:
        return f"no answer within {timeout_s:g} s" + (f"; its last line: {complaint}" if complaint else "")
    try:
        content = json.loads(answer)
    except ValueError:
        content = None
    if isinstance(content, dict):
        return content
    return f"ended with exit code {process.returncode}" + (f": {complaint}" if complaint else " and no output")


def _last_line(file: IO[bytes]) -> str:
    file.seek(0)
    lines = file.read().decode("utf-8", errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""


def _wait(process: "subprocess.Popen[bytes]", timeout_s: float, tick: Tick) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            tick()
            continue
        return True
    return False


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill the command and its children: it has its own session, and therefore its own process group."""
    if process.poll() is None:
        os.killpg(process.pid, 9)
        process.wait()
