"""Collection of evidence before it is lost: stacks, process states and log tails.

Evidence is collected before any kill, because the first kill breaks the peers' connections and distorts the picture. A
dump that fails is evidence as well, so every file says why it is incomplete.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter

from rlhf_core.files.appended import read_tail
from rlhf_core.files.whole import write_text
from rlhf_core.schemas.reports import STOPPED_STATES, RankStatus, RepresentedProcess
from rlhf_core.text.redaction import masked
from rlhf_core.worker.worker_process import STACK_SIGNAL

STACK_TIMEOUT_S = 5.0
KILL_TIMEOUT_S = 1.0
LOG_TAIL_BYTES = 32 << 10

_RANKS = TypeAdapter(tuple[RankStatus, ...])


def collect(ranks: Sequence[RankStatus], logs: Mapping[int, Path], folder: Path, node: str) -> list[str]:
    """Save stacks, process states and log tails of this node's workers. Takes up to ``STACK_TIMEOUT_S`` seconds.

    Args:
        ranks: The workers' statuses at the moment they became suspect.
        logs: Their log paths, by local rank.
        folder: The incident's folder; this agent's files are named after the node.
        node: Name of this node.

    Returns:
        Sentences on evidence that could not be collected; collection never raises.
    """
    missing: list[str] = []
    save(folder / f"ranks-{node}.json", _RANKS.dump_json(tuple(ranks), indent=2).decode(), missing)
    found: list[tuple[RankStatus, RankStatus | RepresentedProcess, str]] = [
        (rank, one, f"{node}-{rank.local_rank}-pid{one.pid}") for rank in ranks for one in rank.speaks_for
    ]
    found += [(rank, rank, f"{node}-{rank.local_rank}") for rank in ranks]
    dumps = [_start_py_spy(one.pid, one.process_state) for _, one, _ in found]
    for _, one, name in found:
        save(folder / f"process-{name}.txt", _process_facts(one.pid), missing)
    deadline = time.monotonic() + STACK_TIMEOUT_S
    for (rank, one, name), dump in zip(found, dumps, strict=True):
        text, problem = _finish_py_spy(dump, deadline)
        if problem:
            whose = f"rank {rank.rank}" if one is rank else f"process {one.pid}, which reports as rank {rank.rank},"
            missing.append(f"no stack of {whose} from py-spy: {problem}")
            text = f"py-spy: {problem}\n" + (f"{_request_stack(rank)}\n" if one is rank else "")
        save(folder / f"stack-{name}.txt", text, missing)
    missing.extend(save_log_tails(logs, folder, node))
    return missing


def save_log_tails(logs: Mapping[int, Path], folder: Path, node: str) -> list[str]:
    """Copy the workers' log tails into the incident's folder; returns sentences on what could not be copied."""
    missing: list[str] = []
    for local_rank, path in logs.items():
        save(folder / f"log-{node}-{local_rank}.txt", masked(log_tail(path)), missing)
    return missing


def log_tail(path: Path) -> str:
    """The last complete lines of a log; empty if it cannot be read."""
    return read_tail(path, LOG_TAIL_BYTES)


def save(path: Path, text: str, missing: list[str]) -> None:
    """Write one piece of evidence; on failure, append a sentence to ``missing``."""
    try:
        write_text(path, text)
    except OSError as error:
        missing.append(f"{path.name} could not be written: {error.strerror}")


def _process_facts(pid: int) -> str:
    parts = []
    for name in ("stat", "wchan", "status", "stack"):
        try:
            content = Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace").strip()
        except OSError as error:
            content = f"({error.strerror})"
        parts.append(f"== {name} ==\n{content}\n")
    return "\n".join(parts)


# ---------------------------------------------------------------------------------------------------------------------
# Stacks


def find_py_spy() -> str | None:
    """Path of py-spy, preferably from this interpreter's environment; None if it is not installed."""
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return shutil.which("py-spy", path=folders)


def _start_py_spy(pid: int, process_state: str) -> "subprocess.Popen[str] | str":
    """Start a dump; returns the running process, or the reason why there is none."""
    program = find_py_spy()
    if program is None:
        return "it is not installed (it comes with rlhf-flows[training])"
    command = [program, "dump", "--pid", str(pid)]
    if process_state in STOPPED_STATES:
        # By default py-spy stops the process it reads, which fails for one that is already stopped.
        command.append("--nonblocking")
    try:
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace"
        )
    except OSError as error:
        return f"it could not be started: {error}"


def _finish_py_spy(dump: "subprocess.Popen[str] | str", deadline: float) -> tuple[str, str]:
    """The stacks, and the error if any (otherwise empty)."""
    if isinstance(dump, str):
        return "", dump
    try:
        output, _ = dump.communicate(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        dump.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it is in the kernel, reading from a hung file system
            dump.communicate(timeout=KILL_TIMEOUT_S)
        return "", f"no answer within {STACK_TIMEOUT_S:.0f} s"
    return (output, "") if dump.returncode == 0 else ("", output.strip() or f"exit code {dump.returncode}")


def _request_stack(rank: RankStatus) -> str:
    """Fall back to the worker's own fault handler, which writes into its log; the log is saved afterwards."""
    if rank.process_state in STOPPED_STATES:
        return "The process is stopped and cannot write its stack itself."
    if rank.sequence == 0:
        # A worker installs its fault handler before its first beat; without the handler the signal would kill it.
        return "The process has not sent a heartbeat yet and cannot be asked."
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(rank.pid, STACK_SIGNAL)
        time.sleep(0.2)
        return "It was asked to write its stack to its log instead."
    return "The process is gone."
