"""Signs of life: one slot per worker in a small memory-mapped file on the node.

A worker's main thread writes its slot (a fraction of a microsecond, no system call); the agent reads all slots. A
beat from a helper thread would call an endless loop healthy, so only the thread that made the :class:`Beat` may beat.

What the agent asks of its workers (save, stop) stands in the header of the same file. A flag is used, and no signal,
because it cannot be lost: it is there before the worker has started, it cannot kill a worker that has no handler yet,
setting it twice is harmless, and it is read where the worker can act on it, between two steps, not in the middle of a
C++ call.

Layout, 64-bit integers in the machine's own order: a header of 8 (``MAGIC``, slots, save requests, stop, questions),
then per local rank 32 (pid, restart, rank, collectives entered, left, sequence, step, phase, monotonic nanoseconds,
warm phases, number of processes that it speaks for, their pids). Each is written by one store of 8 bytes, so a reader
finds the old value or the new one.
``struct.pack_into`` would not do: it fills its target with zeros first, and a worker that loses the processor in
between looks as if it had been silent since the machine was started. ``multiprocessing.shared_memory`` would not do
either: on Python 3.11 the first worker that exits removes it for all.
"""

import contextlib
import fcntl
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from rlhf_core.files.private import FILE_MODE, own_folder
from rlhf_core.schemas.reports import Phase

MAGIC = 0x726C68665F763032
HEADER_WORDS = 8
SLOT_WORDS = 32
WORD_BYTES = 8

MEMORY = Path("/dev/shm")
"""File system in memory of a node."""
_MEMORY_SUFFIX = ".memory"

WARM_BEATS = 16
"""A phase is warm once it was left, or after so many beats in it: some roles never leave theirs."""

# Places in the header, and in a slot.
_MAGIC_AT, _NUM_SLOTS_AT, _SAVE_AT, _STOP_AT, _QUESTIONS_AT = range(5)
_PID, _RESTART, _RANK, _ENTERED, _LEFT, _SEQUENCE, _STEP, _PHASE, _BEAT_NS, _WARM, _NUM_SPOKEN_FOR = range(11)
_SPOKEN_FOR = _NUM_SPOKEN_FOR + 1

MAX_SPOKEN_FOR = SLOT_WORDS - _SPOKEN_FOR
"""Processes that one worker may speak for."""

# Looked up once: a beat is called in the innermost loops.
_monotonic_ns = time.monotonic_ns
_this_thread = threading.get_ident

_PHASES: tuple[Phase, ...] = tuple(Phase)
_NUMBER = {phase: number for number, phase in enumerate(_PHASES)}
_CHECKPOINT = _NUMBER[Phase.CHECKPOINT]


@dataclass(frozen=True)
class Slot:
    """The last values of one worker. ``pid`` 0: the slot is free."""

    pid: int
    restart: int
    rank: int
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
    """True if the worker has been through its present phase before."""
    speaks_for: tuple[int, ...] = ()
    """Process ids whose progress its beats show."""


def slots_folder() -> Path:
    """Folder of slot files, of this user alone: in memory where that can be had, otherwise among temporary files."""
    return own_folder(MEMORY if os.access(MEMORY, os.W_OK | os.X_OK) else Path(tempfile.gettempdir()))


