"""Folder of a run: the paths of its files, and its checkpoints.

Rules (docs/run_directory.md has the table of files): exactly one writer per file; whole files appear by
write-then-rename (:mod:`rlhf_core.files.whole`); appended files are read up to the last newline
(:mod:`rlhf_core.files.appended`). All are read through :mod:`rlhf_core.files.reading`, so that no other kind of file at
their path can block or exhaust a reader.
"""

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from rlhf_core.errors import RunDirError
from rlhf_core.files.lookups import is_there, paths_in
from rlhf_core.files.reading import UnfitFile, read_document
from rlhf_core.files.whole import remove_tree
from rlhf_core.run_dir.attempt import AttemptDir, RestartDir, numbered_folders
from rlhf_core.run_dir.checkpoint import CheckpointDir
from rlhf_core.schemas.stored_spec import READABLE_VERSIONS, StoredSpec

_CHECKPOINT_NAME = re.compile(r"step-([0-9]{6,10})")
_CODE_NAME = re.compile(r"code-([0-9]{1,6})")
_LEFTOVER_NAME = re.compile(r"\.\.?(?:step|aside|damaged)-.*")
_ASIDE_NAME = re.compile(r"aside-[0-9]+|damaged-[0-9]+\.[0-9]+")
_RUN_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}-[0-9]{8}-[0-9]{6}-[0-9a-f]{6}")


def new_run_id(name: str) -> str:
    """``<name>-<date>-<time>-<6 hex digits>``: sortable, readable, unique."""
    return f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


