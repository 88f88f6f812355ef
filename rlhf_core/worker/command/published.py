"""Checkpoints of an external trainer, published as checkpoints of the run.

    checkpoints/step-000040/
        checkpoint-40/     the program's own folder, as hard links: nothing is copied within one file system (OpenRLHF:
                           _actor/global_step40, and _critic/global_step40 if there is a critic)
        model/             the model and its tokenizer alone, for evaluation and promotion (hard links)
        published.txt      path of the program's own folder below its output folder
        COMPLETE           checksums, written last

Checkpoints that the program later deletes by its own rules are kept here by the run's (``checkpoint.keep_last``). Rank
0's worker publishes them in a thread: reading every byte takes minutes, and the worker has to beat.
"""

import contextlib
import errno
import functools
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from rlhf_core.diagnosis.retention import kept_steps
from rlhf_core.errors import CheckpointCorrupt, TrainerIncomplete, WorkerError
from rlhf_core.files.reading import bring_to_disk
from rlhf_core.files.whole import NO_LINK, remove_tree
from rlhf_core.run_dir.checkpoint import CheckpointDir, checksum
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.checkpoint_files import CheckpointManifest, FileChecksum
from rlhf_core.schemas.command_trainer import CommandTrainer
from rlhf_core.schemas.reports import Phase
from rlhf_core.schemas.run import RunSpec
from rlhf_core.training.types import WorkerContext
from rlhf_core.worker.command.checkpoint_trackers import correct_trackers, remove_emptied
from rlhf_core.worker.command.found_checkpoints import (
    QUIET_OF_NODES_S,
    QUIET_S,
    CheckpointContent,
    FoundCheckpoint,
    WatchedCheckpoints,
    checkpoint_folders,
    critic_of,
)
from rlhf_core.worker.command.launch import OWN_NAME, own_name

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin", "adapter_model*.bin")
MODEL_FILES = (*WEIGHT_FILES, "*.json", "*.model", "*.txt", "*.jinja", "*.py")
"""Files of a checkpoint that make up a Hugging Face model directory."""
NOT_OF_MODEL = ("trainer_state.json", "args.json", "scheduler*", "optimizer*", "rng_state*", "training_args*")


def spec_hash(spec: RunSpec) -> str:
    """Hash of the settings that the program was started with."""
    part = spec.model_dump(mode="json", include={"seed", "model", "data", "trainer"})
    return hashlib.blake2b(json.dumps(part, sort_keys=True).encode(), digest_size=16).hexdigest()


def resume_point(context: WorkerContext) -> CheckpointDir | None:
    """The checkpoint that this start resumes from, verified by its checksums; None to start from the beginning.

    The first start of an attempt takes the one that the placement names; a restart in place takes the newest.

    Raises:
        CheckpointCorrupt: it is damaged or gone; names it.
    """
    saved = [one for one in context.run_dir.saved_checkpoints() if one.root.name not in context.damaged]
    named = context.placement.resume_checkpoint
    if context.restart > 0:
        chosen = saved[-1] if saved else None
    elif named:
        chosen = next((one for one in saved if one.root.name == named), None)
        if chosen is None:
            raise CheckpointCorrupt(
                f"attempt {context.attempt} was to resume from checkpoint {named}, which is not in "
                f"{context.run_dir.checkpoints_dir}",
                named,
            )
    else:
        chosen = None
    if chosen is not None:
        chosen.verify(functools.partial(context.reporter.beat, Phase.SETUP, chosen.step))
    return chosen


def restore(
    checkpoint: CheckpointDir | None,
    trainer: CommandTrainer,
    output_dir: Path,
    aside: Path,
    beat: Callable[[], None] = lambda: None,
) -> None:
    """Bring the output folder into line with the checkpoint that the program resumes from.

    Checkpoints of later steps are moved aside: they belong to an abandoned branch or are incomplete. With
    ``resume = "in_place"`` the checkpoint itself is put back where the program looks for it, and tracker files name it.

    Args:
        aside: Folder to which later checkpoints are moved.
        beat: Called before each file that is copied.
    """

    def copy(source: str | Path, target: str | Path) -> None:
        beat()
        shutil.copy2(source, target)

    step = checkpoint.step if checkpoint is not None else 0
    own = Path(own_name(checkpoint.root)) if checkpoint is not None and trainer.resume == "in_place" else None
    for pattern, name in _parts(Path(trainer.checkpoint_name), own):
        later = [(number, path) for number, path in checkpoint_folders(str(pattern), output_dir) if number > step]
        source = checkpoint.root / name if checkpoint is not None and name is not None else None
        is_published = source is not None and source.exists()
        # A critic that was not published with its actor may be left where the program saved it.
        is_there = name is not None and (is_published or (output_dir / name).exists())
        resumed = output_dir / name if name is not None and is_there else None
        correct_trackers(output_dir, later, (step, resumed) if resumed is not None else None)
        for _, path in later:
            target = aside / path.relative_to(output_dir)
            target.parent.mkdir(parents=True, exist_ok=True)
            remove_tree(target)
            # It may have to be copied: the output folder may be on another file system.
            shutil.move(path, target, copy_function=copy)
        remove_emptied(output_dir, later)
        if source is not None and resumed is not None and is_published:
            remove_tree(resumed)
            _link_tree(source, resumed, copy)


