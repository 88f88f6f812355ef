"""Heartbeats: one slot per worker in a small memory-mapped file on the node.

A worker's main thread writes its slot (a fraction of a microsecond, no system call); the agent reads all slots. Beats
from a helper thread would make an endless loop look healthy, so only the thread that created the :class:`Beat` may
beat.

The agent's requests to its workers (save, stop) are flags in the header of the same file. Unlike a signal, a flag
cannot get lost: it exists before the worker starts, cannot kill a worker that has no handler yet, may be set twice, and
is read where the worker can act on it, between two steps rather than in the middle of a C++ call.

Layout, 64-bit integers in native byte order: a header of 8 (``MAGIC``, slots, unused, stop, questions, newest step of
the group), then 32 per local rank (pid, collectives entered, left, sequence, step, phase, monotonic nanoseconds, warm
phases, number of represented processes, their pids). Each is written by a single 8-byte store, so a reader sees either
the old value or the new one.
``struct.pack_into`` is unsuitable: it zeroes its target first, so a worker preempted in between would look as if it had
been silent since boot. ``multiprocessing.shared_memory`` is unsuitable too: on Python 3.11 the first worker to exit
removes it for all.
"""

import contextlib
import fcntl
import mmap
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from rlhf_core.files.private import FILE_MODE, own_folder
from rlhf_core.machine.shared_names import SHARED_MEMORY, remove_with_names
from rlhf_core.schemas.reports import Phase

MAGIC = 0x726C68665F763033
_UNLOCKED = 0x726C68665F763031
"""Magic of the slot files of version 0.1, whose agents do not lock them."""
HEADER_WORDS = 8
SLOT_WORDS = 32
WORD_BYTES = 8

_SUFFIX = ".slots"
_MEMORY_SUFFIX = ".memory"
_LEAST_FREE_BYTES = 1 << 20

WARM_BEATS = 16
"""Beats in a phase after which it is warm, as it also is once left: some roles never leave their phase.

The set-up becomes warm only once left: it beats for every part of data and weights, and the silences between two parts,
such as the start of an engine, do not recur as those of a step do."""

# Word offsets in the header, and in a slot.
_MAGIC_AT, _NUM_SLOTS_AT, _, _STOP_AT, _QUESTIONS_AT, _GROUP_STEP_AT = range(6)
_PID, _ENTERED, _LEFT, _SEQUENCE, _STEP, _PHASE, _BEAT_NS, _WARM, _NUM_REPRESENTED = range(9)
_REPRESENTED = _NUM_REPRESENTED + 1

MAX_REPRESENTED = SLOT_WORDS - _REPRESENTED
"""Maximum number of processes that one worker may represent."""

# Looked up once: beats happen in the innermost loops.
_monotonic_ns = time.monotonic_ns
_this_thread = threading.get_ident

_PHASES: tuple[Phase, ...] = tuple(Phase)
_NUMBER = {phase: number for number, phase in enumerate(_PHASES)}


@dataclass(frozen=True)
class Slot:
    """The last values of one worker. The slot is free if ``pid`` is 0."""

    pid: int
    entered: int
    """Collectives entered so far."""
    left: int
    """Collectives left so far; less than ``entered`` while inside one."""
    sequence: int
    step: int
    phase: Phase
    beat_ns: int
    """Time of the last beat on the node's monotonic clock, in nanoseconds."""
    warm: bool
    """True if the worker has completed its current phase before."""
    represents: tuple[int, ...] = ()
    """Ids of the processes whose progress its beats represent."""


def slots_folder() -> Path:
    """Folder of slot files, private to this user: in memory if there is room, otherwise in the temporary directory.

    A full /dev/shm must not end the agent: the checks before training, which name it, come later.
    """
    may_write = os.access(SHARED_MEMORY, os.W_OK | os.X_OK)
    in_memory = may_write and shutil.disk_usage(SHARED_MEMORY).free >= _LEAST_FREE_BYTES
    return own_folder(SHARED_MEMORY if in_memory else Path(tempfile.gettempdir()))


