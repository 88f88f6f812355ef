"""The process of one worker: sets itself up, runs its role, and records its outcome.

It catches every exception in order to write it to the outcome file. Any other broad handler re-raises, or has a comment
that justifies it.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn, cast

from rlhf_core.errors import CheckpointCorrupt, DegenerateRl, RunDirError
from rlhf_core.files.whole import read_model, write_model
from rlhf_core.machine.parent_death import die_with_parent
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.base import MESSAGE_CHARACTERS, utc_now
from rlhf_core.schemas.reports import Phase, WorkerOutcome
from rlhf_core.schemas.resources import Placement
from rlhf_core.text.redaction import masked
from rlhf_core.training.types import NullReporter, Reporter, RoleResult, WorkerContext
from rlhf_core.worker import processes
from rlhf_core.worker.liveness.collectives import answer_in_background
from rlhf_core.worker.liveness.heartbeat import Beat, memory_folder
from rlhf_core.worker.nodes.membership import Nodes
from rlhf_core.worker.roles import load, target_of

SLOTS_VARIABLE = "RLHF_SLOTS"
"""Environment variable with the path of the slot file; set by the agent."""
AGENT_VARIABLE = "RLHF_AGENT_PID"
"""Environment variable with the agent's process id; set by the agent."""

MAX_CHARACTERS = 16_384
"""Longest part of an error that a worker reports: an error may quote a whole batch, and the message with which an agent
reports those of all its workers is limited."""

STACK_SIGNAL = signal.SIGUSR1
"""Signal on which a worker dumps the stacks of all its threads to its log, even while C code holds the GIL."""

_CUT = " [...] "


@dataclass(frozen=True)
class WorkerArguments:
    """Command-line arguments of one worker; ranks and addresses come from the environment."""

    role: Role
    run_dir: Path
    attempt: int
    restart: int
    node: str
    generation: int | None = None
    """Start number of a group whose files are kept apart from those of the restart; otherwise None."""
    store: Path | None = None
    """Rendezvous file of the ranks if all are on this node."""
    target: str | None = None
    import_paths: Sequence[Path] = ()
    damaged: Sequence[str] = ()
    """Checkpoints found damaged in this attempt."""


def run_worker(arguments: WorkerArguments) -> NoReturn:
    """Run one worker and exit: with code 0 if its role returned, with 1 if it raised.

    It exits at once, skipping the interpreter's teardown. After an error, teardown may wait for threads forever, and
    the sooner the connections close, the sooner the other ranks notice. After success, a library's thread may abort
    during teardown ("terminate called without an active exception", seen with torch 2.13 and gloo), and a rank that had
    done all its work would count as failed.
    """
    prepare_signals()
    processes.allow_stack_dumps()

    run_dir = RunDir(arguments.run_dir.absolute())
    attempt_dir = run_dir.attempt(arguments.attempt)
    beside = arguments.generation
    folder = attempt_dir.restart(arguments.restart) if beside is None else attempt_dir.group(arguments.role, beside)
    local_rank, rank = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("RANK", "0"))
    write_output_to(folder.log(arguments.role, arguments.node, local_rank))
    faulthandler.enable(all_threads=True)
    faulthandler.register(STACK_SIGNAL, all_threads=True)

    beat = None
    if slots := os.environ.get(SLOTS_VARIABLE):  # not set for a worker started by hand
        beat = Beat(Path(slots), local_rank)
        answer_in_background(beat, Path(slots), local_rank)
    outcome = _outcome(arguments, rank, beat, _run(arguments, run_dir, local_rank, rank, beat))
    _leave(outcome, folder.worker_outcome(arguments.role, arguments.node, local_rank), local_rank)
    if not outcome.ok:
        _write_error(outcome.traceback)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a full disk, or a stream closed by the role
            stream.flush()
    os._exit(0 if outcome.ok else 1)


def prepare_signals() -> None:
    """Make this process die with its agent, and leave signals that Slurm sends to the whole job to the agent."""
    agent = os.environ.get(AGENT_VARIABLE)
    die_with_parent(parent=int(agent) if agent else None)
    # The agent blocked USR2 while starting this process: some clusters send it to all processes of a job.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    if "SLURM_JOB_ID" in os.environ:
        # A handler rather than SIG_IGN, which programs started by user code would inherit.
        signal.signal(signal.SIGTERM, _leave_it_to_the_agent)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})