def _parts(pattern: Path, own: Path | None) -> Iterator[tuple[Path, Path | None]]:
    """Names of a program's checkpoints and of the one to put back; after those of an actor, those of its critic."""
    yield pattern, own
    critics = critic_of(pattern)
    if critics is not None:
        yield critics, critic_of(own) if own is not None else None


class CheckpointPublisher:
    """Publishes complete checkpoints of the program, one at a time, the newest first: reading one may take longer than
    the time between two saves, and a crash costs all steps since the newest one published."""

    def __init__(self, context: WorkerContext, trainer: CommandTrainer, output_dir: Path, first_step: int) -> None:
        self._context = context
        self._trainer = trainer
        self._output_dir = output_dir
        quiet_s = QUIET_OF_NODES_S if context.placement.num_nodes > 1 else QUIET_S
        self._watched = WatchedCheckpoints(trainer, output_dir, quiet_s)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._first_step = first_step
        self._begun: dict[Path, CheckpointContent] = {}
        self._newest_found: FoundCheckpoint | None = None
        self._failure: OSError | WorkerError | None = None
        self._running: list[Future[None]] = []
        self._lock = threading.Lock()
        self._waiting: list[FoundCheckpoint] = []
        self._published: set[int] = set()
        self.newest_step = first_step
        """Step of the newest published checkpoint."""
        self.problem = ""
        """Reason why the newest checkpoint could not be published; empty if it was."""

    @property
    def has_unpublished(self) -> bool:
        """True if the newest checkpoint in the output folder is not published as it is now."""
        found = self._newest_found
        if found is None or found.step <= self._first_step:
            return False
        return found.step > self.newest_step or found.path not in self._begun

    def require_newest(self) -> None:
        """Raise if the newest checkpoint in the output folder is not published.

        Raises:
            OSError: it could not be read or written.
            WorkerError: the run has moved on to another attempt.
            TrainerIncomplete: the program has ended and left it incomplete.
        """
        found = self._newest_found
        if found is None or not self.has_unpublished:
            return
        if found.complete and self._failure is not None:
            raise self._failure
        raise TrainerIncomplete(
            f"the trainer's last checkpoint {found.path} is incomplete: found no file for {', '.join(found.lacks)}, "
            "expected one for each pattern of trainer.checkpoint_complete. Correct the patterns, or find the reason in "
            "its log"
        )

    @property
    def is_busy(self) -> bool:
        """True while a checkpoint is being published."""
        self._running = [one for one in self._running if not one.done()]
        return bool(self._running)

    def consider(self, now_s: float, *, ended: bool = False) -> None:
        """Start publishing a complete checkpoint that is not published yet.

        Args:
            now_s: Monotonic time in seconds.
            ended: The program has exited by itself, so what it has written is whole.
        """
        try:
            found = self._watched.find(now_s, has_ended=ended)
        except OSError as error:
            self.problem = f"failed to search for checkpoints: {error}"
            return
        self._newest_found = found[-1] if found else None
        # Checkpoints up to the resumed one are published already, and may still lie in the program's own folder.
        new = [one for one in found if one.complete and one.step > self._first_step and self._is_new(one)]
        if new:
            self._queue(new)

    def _queue(self, new: Sequence[FoundCheckpoint]) -> None:
        """Let checkpoints wait, except for those that would be removed at once."""
        with self._lock:
            waiting = {one.step: one for one in [*self._waiting, *new]}
            steps = sorted({*waiting, *self._published})
            kept = kept_steps(steps, steps[-1], self._context.spec)
            self._waiting = [one for step, one in sorted(waiting.items()) if step in kept]
            self._running += [self._thread.submit(self._publish_next) for _ in self._waiting]

    def _publish_next(self) -> None:
        with self._lock:
            if not self._waiting:
                return
            found = self._waiting.pop()
        try:
            publish(self._context, self._trainer, self._output_dir, found)
        except (OSError, WorkerError) as error:
            self.problem, self._failure = f"failed to publish checkpoint {found.path}: {error}", error
            if isinstance(error, OSError):  # a file system may fail for a moment only
                self._begun.pop(found.path, None)
            return
        self._published.add(found.step)
        self.newest_step = max(self.newest_step, found.step)
        self.problem, self._failure = "", None

    def _is_new(self, found: FoundCheckpoint) -> bool:
        """Note the content of a checkpoint; True unless it was published with this content.

        A program that saves a step again writes into files that the published checkpoint shares with it.
        """
        before = self._begun.get(found.path)
        # One with fewer files is being removed by the program.
        if before is not None and (found.content == before or found.content.num_files < before.num_files):
            return False
        self._begun[found.path] = found.content
        return True