class SlotFile:
    """The agent's side: creates the file, reads slots, asks workers to save and stop."""

    def __init__(self, run_id: str, attempt: int, node: str, num_slots: int, role: str = "") -> None:
        """Create the file. Removes the file of an earlier agent of the same run on this node and takes over what its
        workers left in memory.

        Args:
            role: Role of the worker group; empty if there is only one group.
        """
        folder = slots_folder()
        name = f"{node}.{role}" if role else node
        self.path = folder / f"rlhf-{run_id}-{attempt}-{name}.slots"
        self._take_over(sorted(_slot_files(folder, run_id, name), key=lambda path: (len(path.name), path.name)))
        self.num_slots = num_slots
        size = (HEADER_WORDS + num_slots * SLOT_WORDS) * WORD_BYTES
        unlocked = folder / f".{self.path.name}.{os.getpid()}"
        descriptor = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL, FILE_MODE)
        try:
            # All of it now: writing to a page that memory has no room for would kill the process (SIGBUS).
            os.posix_fallocate(descriptor, 0, size)
            self._words = _words(descriptor, size)
            # The map keeps its own descriptor, so the lock lasts until this process exits, for whatever reason.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Not seen before it is locked: without a lock, the agents of other runs remove it.
            self.path.hardlink_to(unlocked)
        finally:
            unlocked.unlink()
            os.close(descriptor)
        self._words[_MAGIC_AT] = MAGIC
        self._words[_NUM_SLOTS_AT] = num_slots
        _remove_files_of_dead_agents(folder, run_id)

    def _take_over(self, earlier: Sequence[Path]) -> None:
        """Remove what earlier agents left, except for what the newest one's workers left in memory."""
        _remove(self.path)
        for stale in earlier:
            left, own = memory_folder(stale), memory_folder(self.path)
            if left is not None and own is not None and left.is_dir():
                remove_with_names(own)
                with contextlib.suppress(FileNotFoundError):  # another agent has just removed it
                    left.rename(own)
            _remove(stale)

    def clear(self) -> None:
        """Clear the previous restart's workers and their newest step. A request to stop stays."""
        self._words[_GROUP_STEP_AT] = 0
        for local_rank in range(self.num_slots):
            self.clear_worker(local_rank)

    def read(self, local_rank: int) -> Slot:
        """Read one slot. Its worker may be writing meanwhile: no number is torn, but some may be one beat newer."""
        first = HEADER_WORDS + local_rank * SLOT_WORDS
        words = self._words[first : first + SLOT_WORDS].tolist()
        pid, entered, left, sequence, step, phase, beat_ns, warm = words[: _WARM + 1]
        represented = tuple(words[_REPRESENTED : _REPRESENTED + words[_NUM_REPRESENTED]])
        known = _PHASES[phase] if 0 <= phase < len(_PHASES) else Phase.SETUP
        return Slot(pid, entered, left, sequence, step, known, beat_ns, bool(warm >> phase & 1), represented)

    def clear_worker(self, local_rank: int) -> None:
        """Clear one worker's slot before its individual restart."""
        first = HEADER_WORDS + local_rank * SLOT_WORDS
        for place in range(first, first + SLOT_WORDS):
            self._words[place] = 0

    def request_stop(self) -> None:
        """Ask every worker to save and stop. Also applies to workers that start later."""
        self._words[_STOP_AT] = 1

    def request_collectives(self) -> int:
        """Ask every worker for its current collective; returns the number of the question."""
        self._words[_QUESTIONS_AT] += 1
        return self._words[_QUESTIONS_AT]

    def show_step(self, step: int) -> None:
        """Show every worker the newest step of the group, on all nodes."""
        self._words[_GROUP_STEP_AT] = step

    def store(self, restart: int) -> Path:
        """Rendezvous file for a start whose workers are all on this node: private to this user, needs no port."""
        return self.path.with_name(f"{self.path.name}.store-{restart}")

    def remove(self, *, keep_memory: bool = False) -> None:
        """Remove the file and its companions; workers that still have it open are not disturbed.

        Args:
            keep_memory: Keep what workers have left in memory for the run's next agent on this node. The next agent of
                another run of this user removes it.
        """
        _remove(self.path, keep_memory=keep_memory)