@dataclass(frozen=True)
class RunDir:
    """``<runs>/<run_id>/``: the channel between the control plane and the nodes."""

    root: Path

    @classmethod
    def of(cls, runs: Path, run_id: str) -> "RunDir":
        """Return the directory of one run; it need not exist.

        Raises:
            RunDirError: the text is not a run id, or its folder is a link that leads out of ``runs``. Any user who can
                fill in a form can supply an id: it must never open anything else.
        """
        if not is_run_id(run_id):
            raise RunDirError(f"found {run_id[:200]!r}, expected a run id such as sort-20260301-120000-a1b2c3")
        root = runs / run_id
        # Unlike Path.is_symlink, this is false where nothing can be opened anyway, as in a folder of another user.
        is_link = os.path.islink(root)  # noqa: PTH114
        if is_link and not root.resolve().is_relative_to(runs.resolve()):
            raise RunDirError(
                f"{root} is a link to a folder outside {runs} and is not followed. Move the run directory back, or set "
                "RLHF_RUNS to its parent folder"
            )
        return cls(root)

    @classmethod
    def find(cls, runs: Path, text: str) -> "RunDir | None":
        """Return the directory of a run if the text is the id of an existing one that this user may enter."""
        with contextlib.suppress(RunDirError, OSError):  # its owner may have closed it to others
            found = cls.of(runs, text)
            return found if found.spec.is_file() else None
        return None

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
        """Response to the question whether the model may be promoted; the first one counts."""
        return self.root / "promotion.json"

    @property
    def housekeeping(self) -> Path:
        """Actions of the site's daemon on the run; the holder of the daemon's lease appends."""
        return self.root / "housekeeping.jsonl"

    @property
    def code(self) -> Path:
        """Revision, diff and snapshot of the user's code: the newest copy."""
        copy = self.newest_code_copy()
        return self.code_copy(copy) if copy > 1 else self.root / "code"

    def code_copy(self, copy: int) -> Path:
        """A later copy of the user's code, numbered from 2, for the attempts after it; the first belongs to the
        request."""
        return self.root / f"code-{copy}"

    def newest_code_copy(self) -> int:
        """Number of the newest copy of the user's code."""
        return max(_numbers_in(self.root, _CODE_NAME), default=1)

    @property
    def initial_model(self) -> Path:
        """Model and tokenizer that training starts from, if built here; trainer rank 0 writes them once."""
        return self.root / "initial_model"

    @property
    def attempts_dir(self) -> Path:
        """Folder of the attempts."""
        return self.root / "attempts"

    @property
    def checkpoints_dir(self) -> Path:
        """Folder of the checkpoints."""
        return self.root / "checkpoints"

    def merged(self, step: int) -> CheckpointDir:
        """Model of an adapter checkpoint, merged with its base model for promotion."""
        return CheckpointDir(self.merged_dir / f"step-{step:06d}", step)

    @property
    def merged_dir(self) -> Path:
        """Folder of the models that adapters were merged into."""
        return self.root / "merged"

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
        """Planned attempts, in order."""
        return [self.attempt(number) for number in numbered_folders(self.attempts_dir)]

    def restarts(self) -> list[RestartDir]:
        """Restarts of all attempts, in order."""
        return [restart for attempt in self.attempts() for restart in attempt.restarts()]

    def is_superseded(self, attempt: int) -> bool:
        """True if the next attempt has been planned: nothing of this one may run or write any more."""
        return is_there(self.attempt(attempt + 1).placement)

    def checkpoint(self, step: int) -> CheckpointDir:
        """The folder of one checkpoint."""
        return CheckpointDir(self.checkpoints_dir / f"step-{step:06d}", step)

    def checkpoints(self) -> list[CheckpointDir]:
        """Complete checkpoints, oldest first. Completeness is the ``COMPLETE`` file; hashes are checked on loading."""
        return [checkpoint for checkpoint in self.saved_checkpoints() if checkpoint.manifest() is not None]

    def saved_checkpoints(self) -> list[CheckpointDir]:
        """Every saved checkpoint, oldest first. An incomplete one is damaged: a folder gets its name only once all its
        files are complete."""
        matches = (_CHECKPOINT_NAME.fullmatch(path.name) for path in paths_in(self.checkpoints_dir))
        found = [CheckpointDir(self.checkpoints_dir / match[0], int(match[1])) for match in matches if match]
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def checkpoint_before(self, name: str) -> CheckpointDir | None:
        """The newest complete checkpoint that is older than the given one, if any."""
        match = _CHECKPOINT_NAME.fullmatch(name)
        older = [checkpoint for checkpoint in self.checkpoints() if match and checkpoint.step < int(match[1])]
        return older[-1] if older else None

    def damaged(self, attempt: int, restart: int) -> Path:
        """Folder of the checkpoints that a restart found damaged, kept for inspection."""
        return self.checkpoints_dir / f"damaged-{attempt}.{restart}"

    def put_damaged_aside(self, name: str, attempt: int, restart: int) -> None:
        """Move a damaged checkpoint aside, so that nothing resumes from it.

        Raises:
            OSError: it cannot be moved.
        """
        folder = self.damaged(attempt, restart)
        folder.mkdir(exist_ok=True)
        (self.checkpoints_dir / name).rename(folder / name)

    def put_aside_folders(self) -> list[Path]:
        """Folders of checkpoints that were put aside, damaged or of an abandoned branch, by name."""
        return [path for path in paths_in(self.checkpoints_dir) if _ASIDE_NAME.fullmatch(path.name)]

    def leftovers(self) -> list[Path]:
        """Hidden folders of checkpoints whose save or removal has not finished, by name."""
        return [path for path in paths_in(self.checkpoints_dir) if _LEFTOVER_NAME.fullmatch(path.name)]

    def aside(self, attempt: int) -> Path:
        """Folder of the checkpoints whose branch was abandoned after an attempt."""
        return self.checkpoints_dir / f"aside-{attempt}"

    def put_aside_newer_than(self, name: str, attempt: int) -> None:
        """Move checkpoints newer than the given one aside: their branch is abandoned, and no later attempt may resume
        from them. Harmless if it was done before, completely or in part.

        Raises:
            RunDirError: ``name`` is not the name of a checkpoint.
        """
        kept = _CHECKPOINT_NAME.fullmatch(name)
        if kept is None:
            raise RunDirError(f"found {name}, expected a checkpoint name such as step-20")
        aside = self.aside(attempt)
        for checkpoint in self.checkpoints():
            if checkpoint.step > int(kept[1]):
                aside.mkdir(exist_ok=True)
                checkpoint.root.rename(aside / checkpoint.root.name)

    def newest_put_aside(self, attempt: int) -> int:
        """Return the highest step that :meth:`put_aside_newer_than` moved away after an attempt; 0 if none."""
        return max(_numbers_in(self.aside(attempt), _CHECKPOINT_NAME), default=0)

    def newest_checkpoint(self) -> CheckpointDir | None:
        """The complete checkpoint of the highest step, if any."""
        return next(reversed(self.checkpoints()), None)

    def keep_checkpoints(self, chosen: Callable[[Sequence[int]], Collection[int]]) -> None:
        """Remove all complete checkpoints but those chosen.

        Args:
            chosen: returns the steps to keep of all steps, ascending.
        """
        # Listed once: one that cannot be read for a moment is neither counted nor removed.
        found = self.checkpoints()
        kept = chosen([checkpoint.step for checkpoint in found])
        for checkpoint in found:
            if checkpoint.step not in kept:
                remove_tree(checkpoint.root)

    def evaluation(self, when: str, name: str) -> Path:
        """One evaluation report."""
        return self.evaluations_dir / f"{when}-{name}.json"

    def evaluations(self) -> list[Path]:
        """All evaluation reports."""
        return paths_in(self.evaluations_dir, "*.json")

    def read_spec(self) -> StoredSpec:
        """Read ``spec.json``.

        Raises:
            RunDirError: it is missing or damaged, or a newer program wrote it.
        """
        try:
            content: Any = from_json(read_document(self.spec))
        except FileNotFoundError:
            raise RunDirError(f"{self.root} is not a run directory: it has no spec.json") from None
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
                f"{self.spec} has schema_version {version}, this program reads {readable}; use the version of "
                f"rlhf-flows that created it ({content.get('package_version', 'unknown')})"
            )
        try:
            return StoredSpec.model_validate(content)
        except ValidationError as error:
            raise RunDirError(f"{self.spec} is not valid in this version: {error}") from None


def _numbers_in(folder: Path, name: re.Pattern[str]) -> list[int]:
    """Numbers in the names of a folder's entries that have a form; empty if the folder is missing."""
    matches = (name.fullmatch(path.name) for path in paths_in(folder))
    return [int(match[1]) for match in matches if match]


def run_dirs(runs: Path) -> list[RunDir]:
    """Every run directory under ``runs``, by name. Folders with other names (unfinished, copies), links that lead
    elsewhere, and folders that this user may not enter are skipped.

    Raises:
        OSError: ``runs`` itself cannot be listed.
    """
    found = (RunDir.find(runs, path.name) for path in paths_in(runs))
    return [run_dir for run_dir in found if run_dir is not None]


def promoted_models(runs: Path) -> Path:
    """Return the default folder of promoted models, beside the folder of the run directories."""
    return runs.absolute().parent / "promoted"


def cleared_nodes(runs: Path) -> Path:
    """Return the folder of the records of repaired nodes, beside the run directories."""
    return runs / "cleared-nodes"


def is_run_id(text: str) -> bool:
    """Return True if ``text`` has the form of a run id."""
    return _RUN_ID.fullmatch(text) is not None


def run_name(run_id: str) -> str:
    """Name of the run with a given id; empty if the text is not a run id."""
    return run_id.rsplit("-", 3)[0] if is_run_id(run_id) else ""