def write_output_to(path: Path, descriptors: Collection[int] = (1, 2)) -> None:
    """Append standard output and error to a log, including those of C++ code and child processes.

    Args:
        path: The log.
        descriptors: 1 for standard output, 2 for standard error.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        # Keep the agent's output: a full disk should be reported as such, not as a worker that cannot start.
        _write_error(f"{path} cannot be opened: {error}\n")
        return
    for descriptor in descriptors:
        os.dup2(log, descriptor)
    os.close(log)


def spare_outcome(slots: Path, local_rank: int) -> Path:
    """Path of a worker's outcome if the run directory is full: next to the slot file, on the node."""
    return slots.with_name(f"{slots.name}.outcome-{local_rank}.json")


def _leave_it_to_the_agent(number: int, frame: FrameType | None) -> None:
    """Ignore the signal: the agent asks this worker to save and stop, or kills it."""


def _leave(outcome: WorkerOutcome, path: Path, local_rank: int) -> None:
    try:
        write_model(path, outcome)
    except OSError as error:
        _write_error(f"{path} could not be written: {error}\n")
        if slots := os.environ.get(SLOTS_VARIABLE):
            with contextlib.suppress(OSError):
                write_model(spare_outcome(Path(slots), local_rank), outcome)


def _run(
    arguments: WorkerArguments, run_dir: RunDir, local_rank: int, rank: int, reporter: Reporter | None
) -> RoleResult | BaseException:
    try:
        _make_importable(run_dir, arguments.import_paths)
        nodes = Nodes.of()
        context = WorkerContext(
            run_dir=run_dir,
            attempt=arguments.attempt,
            restart=arguments.restart,
            generation=arguments.generation,
            stored=run_dir.read_spec(),
            placement=_read_placement(run_dir, arguments.attempt),
            role=arguments.role,
            rank=rank,
            local_rank=local_rank,
            num_ranks=int(os.environ.get("WORLD_SIZE", "1")),
            node=arguments.node,
            reporter=reporter or NullReporter(),
            damaged=frozenset(arguments.damaged),
            address=nodes.address,
            listening_address=nodes.listening_address,
            store=arguments.store,
            memory=memory_folder(Path(slots)) if (slots := os.environ.get(SLOTS_VARIABLE)) else None,
        )
        given = {arguments.role: arguments.target} if arguments.target else {}
        run = cast("Callable[[WorkerContext], RoleResult]", load(target_of(arguments.role, given)))
        return run(context)
    except BaseException as error:  # noqa: BLE001 - whatever ends the role ends as text in the outcome file
        return error


def _make_importable(run_dir: RunDir, import_paths: Sequence[Path]) -> None:
    """Put the snapshot of the user's code first on the path, for this process and its children."""
    paths = [str(path) for path in (run_dir.code / "snapshot", *import_paths)]
    sys.path[:0] = paths
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, inherited] if inherited else paths)


def _read_placement(run_dir: RunDir, attempt: int) -> Placement:
    path = run_dir.attempt(attempt).placement
    placement = read_model(path, Placement)
    if placement is None:
        raise RunDirError(f"{path} is missing or damaged; it is written before an attempt is submitted")
    return placement


def _outcome(
    arguments: WorkerArguments, rank: int, beat: Beat | None, end: RoleResult | BaseException
) -> WorkerOutcome:
    failed = isinstance(end, BaseException)
    return WorkerOutcome(
        role=arguments.role,
        rank=rank,
        node=arguments.node,
        ok=not failed,
        stopped_early=end is RoleResult.STOPPED_EARLY,
        error_type=f"{type(end).__module__}.{type(end).__qualname__}" if failed else "",
        message=masked(_shortened(str(end))) if failed else "",
        traceback=masked(_traceback(end)) if isinstance(end, BaseException) else "",
        damaged_checkpoint=end.checkpoint if isinstance(end, CheckpointCorrupt) else "",
        health_rule=end.rule if isinstance(end, DegenerateRl) else "",
        step=beat.step if beat is not None else 0,
        phase=beat.phase if beat is not None else Phase.SETUP,
        time=utc_now(),
    )


def _traceback(error: BaseException) -> str:
    return _shortened("".join(map(_shortened, traceback.format_exception(error))), MESSAGE_CHARACTERS)


def _shortened(text: str, limit: int = MAX_CHARACTERS) -> str:
    """The text, without its middle if it is longer than the limit in characters: it is the least telling part.

    Words stay whole: the part of a secret would not be recognised as one.
    """
    if len(text) <= limit:
        return text
    half = limit // 2 - len(_CUT)
    begin, end = text[:half].rsplit(maxsplit=1), text[-half:].split(maxsplit=1)
    return f"{begin[0]}{_CUT}{end[-1]}" if len(begin) == len(end) == 2 else _CUT.strip()


def _write_error(text: str) -> None:
    """Write to the log immediately: the process may exit without the interpreter's teardown, which would flush."""
    # The log may be on a full disk.
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(2, text.encode(errors="replace"))