def memory_folder(slots: Path) -> Path | None:
    """Folder next to a slot file for data that workers leave in memory for their successors; None if it would not be in
    memory."""
    return slots.with_name(f"{slots.name}{_MEMORY_SUFFIX}") if SHARED_MEMORY in slots.parents else None


def _remove_files_of_dead_agents(folder: Path, run_id: str) -> None:
    """Remove the slot files of other runs whose agent was killed, and what their workers left in memory. This run's
    files are kept: its next slot files take over from them."""
    left = {path.name.partition(_SUFFIX)[0] for path in folder.glob(f"rlhf-*{_SUFFIX}*")}
    for name in sorted(left):
        slots = folder / f"{name}{_SUFFIX}"
        if not name.startswith(f"rlhf-{run_id}-") and not _may_be_in_use(slots):
            _remove(slots)


def _may_be_in_use(slots: Path) -> bool:
    """True if the agent of a slot file is alive, or if that is unknown: one of version 0.1 may be at work on the node
    when the first of this version arrives, and its small file does not matter."""
    try:
        descriptor = os.open(slots, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        if os.pread(descriptor, WORD_BYTES, _MAGIC_AT) == _UNLOCKED.to_bytes(WORD_BYTES, sys.byteorder):
            return True
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


def _remove(path: Path, *, keep_memory: bool = False) -> None:
    memory = memory_folder(path)
    keeps = keep_memory and memory is not None and memory.is_dir()
    for beside in path.parent.glob(f"{path.name}.*"):
        if keeps and beside == memory:
            continue
        if beside.is_dir():
            remove_with_names(beside)
        else:
            beside.unlink(missing_ok=True)
    if not keeps:  # the slot file stays with the data: its missing lock shows that its agent is gone
        path.unlink(missing_ok=True)


def _slot_files(folder: Path, run_id: str, node: str) -> Iterator[Path]:
    name = re.compile(rf"rlhf-{re.escape(run_id)}-\d+-{re.escape(node)}{re.escape(_SUFFIX)}")
    return (path for path in folder.iterdir() if name.fullmatch(path.name))


def _words(descriptor: int, size: int) -> "memoryview[int]":
    return memoryview(mmap.mmap(descriptor, size)).cast("q")


class _Collective:
    """Context manager around collective calls; one per worker, reused, never nested."""

    def __init__(self, owner: "Beat") -> None:
        self._owner = owner

    def __enter__(self) -> None:
        self._owner.enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._owner.leave()


class Beat:
    """The worker's side; the ``Reporter`` passed to training."""

    def __init__(self, path: Path, local_rank: int) -> None:
        """Take the slot of ``local_rank``.

        Raises:
            FileNotFoundError: the agent has removed the file and no longer expects this worker.
            ValueError: it is not a slot file, or has no such slot.
        """
        descriptor = os.open(path, os.O_RDWR)
        try:
            self._words = _words(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)
        magic, num_slots = self._words[_MAGIC_AT], self._words[_NUM_SLOTS_AT]
        if magic != MAGIC or not 0 <= local_rank < num_slots:
            raise ValueError(
                f"{path} is not a slot file of this version with slot {local_rank}: found magic {magic:#x}, expected "
                f"{MAGIC:#x}; {num_slots} slots. If rlhf-flows was updated while this attempt ran, an agent of another "
                "version created it: start a new attempt to use one version throughout"
            )
        self.entered = 0
        self.left = 0
        self._sequence = 0
        self._number = _NUMBER[Phase.SETUP]
        self._beats_in_phase = 0
        self._warm = 0
        self._thread = _this_thread()
        self._collective = _Collective(self)
        first = self._first = HEADER_WORDS + local_rank * SLOT_WORDS
        self._entered_at, self._left_at = first + _ENTERED, first + _LEFT
        self._sequence_at, self._beat_at = first + _SEQUENCE, first + _BEAT_NS
        self._step_at, self._phase_at, self._warm_at = first + _STEP, first + _PHASE, first + _WARM
        for place in range(first, first + SLOT_WORDS):
            self._words[place] = 0
        self.beat(Phase.SETUP, 0)
        # Written last: the process id marks the slot as taken and its content as valid.
        self._words[first + _PID] = os.getpid()

    def beat(self, phase: Phase, step: int) -> None:
        """Send a heartbeat with the current phase and step. Main thread only."""
        self.phase = phase
        self.step = step
        words = self._words
        self._require_own_thread()
        # The time first, so that a concurrent reader always sees a live worker.
        words[self._beat_at] = _monotonic_ns()
        words[self._step_at] = step
        number = _NUMBER[phase]
        self._beats_in_phase += 1
        if number != self._number or (self._beats_in_phase == WARM_BEATS and phase is not Phase.SETUP):
            self._warm |= 1 << self._number
            words[self._warm_at] = self._warm
            words[self._phase_at] = self._number = number
            self._beats_in_phase = 0
        self._sequence += 1
        words[self._sequence_at] = self._sequence

    def collective(self) -> _Collective:
        """Context manager for every collective call: counts it and marks the rank as inside."""
        return self._collective

    def represent(self, pids: Sequence[int]) -> None:
        """Set the processes whose progress these beats represent: processes on this node that do not beat themselves.

        Args:
            pids: Their process ids, without this worker's own; empty if there are none.

        Raises:
            ValueError: there are more than ``MAX_REPRESENTED``.
        """
        if len(pids) > MAX_REPRESENTED:
            raise ValueError(f"found {len(pids)} processes to report for, expected at most {MAX_REPRESENTED}")
        first = self._first
        # The count is written last: a reader sees the old pids, none, or all of the new ones.
        self._words[first + _NUM_REPRESENTED] = 0
        for place, pid in enumerate(pids):
            self._words[first + _REPRESENTED + place] = pid
        self._words[first + _NUM_REPRESENTED] = len(pids)

    def request(self) -> Literal["", "stop"]:
        """The agent's current request."""
        return "stop" if self._words[_STOP_AT] else ""

    def questions(self) -> int:
        """Number of times the agent has asked for this worker's collective. Callable from any thread."""
        return self._words[_QUESTIONS_AT]

    def step_of_group(self) -> int:
        """Newest step of the workers of this worker's group on all nodes, as told by agent 0; 0 before the first."""
        return self._words[_GROUP_STEP_AT]

    def enter(self) -> None:
        """Note the start of a collective."""
        self.entered += 1
        self._mark(self._entered_at, self.entered)

    def leave(self) -> None:
        """Note the end of a collective, successful or not."""
        self.left += 1
        self._mark(self._left_at, self.left)

    def stand_at(self, entered: int, left: int) -> None:
        """Set the collective counts of a process that this worker represents. Not a heartbeat; see :meth:`beat`.

        Args:
            entered: Collectives entered so far.
            left: Collectives left so far.
        """
        self.entered, self.left = entered, left
        self._words[self._entered_at] = entered
        self._words[self._left_at] = left

    def _mark(self, place: int, value: int) -> None:
        self._require_own_thread()
        self._words[self._beat_at] = _monotonic_ns()
        self._words[place] = value
        self._sequence += 1
        self._words[self._sequence_at] = self._sequence

    def _require_own_thread(self) -> None:
        if _this_thread() != self._thread:
            raise RuntimeError("only the thread that created a Beat may beat: another thread would hide a hang")