class SlotFile:
    """The agent's end: creates the file, reads slots, asks workers to save or stop."""

    def __init__(self, run_id: str, attempt: int, node: str, num_slots: int, role: str = "") -> None:
        """Create the file. One that an earlier agent of the same run left on this node is removed; what its workers
        left in memory is taken over.

        Args:
            role: Role of the group of workers that it is for; empty where there is only one.
        """
        folder = slots_folder()
        name = f"{node}.{role}" if role else node
        self.path = folder / f"rlhf-{run_id}-{attempt}-{name}.slots"
        self._take_over(sorted(_slot_files(folder, run_id, name), key=lambda path: (len(path.name), path.name)))
        self.num_slots = num_slots
        size = (HEADER_WORDS + num_slots * SLOT_WORDS) * WORD_BYTES
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, FILE_MODE)
        try:
            os.ftruncate(descriptor, size)
            self._words = _words(descriptor, size)
            # The map has a descriptor of its own: locked until this process ends, however it ends.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        finally:
            os.close(descriptor)
        self._words[_MAGIC_AT] = MAGIC
        self._words[_NUM_SLOTS_AT] = num_slots
        _free_memory_of_dead_agents(folder, run_id)

    def _take_over(self, earlier: Sequence[Path]) -> None:
        """Remove what earlier agents left, but for what the workers of the newest one left in memory."""
        _remove(self.path)
        for stale in earlier:
            left, own = memory_folder(stale), memory_folder(self.path)
            if left is not None and own is not None and left.is_dir():
                shutil.rmtree(own, ignore_errors=True)
                with contextlib.suppress(FileNotFoundError):  # another agent has freed it just now
                    left.rename(own)
            _remove(stale)

    def clear(self) -> None:
        """Forget the workers of the restart before, and what was asked of them but for a stop."""
        for place in range(HEADER_WORDS, HEADER_WORDS + self.num_slots * SLOT_WORDS):
            self._words[place] = 0
        self._words[_SAVE_AT] = 0

    def read(self, local_rank: int) -> Slot:
        """One slot. Its worker may be writing it just now: every number is whole, but some may be one beat newer."""
        first = HEADER_WORDS + local_rank * SLOT_WORDS
        words = self._words[first : first + SLOT_WORDS].tolist()
        pid, restart, rank, entered, left, sequence, step, phase, beat_ns, warm = words[: _WARM + 1]
        spoken_for = words[_SPOKEN_FOR : _SPOKEN_FOR + words[_NUM_SPOKEN_FOR]]
        known = _PHASES[phase] if 0 <= phase < len(_PHASES) else Phase.SETUP
        return Slot(
            pid,
            restart,
            rank,
            entered,
            left,
            sequence,
            step,
            known,
            beat_ns,
            bool(warm >> phase & 1),
            tuple(spoken_for),
        )

    def clear_worker(self, local_rank: int) -> None:
        """Forget one worker, which is started again alone."""
        first = HEADER_WORDS + local_rank * SLOT_WORDS
        for place in range(first, first + SLOT_WORDS):
            self._words[place] = 0

    def ask_to_save(self) -> None:
        """Ask every worker to save and go on."""
        self._words[_SAVE_AT] += 1

    def ask_to_stop(self) -> None:
        """Ask every worker to save and end. Also holds for workers that start later."""
        self._words[_STOP_AT] = 1

    def ask_for_collectives(self) -> int:
        """Ask every worker which collective it is in; the number of the question."""
        self._words[_QUESTIONS_AT] += 1
        return self._words[_QUESTIONS_AT]

    def store(self, restart: int) -> Path:
        """Meeting place of the workers of a start that are all on this node: a file of this user alone, no port."""
        return self.path.with_name(f"{self.path.name}.store-{restart}")

    def remove(self, *, keep_memory: bool = False) -> None:
        """Remove the file and what lies beside it; workers that still have it open are not disturbed.

        Args:
            keep_memory: leave what workers have left in memory to the next agent of the run on this node. The next one
                of another run of this user frees it.
        """
        _remove(self.path, keep_memory=keep_memory)


def memory_folder(slots: Path) -> Path | None:
    """Folder beside a slot file for what workers leave in memory to those that come after them; None where it would not
    lie in memory."""
    return slots.with_name(f"{slots.name}{_MEMORY_SUFFIX}") if MEMORY in slots.parents else None


def _free_memory_of_dead_agents(folder: Path, run_id: str) -> None:
    """Remove what workers of other runs have left in memory whose agent has gone: their slot file is locked no more.
    That of this run is for the slot files that come next."""
    for left in folder.glob(f"rlhf-*.slots{_MEMORY_SUFFIX}"):
        if left.name.startswith(f"rlhf-{run_id}-"):
            continue
        try:
            descriptor = os.open(left.with_name(left.name.removesuffix(_MEMORY_SUFFIX)), os.O_RDWR)
        except FileNotFoundError:
            shutil.rmtree(left, ignore_errors=True)
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
        except BlockingIOError:
            pass  # its agent lives
        finally:
            os.close(descriptor)


def _remove(path: Path, *, keep_memory: bool = False) -> None:
    memory = memory_folder(path)
    keeps = keep_memory and memory is not None and memory.is_dir()
    for beside in path.parent.glob(f"{path.name}.*"):
        if keeps and beside == memory:
            continue
        if beside.is_dir():
            shutil.rmtree(beside, ignore_errors=True)
        else:
            beside.unlink(missing_ok=True)
    if not keeps:  # the slot file stays with the memory: that it is not locked tells that its agent has gone
        path.unlink(missing_ok=True)


def _slot_files(folder: Path, run_id: str, node: str) -> Iterator[Path]:
    prefix, suffix = f"rlhf-{run_id}-", f"-{node}.slots"
    for path in folder.iterdir():
        middle = path.name.removeprefix(prefix).removesuffix(suffix)
        if path.name == f"{prefix}{middle}{suffix}" and middle.isdigit():
            yield path


def _words(descriptor: int, size: int) -> "memoryview[int]":
    return memoryview(mmap.mmap(descriptor, size)).cast("q")


