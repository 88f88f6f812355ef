"""Paths of a run, and the only functions that write and read its files.

Rules (docs/run_directory.md has the table of files): exactly one writer per file; whole files appear by
write-then-rename; appended files are read to the last newline, and a line that does not parse is skipped, because a
killed writer leaves a torn one behind. All are read through :mod:`rlhf_core.files`, so that no other file in their
place can block or exhaust a reader.
"""

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from rlhf_core.errors import CheckpointCorrupt, RunDirError
from rlhf_core.files import FileLine, FileLines, UnfitFile, lines_of, open_regular, read_document
from rlhf_core.schemas.reports import CheckpointManifest, FileChecksum
from rlhf_core.schemas.run import READABLE_VERSIONS, StoredSpec

Model = TypeVar("Model", bound=BaseModel)

_CHECKPOINT_NAME = re.compile(r"step-([0-9]{6,10})")
_ASIDE_NAME = re.compile(r"aside-[0-9]+|damaged-[0-9]+\.[0-9]+")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
_RUN_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}-[0-9]{8}-[0-9]{6}-[0-9a-f]{6}")


def new_run_id(name: str, now: datetime | None = None) -> str:
    """``<name>-<date>-<time>-<6 hex digits>``: sortable, readable, unique."""
    moment = now or datetime.now(UTC)
    return f"{name}-{moment:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


# ---------------------------------------------------------------------------------------------------------------------
# Whole files


_USUAL_MODE = 0o666


def write_text(path: Path, text: str, mode: int = _USUAL_MODE) -> None:
    """Write a whole file so that readers see the old one or the new one, never a part; it survives a power cut.

    Args:
        mode: Its permissions, reduced by the umask.

    Raises:
        OSError: the file system is full, read-only or gone. The old file is untouched then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        _write_new(temporary, text, mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write_new(path: Path, text: str, mode: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_model(path: Path, model: BaseModel, mode: int = _USUAL_MODE) -> None:
    """Write a schema as JSON, whole (see :func:`write_text`)."""
    write_text(path, model.model_dump_json(indent=2) + "\n", mode)


def read_model(path: Path, schema: type[Model]) -> Model | None:
    """Read a schema; None if there is no file, or if it is not (yet) complete.

    Raises:
        OSError: the file system does not answer.
    """
    try:
        return schema.model_validate_json(read_document(path))
    except (FileNotFoundError, NotADirectoryError, UnfitFile, ValidationError):
        return None


def claim(path: Path, text: str) -> bool:
    """Create a file that must not exist yet; False if another process was first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return True