def publish(context: WorkerContext, trainer: CommandTrainer, output_dir: Path, found: FoundCheckpoint) -> None:
    """Publish one checkpoint, then delete those beyond the retention limit.

    Raises:
        OSError: it could not be read or written; nothing of it remains.
        WorkerError: the run has moved on to another attempt.
    """
    run_dir = context.run_dir
    final = run_dir.checkpoint(found.step)
    partial = final.partial
    remove_tree(partial.root)
    name = found.path.relative_to(output_dir).as_posix()
    try:
        num_files = _link_tree(found.path, partial.root / name)
        critic = critic_of(found.path)
        if critic is not None and critic.parent.is_dir():
            num_files += _link_tree(critic, partial.root / critic.relative_to(output_dir))
        if num_files < found.content.num_files:
            raise FileNotFoundError(
                errno.ENOENT, f"{num_files} of {found.content.num_files} files left: it is being removed"
            )
        _link_model(partial.root / name, partial.model)
        (partial.root / OWN_NAME).write_text(name + "\n", encoding="utf-8")
        files = _checksums(partial.root)
        if context.run_dir.is_superseded(context.attempt):
            raise WorkerError(f"a newer attempt has begun: checkpoint {found.step} of this one is not published")
        manifest = CheckpointManifest(
            step=found.step,
            loop=trainer.algorithm,
            loop_finished=found.step >= trainer.num_steps,
            num_ranks=context.num_ranks,
            spec_hash=spec_hash(context.spec),
            files=files,
            time=utc_now(),
        )
        final.put_in_place(manifest)
    except BaseException:
        with contextlib.suppress(OSError):
            remove_tree(partial.root)
        raise
    run_dir.keep_checkpoints(lambda steps: kept_steps(steps, max([*steps, found.step]), context.spec) | {found.step})


def _link_tree(source: Path, target: Path, copy: Callable[[Path, Path], object] = shutil.copy2) -> int:
    """Hard-link all files of a checkpoint, which may be a folder or a single file, and return the number found."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_file():
        _link(source.resolve(), target, copy)
        return 1
    num_found = 0
    target.mkdir(exist_ok=True)
    for path in sorted(source.rglob("*")):
        place = target / path.relative_to(source)
        if path.is_dir() and not path.is_symlink():
            place.mkdir(parents=True, exist_ok=True)
        elif path.is_file():
            place.parent.mkdir(parents=True, exist_ok=True)
            _link(path.resolve(), place, copy)
            num_found += 1
        elif os.path.lexists(path) and not path.is_dir():
            num_found += 1  # a link to nothing, for instance
    return num_found


def _link(source: Path, target: Path, copy: Callable[[Path, Path], object] = shutil.copy2) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in NO_LINK:
            raise
        copy(source, target)


def _link_model(source: Path, target: Path) -> None:
    """Collect the model and tokenizer files, if the program writes a whole model in Hugging Face's layout."""
    has_config = any((source / name).is_file() for name in ("config.json", "adapter_config.json"))
    if not has_config or not any(any(source.glob(pattern)) for pattern in WEIGHT_FILES):
        return
    target.mkdir()
    for path in sorted(source.iterdir()):
        name = PurePosixPath(path.name)
        if path.is_file() and any(map(name.match, MODEL_FILES)) and not any(map(name.match, NOT_OF_MODEL)):
            _link(path, target / path.name)


def _checksums(root: Path) -> dict[str, FileChecksum]:
    """Checksums of all files; hard links to one file are read once."""
    known: dict[tuple[int, int], FileChecksum] = {}
    found = {}
    for path in sorted(root.rglob("*")):
        if path.is_file():
            facts = path.stat()
            key = (facts.st_dev, facts.st_ino)
            if key not in known:
                bring_to_disk(path)
                known[key] = checksum(path)
            found[path.relative_to(root).as_posix()] = known[key]
    return found