class _Collective:
    """Context manager around collective calls; one object per worker, entered many times, never nested."""

    def __init__(self, owner: "Beat") -> None:
        self._owner = owner

    def __enter__(self) -> None:
        self._owner.enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._owner.leave()


class Beat:
    """The worker's end; the ``Reporter`` that training is given."""

    def __init__(self, path: Path, local_rank: int, rank: int, restart: int) -> None:
        """Take the slot of ``local_rank``.

        Raises:
            FileNotFoundError: the agent has removed the file; it does not expect this worker any more.
            ValueError: the file is none of ours, or has no such slot.
        """
        descriptor = os.open(path, os.O_RDWR)
        try:
            self._words = _words(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)
        magic, num_slots = self._words[_MAGIC_AT], self._words[_NUM_SLOTS_AT]
        if magic != MAGIC or not 0 <= local_rank < num_slots:
            raise ValueError(
                f"{path} is no slot file of this version with a slot {local_rank}: found magic {magic:#x}, expected "
                f"{MAGIC:#x}; {num_slots} slots. Where the program was changed while this attempt ran, an agent of "
                "another version made it: a new attempt has one version throughout"
            )
        self.entered = 0
        self.left = 0
        self._sequence = 0
        self._saved = 0
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
        self._words[first + _RESTART] = restart
        self._words[first + _RANK] = rank
        self.beat(Phase.SETUP, 0)
        # Last: with its process id the slot is taken, and what stands in it counts.
        self._words[first + _PID] = os.getpid()

    def beat(self, phase: Phase, step: int) -> None:
        """Sign of life, with what the worker is doing. Main thread only."""
        self.phase = phase
        self.step = step
        words = self._words
        self._be_the_worker()
        # The time first: whatever a reader catches in between, it sees a worker that is alive.
        words[self._beat_at] = _monotonic_ns()
        words[self._step_at] = step
        number = _NUMBER[phase]
        self._beats_in_phase += 1
        if number != self._number or self._beats_in_phase == WARM_BEATS:
            self._warm |= 1 << self._number
            words[self._warm_at] = self._warm
            words[self._phase_at] = self._number = number
            self._beats_in_phase = 0
        if number == _CHECKPOINT:
            # All ranks enter a checkpoint at the same step: whatever was asked for up to now is being done.
            self._saved = words[_SAVE_AT]
        self._sequence += 1
        words[self._sequence_at] = self._sequence

    def collective(self) -> _Collective:
        """Wraps every collective call: counts it, and marks the rank as inside."""
        return self._collective

    def speak_for(self, pids: Sequence[int]) -> None:
        """Say whose progress these beats show from now on: processes of this node that do not beat themselves.

        Args:
            pids: Their process ids, without that of this worker; empty when there are none any more.

        Raises:
            ValueError: there are more than ``MAX_SPOKEN_FOR``.
        """
        if len(pids) > MAX_SPOKEN_FOR:
            raise ValueError(f"found {len(pids)} processes to speak for, expected at most {MAX_SPOKEN_FOR}")
        first = self._first
        # The number last: a reader finds the old ones, none, or all of the new ones.
        self._words[first + _NUM_SPOKEN_FOR] = 0
        for place, pid in enumerate(pids):
            self._words[first + _SPOKEN_FOR + place] = pid
        self._words[first + _NUM_SPOKEN_FOR] = len(pids)

    def request(self) -> Literal["", "save", "stop"]:
        """The request of the agent. ``save`` is repeated until this worker enters the checkpoint phase."""
        if self._words[_STOP_AT]:
            return "stop"
        return "save" if self._words[_SAVE_AT] > self._saved else ""

    def questions(self) -> int:
        """Number of questions of the agent for the collective that this worker is in. From any thread."""
        return self._words[_QUESTIONS_AT]

    def enter(self) -> None:
        """A collective begins."""
        self.entered += 1
        self._mark(self._entered_at, self.entered)

    def leave(self) -> None:
        """A collective has ended, well or not."""
        self.left += 1
        self._mark(self._left_at, self.left)

    def stand_at(self, entered: int, left: int) -> None:
        """Note the collectives of a process that this worker speaks for. No sign of life: :meth:`beat` is.

        Args:
            entered: Collectives that it has entered so far.
            left: Collectives that it has left so far.
        """
        self.entered, self.left = entered, left
        self._words[self._entered_at] = entered
        self._words[self._left_at] = left

    def _mark(self, place: int, value: int) -> None:
        self._be_the_worker()
        self._words[self._beat_at] = _monotonic_ns()
        self._words[place] = value
        self._sequence += 1
        self._words[self._sequence_at] = self._sequence

    def _be_the_worker(self) -> None:
        if _this_thread() != self._thread:
            raise RuntimeError("only the thread that made a Beat may beat: another one would hide that it hangs")