def create_once(path: Path, text: str, mode: int = _USUAL_MODE) -> bool:
    """Write a whole file that must not exist yet; False if another process was first.

    Unlike :func:`claim`, whose file may be seen while it is empty, this file is always complete, even after a kill.

    Args:
        mode: Its permissions, reduced by the umask.

    Raises:
        OSError: the file system is full, read-only or gone.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        _write_new(temporary, text, mode)
        path.hardlink_to(temporary)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


# ---------------------------------------------------------------------------------------------------------------------
# Full disks

RESERVE_BYTES = 64 << 10


def is_disk_full(error: OSError) -> bool:
    """Return True if no space is left, on the disk or in the user's quota."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Reserve:
    """Reserve of a few blocks, so that the end of a run can be recorded on a disk that the run has filled."""

    path: Path

    def hold(self) -> None:
        """Take the blocks. If there is no space even now, the first write that does not fit raises an error."""
        try:
            with self.path.open("wb") as file:
                # Random bytes: some file systems store holes and zeros without blocks.
                file.write(os.urandom(RESERVE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            self.free()

    def free(self) -> None:
        """Release the blocks."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------------------------
# Appended files


class LineWriter:
    """Writer that appends schemas as JSON lines to a file that only this process writes.

    If the writer before was killed in the middle of a line, the torn rest is closed off with a newline, so that it
    cannot swallow the next line. A file that is deleted or replaced while it is written is opened anew, with the lines
    that it had: they are still in the open file, as long as its file system keeps it.

    Args:
        on_loss: called with a sentence, before the next line is written, if the file was deleted, replaced or
            truncated.
    """

    def __init__(self, path: Path, on_loss: Callable[[str], None] = lambda text: None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._on_loss = on_loss
        self._open()

    def write(self, model: BaseModel) -> None:
        """Append one line and hand it to the operating system: it survives a kill of this process."""
        lost = self._mend()
        if lost:
            self._on_loss(lost)
        self._append(model.model_dump_json().encode() + b"\n")
        self._end = os.fstat(self._file.fileno()).st_size

    def sync(self) -> None:
        """Sync the written lines to disk: they survive a power cut."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _open(self) -> None:
        # Unbuffered: lines refused by a full disk must not stay in a buffer and appear later, after other lines.
        self._file = self._path.open("a+b", buffering=0)
        self._end = self._file.seek(0, os.SEEK_END)
        if self._end > 0:
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._append(b"\n")
                self._end += 1

    def _append(self, content: bytes) -> None:
        rest = memoryview(content)
        while rest:
            rest = rest[self._file.write(rest) :]

    def _mend(self) -> str:
        """Make sure that the next line goes into the file of that name. Returns a description of a loss, or an empty
        text."""
        own = os.fstat(self._file.fileno())
        try:
            there = self._path.stat()
        except OSError:
            if not self._path.parent.is_dir():
                return ""  # the whole folder is gone; its next user reports it
            there = None
        is_own = there is not None and (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)
        if is_own and own.st_size >= self._end:
            return ""
        if is_own:
            lost, self._end = self._end - own.st_size, own.st_size
            return f"{self._path.name} was truncated while it was written: {lost} bytes of it are lost"
        what = "deleted" if there is None else "replaced"
        return f"{self._path.name} was {what} while it was written: {self._restore()}"

    def _restore(self) -> str:
        expected = self._end
        try:
            self._file.seek(0)
            kept = self._file.read()
        except OSError:  # deleted on another machine: a network file system keeps it only for its own
            kept = b""
        self._file.close()
        self._open()
        self._file.seek(0)
        found = self._file.read()
        if len(kept) < expected or not (kept.startswith(found) or found.startswith(kept)):
            return "its lines so far are not in it any more, further ones are"
        self._append(kept[len(found) :])
        return f"its {len(kept)} bytes are in place again"


def read_lines(
    path: Path,
    offset: int = 0,
    limit_bytes: int = 16 << 20,
    *,
    is_inside: bool = False,
    longest: int | None = None,
) -> FileLines:
    """Read whole lines of an appended file from ``offset`` on, and the offset after the last of them.

    Reads at most about ``limit_bytes`` at once. A file that is not there, or is no file, has no lines. The other
    arguments are those of :func:`rlhf_core.files.lines_of`.
    """
    try:
        with open_regular(path) as file:
            return lines_of(file, offset, limit_bytes, is_inside=is_inside, longest=longest)
    except (FileNotFoundError, NotADirectoryError, UnfitFile):
        return FileLines([], offset, is_inside)


@dataclass(frozen=True)
class FilePosition:
    """Position in an appended file, and the marks by which a reader recognises the file.

    A file is recognised by its content. Its inode is weaker evidence: a restored copy has another one, and a file that
    was truncated and rewritten has the same.
    """

    offset: int = 0
    tail: int = 0
    """Fingerprint of the last bytes before the offset; 0 if unknown."""
    head: int = 0
    """Fingerprint of the first bytes; 0 if unknown."""
    is_inside: bool = False
    """True if the offset lies in a line that is too long."""


def read_on(path: Path, place: FilePosition, limit_bytes: int = 16 << 20) -> tuple[list[FileLine], FilePosition, bool]:
    """Read whole lines of an appended file after a position, the position after them, and whether the file was
    replaced.

    A file that was truncated or replaced by another one is read from its beginning: its bytes before the position are
    not those that were read. A file rewritten with the same lines is continued. A missing one has no lines, nor has
    what is no file, nor one that is shorter than it was: another machine may see an older version of it for a while.
    """
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            if size < place.offset:
                is_other = bool(place.head) and size >= _HEAD_BYTES and _mark(file, 0, _HEAD_BYTES) != place.head
                if not is_other:
                    return [], place, False
            else:
                is_other = bool(place.tail) and _tail(file, place.offset) != place.tail
            begin = FilePosition() if is_other else place
            lines, end, is_inside = lines_of(file, begin.offset, limit_bytes, is_inside=begin.is_inside)
            head = _mark(file, 0, _HEAD_BYTES) if end >= _HEAD_BYTES else 0
            return lines, FilePosition(end, _tail(file, end), head, is_inside), is_other
    except (FileNotFoundError, NotADirectoryError, UnfitFile):
        return [], place, False


def tail_mark(path: Path, offset: int) -> int:
    """Fingerprint of the last bytes before an offset, to recognise a file; 0 if it cannot be taken."""
    try:
        with open_regular(path) as file:
            return _tail(file, offset)
    except OSError:
        return 0


def is_as_read(path: Path, offset: int, mark: int) -> bool:
    """Return False if the bytes before an offset do not have this fingerprint. A file that is shorter
    may be an older version, as another machine sees it."""
    try:
        with open_regular(path) as file:
            return not mark or file.seek(0, os.SEEK_END) < offset or _tail(file, offset) == mark
    except OSError:
        return True  # missing, away, or not a file: its next reader reports it


_HEAD_BYTES = 64
_TAIL_BYTES = 256


def _tail(file: BinaryIO, end: int) -> int:
    return _mark(file, max(0, end - _TAIL_BYTES), end) if end else 0


def _mark(file: BinaryIO, begin: int, end: int) -> int:
    file.seek(begin)
    digest = hashlib.blake2b(file.read(end - begin), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1 or 1  # fits a signed integer of 64 bits


def parse_lines(lines: Iterable[FileLine], schema: type[Model]) -> Iterator[Model]:
    """Parse JSON lines; those that are torn, foreign or too long are skipped."""
    for line in lines:
        if line.text is None:
            continue
        try:
            yield schema.model_validate_json(line.text)
        except ValidationError:
            continue


def read_blocks(path: Path, offset: int = 0, longest: int | None = None) -> Iterator[tuple[list[FileLine], int]]:
    """Yield all whole lines of an appended file from ``offset`` on, a block at a time, each with the offset after
    it."""
    is_inside = False
    while True:
        lines, end, is_inside = read_lines(path, offset, is_inside=is_inside, longest=longest)
        if end == offset:
            return
        yield lines, end
        offset = end


def read_models(path: Path, schema: type[Model]) -> list[Model]:
    """Read all whole lines of an appended file, parsed."""
    return [model for lines, _ in read_blocks(path) for model in parse_lines(lines, schema)]


def read_tail(path: Path, limit_bytes: int) -> str:
    """Read the end of a text file, from a line's beginning; empty if it cannot be read."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit_bytes))
            content = file.read(limit_bytes)
    except OSError:
        return ""
    if size > limit_bytes:
        content = content[content.find(b"\n") + 1 :]
    return content.decode("utf-8", errors="replace")


# ---------------------------------------------------------------------------------------------------------------------
# The tree


@dataclass(frozen=True)
class RestartDir:
    """``attempts/<n>/restarts/<r>/``: files of one start of the workers."""

    root: Path
    attempt: int
    restart: int

    @property
    def metrics(self) -> Path:
        """Reduced metrics, one line per step; trainer rank 0 appends."""
        return self.root / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """Completions kept for reading; trainer rank 0 appends."""
        return self.root / "samples.jsonl"

    @property
    def launch_order(self) -> Path:
        """Agreement on one start of another program's launch line; the worker of rank 0 writes it."""
        return self.root / "launch.json"

    @property
    def save_order(self) -> Path:
        """Step at which another program is to save, the same for all of its ranks; the worker of rank 0 writes it."""
        return self.root / "save.json"

    @property
    def warnings(self) -> Path:
        """Findings of trainers that leave the run going, one a line; the trainer of rank 0 appends."""
        return self.root / "warnings.jsonl"

    @property
    def artifacts(self) -> Path:
        """Further files of another program that are kept with this start."""
        return self.root / "artifacts"

    @property
    def rank_output(self) -> Path:
        """Output of the ranks of another program, one folder for each node, where its launcher is one of torch's."""
        return self.root / "ranks"

    @property
    def checkpoints_aside(self) -> Path:
        """Checkpoints that another program had made after the one that this start goes on from."""
        return self.root / "aside"

    @property
    def agents(self) -> Path:
        """Folder of the agents' status files."""
        return self.root / "agents"

    def agent_status(self, node: str) -> Path:
        """Status that the agent of ``node`` publishes; that agent replaces it."""
        return self.agents / f"{node}.json"

    def events(self, node: str) -> Path:
        """Events of the agent of ``node``; that agent appends."""
        return self.root / f"events-{node}.jsonl"

    def worker_events(self, role: str, node: str, local_rank: int) -> Path:
        """Messages of a worker for the user, for instance about a deleted file; that worker appends."""
        return self.root / f"events-{node}-{role}-{local_rank}.jsonl"

    def telemetry(self, node: str) -> Path:
        """Figures of ``node`` over time; its agent appends."""
        return self.root / f"telemetry-{node}.jsonl"

    @property
    def evidence_dir(self) -> Path:
        """Evidence of incidents; each agent its own files."""
        return self.root / "incident"

    @property
    def incidents_dir(self) -> Path:
        """Folder of the incidents and of the decisions about them; agent 0 writes them."""
        return self.root / "incidents"

    def incident(self, number: int) -> Path:
        """One incident, by its number in the attempt."""
        return self.incidents_dir / f"{number}.json"

    def decision(self, number: int) -> Path:
        """The decision about an incident; written before it is acted on."""
        return self.incidents_dir / f"{number}.decision.json"

    def incident_files(self) -> list[Path]:
        """Files of all incidents, in order; first the place that version 0.1 knew."""
        return self._numbered_files("incident", ".json")

    def decision_files(self) -> list[Path]:
        """Files of all decisions, in order; first the place that version 0.1 knew."""
        return self._numbered_files("decision", ".decision.json")

    def _numbered_files(self, earlier: str, ending: str) -> list[Path]:
        names = (path.name.removesuffix(ending) for path in self.incidents_dir.glob(f"*{ending}"))
        numbers = sorted(int(name) for name in names if _NUMBER.fullmatch(name))
        numbered = (self.incidents_dir / f"{number}{ending}" for number in numbers)
        return [path for path in (self.evidence_dir / f"{earlier}.json", *numbered) if path.is_file()]

    @property
    def logs(self) -> Path:
        """Folder of the workers' output."""
        return self.root / "logs"

    def log(self, role: str, node: str, local_rank: int) -> Path:
        """Standard output and error of one worker; that worker opens it."""
        return self.logs / f"{role}-{node}-{local_rank}.log"

    def worker_outcome(self, role: str, node: str, local_rank: int) -> Path:
        """Outcome of one worker, written by that worker."""
        return self.root / "outcomes" / f"{role}-{node}-{local_rank}.json"


@dataclass(frozen=True)
class AttemptDir:
    """``attempts/<n>/``: one submission to the scheduler."""

    root: Path
    number: int

    @property
    def placement(self) -> Path:
        """Nodes and their roles; written before submission."""
        return self.root / "placement.json"

    @property
    def submission(self) -> Path:
        """Answer of the scheduler to the submission."""
        return self.root / "submission.json"

    @property
    def scheduler_dir(self) -> Path:
        """The scheduler's own files: script, output of the agents."""
        return self.root / "scheduler"

    @property
    def claim(self) -> Path:
        """The agent 0 that owns this attempt; created once, a second agent 0 exits."""
        return self.root / "claim"

    @property
    def key(self) -> Path:
        """Key of the messages between agents; the first agent makes it. Only the owner of the run may read it."""
        return self.root / "key"

    @property
    def commands(self) -> Path:
        """Folder of orders from the control plane to agent 0."""
        return self.root / "commands"

    @property
    def probe(self) -> Path:
        """Folder of the facts of the nodes, and of agent 0's report on them."""
        return self.root / "probe"

    def node_facts(self, node: str) -> Path:
        """Facts of a node; its agent writes them. Only the owner of the run may read it."""
        return self.probe / f"{node}.json"

    @property
    def probe_key(self) -> Path:
        """Key of the hashes in them; the first agent makes it. Only the owner of the run may read it."""
        return self.probe / "key"

    @property
    def probe_report(self) -> Path:
        """Findings about the nodes; agent 0 writes it once."""
        return self.root / "probe-report.json"

    @property
    def outcome(self) -> Path:
        """Outcome of the attempt; written once by agent 0, as its last file."""
        return self.root / "outcome.json"

    @property
    def reserve(self) -> Path:
        """A few blocks held back so that agent 0 can still write its outcome on a full disk; agent 0 frees them."""
        return self.root / "reserve"

    def restart(self, number: int) -> RestartDir:
        """The folder of one restart."""
        return RestartDir(self.root / "restarts" / str(number), self.number, number)

    @property
    def groups_dir(self) -> Path:
        """Folder of the groups of workers that run beside the one whose restarts are counted."""
        return self.root / "groups"

    def group_dir(self, role: str, generation: int) -> Path:
        """Folder of one start of workers of such a group."""
        return self.groups_dir / role / str(generation)

    def group(self, role: str, generation: int) -> RestartDir:
        """Files of one start of workers of such a group; it has what a restart has."""
        return RestartDir(self.group_dir(role, generation), self.number, generation)

    def groups(self) -> list[RestartDir]:
        """Starts of workers of such groups, by role and generation."""
        folder = self.groups_dir
        roles = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        return [self.group(role, number) for role in roles for number in _numbered(folder / role)]

    def restarts(self) -> list[RestartDir]:
        """Restarts that were begun, in order."""
        return [self.restart(number) for number in _numbered(self.root / "restarts")]


@dataclass(frozen=True)
class CheckpointDir:
    """``checkpoints/step-<n>/``: one saved state of training."""

    root: Path
    step: int

    @property
    def complete(self) -> Path:
        """Checksums of everything else; written last. Without it the checkpoint does not count."""
        return self.root / "COMPLETE"

    @property
    def model(self) -> Path:
        """The weights and tokenizer as a Hugging Face model folder."""
        return self.root / "model"

    @property
    def trainer_state(self) -> Path:
        """Optimizer, random number generators and data position, per rank."""
        return self.root / "trainer_state"

    def manifest(self) -> CheckpointManifest | None:
        """Read ``COMPLETE``; None if the checkpoint does not count."""
        try:
            return read_model(self.complete, CheckpointManifest)
        except OSError:
            return None  # an unreadable checkpoint cannot be resumed from; the one before it can

    def damage(self) -> list[str]:
        """Problems of the files, by size and hash; empty for a sound checkpoint. Reads every byte."""
        manifest = self.manifest()
        if manifest is None:
            return [f"{self.complete.name} is {self._fault_of_manifest()}"]
        problems = [] if manifest.step == self.step else [f"{self.complete.name} is of step {manifest.step}"]
        for name, expected in manifest.files.items():
            fault = self._fault_of(name, expected)
            # Read again before a checkpoint is given up: a disk or a network may have failed for a moment only.
            if fault and (fault := self._fault_of(name, expected)):
                problems.append(fault)
        return problems

    def verify(self) -> None:
        """Raise :class:`CheckpointCorrupt` unless every file matches ``COMPLETE``."""
        problems = self.damage()
        if problems:
            raise CheckpointCorrupt(f"checkpoint {self.root} is damaged: {'; '.join(problems)}", self.root.name)

    def _fault_of(self, name: str, expected: FileChecksum) -> str:
        try:
            found = checksum(self.root / name)
        except OSError as error:
            return f"{name}: {error.strerror}"
        if found == expected:
            return ""
        return (
            f"{name}: found {found.bytes} bytes with sha256 {found.sha256[:12]}, "
            f"expected {expected.bytes} bytes with {expected.sha256[:12]}"
        )

    def _fault_of_manifest(self) -> str:
        try:
            size = len(read_document(self.complete))
        except FileNotFoundError:
            return "missing"
        except OSError as error:
            return f"unreadable: {error.strerror}"
        return f"no manifest: its {size} bytes are not what a trainer writes"


@dataclass(frozen=True)
class RunDir:
    """``<runs>/<run_id>/``: the wire between the control plane and the nodes."""

    root: Path

    @classmethod
    def of(cls, runs: Path, run_id: str) -> "RunDir":
        """Return the directory of one run; it need not exist.

        Raises:
            RunDirError: the text is no run id, or its folder is a link that leads out of ``runs``. An id may come from
                any user who can fill in a form: nothing else is ever opened by one.
        """
        if not is_run_id(run_id):
            raise RunDirError(f"found {run_id[:200]!r}, expected the id of a run, as sort-20260301-120000-a1b2c3")
        root = runs / run_id
        if root.is_symlink() and not root.resolve().is_relative_to(runs.resolve()):
            raise RunDirError(
                f"{root} is a link that leads out of {runs}: it is not followed. Move the run directory back, or point "
                f"RLHF_RUNS to the folder that it is in"
            )
        return cls(root)

    @classmethod
    def find(cls, runs: Path, text: str) -> "RunDir | None":
        """Return the directory of a run, if the text is the id of an existing one."""
        try:
            found = cls.of(runs, text)
        except RunDirError:
            return None
        return found if found.spec.is_file() else None

    @property
    def run_id(self) -> str:
        """Id of the run: the name of its folder."""
        return self.root.name

    @property
    def spec(self) -> Path:
        """The resolved spec; written once."""
        return self.root / "spec.json"

    @property
    def control(self) -> Path:
        """The controller's journal; the holder of the lease appends."""
        return self.root / "control.jsonl"

    @property
    def control_reserve(self) -> Path:
        """Blocks held back so that the journal can be written on a full disk; the holder of the lease frees them."""
        return self.root / "control.reserve"

    @property
    def cancel_request(self) -> Path:
        """Request of `rlhf cancel` to the controller (an ``AgentCommand``); the controller removes it when done."""
        return self.root / "cancel.json"

    @property
    def promotion_answer(self) -> Path:
        """Answer to the question whether the model may be promoted; the first one counts."""
        return self.root / "promotion.json"

    @property
    def housekeeping(self) -> Path:
        """Actions of the site's daemon on the run; the holder of the daemon's lease appends."""
        return self.root / "housekeeping.jsonl"

    @property
    def code(self) -> Path:
        """Revision, diff and snapshot of the user's code."""
        return self.root / "code"

    @property
    def initial_model(self) -> Path:
        """Model and tokenizer that training starts from, if they are built here; trainer rank 0 writes them once."""
        return self.root / "initial_model"

    @property
    def attempts_dir(self) -> Path:
        """Folder of the attempts."""
        return self.root / "attempts"

    @property
    def checkpoints_dir(self) -> Path:
        """Folder of the checkpoints."""
        return self.root / "checkpoints"

    @property
    def evaluations_dir(self) -> Path:
        """Folder of the evaluation reports."""
        return self.root / "evaluations"

    @property
    def report(self) -> Path:
        """The HTML report of `rlhf report`."""
        return self.root / "report.html"

    def attempt(self, number: int) -> AttemptDir:
        """The folder of one attempt."""
        return AttemptDir(self.attempts_dir / str(number), number)

    def attempts(self) -> list[AttemptDir]:
        """Attempts that were planned, in order."""
        return [self.attempt(number) for number in _numbered(self.attempts_dir)]

    def is_superseded(self, attempt: int) -> bool:
        """True if the attempt after this one was planned: nothing of this one may run or write any more."""
        return self.attempt(attempt + 1).placement.exists()

    def checkpoint(self, step: int) -> CheckpointDir:
        """The folder of one checkpoint."""
        return CheckpointDir(self.checkpoints_dir / f"step-{step:06d}", step)

    def checkpoints(self) -> list[CheckpointDir]:
        """Complete checkpoints, oldest first. Completeness is the ``COMPLETE`` file; hashes are checked on loading."""
        return [checkpoint for checkpoint in self.saved_checkpoints() if checkpoint.manifest() is not None]

    def saved_checkpoints(self) -> list[CheckpointDir]:
        """Every checkpoint that was saved, oldest first. An incomplete one is damaged: a folder gets its name when
        all its files are complete."""
        if not self.checkpoints_dir.is_dir():
            return []
        matches = (_CHECKPOINT_NAME.fullmatch(path.name) for path in self.checkpoints_dir.iterdir())
        found = [CheckpointDir(self.checkpoints_dir / match[0], int(match[1])) for match in matches if match]
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def checkpoint_before(self, name: str) -> CheckpointDir | None:
        """The newest complete checkpoint that is older than the one of that name, if there is any."""
        match = _CHECKPOINT_NAME.fullmatch(name)
        older = [checkpoint for checkpoint in self.checkpoints() if match and checkpoint.step < int(match[1])]
        return older[-1] if older else None

    def damaged(self, attempt: int, restart: int) -> Path:
        """Folder of the checkpoints that were found damaged in a restart, kept for inspection."""
        return self.checkpoints_dir / f"damaged-{attempt}.{restart}"

    def put_damaged_aside(self, name: str, attempt: int, restart: int) -> None:
        """Move a damaged checkpoint out of the way, so that nothing resumes from it.

        Raises:
            OSError: it cannot be moved.
        """
        folder = self.damaged(attempt, restart)
        folder.mkdir(exist_ok=True)
        (self.checkpoints_dir / name).rename(folder / name)

    def put_aside_folders(self) -> list[Path]:
        """Folders of checkpoints that were put aside, damaged or of a branch that was given up; by name."""
        if not self.checkpoints_dir.is_dir():
            return []
        return sorted(path for path in self.checkpoints_dir.iterdir() if _ASIDE_NAME.fullmatch(path.name))

    def aside(self, attempt: int) -> Path:
        """Folder of the checkpoints whose branch was given up after an attempt."""
        return self.checkpoints_dir / f"aside-{attempt}"

    def put_aside_newer_than(self, name: str, attempt: int) -> None:
        """Move checkpoints that are newer than one out of the way: the branch they belong to is given up, and no later
        attempt may resume from them. Harmless if it was done before, in whole or in part.

        Raises:
            RunDirError: ``name`` is not the name of a checkpoint.
        """
        kept = _CHECKPOINT_NAME.fullmatch(name)
        if kept is None:
            raise RunDirError(f"found {name}, expected the name of a checkpoint, as step-20")
        aside = self.aside(attempt)
        for checkpoint in self.checkpoints():
            if checkpoint.step > int(kept[1]):
                aside.mkdir(exist_ok=True)
                checkpoint.root.rename(aside / checkpoint.root.name)

    def newest_put_aside(self, attempt: int) -> int:
        """Return the highest step that :meth:`put_aside_newer_than` moved away after an attempt; 0 if none."""
        aside = self.checkpoints_dir / f"aside-{attempt}"
        found = map(_CHECKPOINT_NAME.fullmatch, (path.name for path in aside.iterdir()) if aside.is_dir() else ())
        return max((int(name[1]) for name in found if name is not None), default=0)

    def newest_checkpoint(self) -> CheckpointDir | None:
        """The complete checkpoint of the highest step, if there is any."""
        return next(reversed(self.checkpoints()), None)

    def evaluation(self, when: str, name: str) -> Path:
        """One evaluation report."""
        return self.evaluations_dir / f"{when}-{name}.json"

    def read_spec(self) -> StoredSpec:
        """Read ``spec.json``.

        Raises:
            RunDirError: there is none, it is damaged, or a newer program wrote it.
        """
        try:
            content: Any = from_json(read_document(self.spec))
        except FileNotFoundError:
            raise RunDirError(f"{self.root} is no run directory: it has no spec.json") from None
        except UnfitFile as error:
            raise RunDirError(f"{self.spec} is damaged: {error.strerror}") from None
        except ValueError as error:
            raise RunDirError(f"{self.spec} is damaged: {error}") from None
        if not isinstance(content, dict):
            raise RunDirError(f"{self.spec} is damaged: expected a JSON object")
        version = content.get("schema_version")
        if version not in READABLE_VERSIONS:
            readable = " and ".join(map(str, READABLE_VERSIONS))
            raise RunDirError(
                f"{self.spec} has schema_version {version}, this program reads {readable}; "
                f"use the version of rlhf-flows that made it ({content.get('package_version', 'unknown')})"
            )
        try:
            return StoredSpec.model_validate(content)
        except ValidationError as error:
            raise RunDirError(f"{self.spec} does not fit this program: {error}") from None


def run_dirs(runs: Path) -> list[RunDir]:
    """Every run directory under ``runs``, by name. Folders with other names (unfinished, copies, links that lead
    elsewhere) are skipped."""
    if not runs.is_dir():
        return []
    found = []
    for name in sorted(path.name for path in runs.iterdir() if is_run_id(path.name)):
        with contextlib.suppress(RunDirError):
            found.append(RunDir.of(runs, name))
    return [run_dir for run_dir in found if run_dir.spec.is_file()]


def cleared_nodes(runs: Path) -> Path:
    """Return the folder of the records of repaired nodes, beside the run directories."""
    return runs / "cleared-nodes"


def is_run_id(text: str) -> bool:
    """Return True if ``text`` has the form of a run id."""
    return _RUN_ID.fullmatch(text) is not None


def checksum(path: Path) -> FileChecksum:
    """Size and SHA-256 of a regular file."""
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileChecksum(bytes=file.tell(), sha256=digest)


def remove_tree(path: Path) -> None:
    """Remove a folder so that a reader never finds it partly removed under its own name."""
    if not path.exists():
        return
    doomed = path.with_name(f".{path.name}.{secrets.token_hex(4)}.gone")
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _numbered(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if _NUMBER.fullmatch(path.name))
