"""Creation of the run directory: the resolved spec, the user's code at submission, and the first line of the
journal."""

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import rlhf_core
from rlhf_core import __version__
from rlhf_core.errors import BadConfig, RunDirError
from rlhf_core.files import private as private_files
from rlhf_core.files.whole import comes_from_full_disk, is_disk_full, remove_tree, write_model, write_text
from rlhf_core.launch.journal import Journal
from rlhf_core.machine.accounts import account, user_name
from rlhf_core.run_dir.run import RunDir, new_run_id
from rlhf_core.schemas.base import label_problem, utc_now
from rlhf_core.schemas.journal import RunCreated
from rlhf_core.schemas.run import RunSpec
from rlhf_core.schemas.stored_spec import MAX_TAGS, StoredSpec
from rlhf_core.text.formatting import THROUGH_PREFECT

DIFF_LIMIT_BYTES = 4 << 20
"""Size at which a diff is cut; a cut diff says so."""

_NOT_CODE = shutil.ignore_patterns(
    "__pycache__", "*.pyc", ".git", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache"
)


def prepare(
    spec: RunSpec,
    runs: Path,
    *,
    config_source: str,
    overrides: Sequence[str] = (),
    folder: Path | None = None,
    revision: str | None = None,
    owner: str = "",
    tags: Sequence[str] = (),
    run_id: str = "",
    flow_run_id: str = "",
) -> RunDir:
    """Create the directory of a new run.

    It appears complete or not at all: it is written under another name, then renamed.

    Args:
        spec: with absolute paths (:func:`~rlhf_core.launch.config_paths.absolute_paths`).
        runs: folder of all run directories.
        config_source: the config file, as given.
        overrides: the ``--set`` overrides, as given.
        folder: source of user code and git revision. Default: the current folder.
        revision: git revision of that code, if the folder is a copy. Default: read from git.
        owner: the requesting user. Default: the user of this process.
        tags: labels to find it by.
        run_id: its id, for requests that must get the same run when repeated. Default: a new one.
        flow_run_id: the Prefect flow run that creates it.

    Raises:
        RunDirError: the folder of the runs cannot be written, or a run with this id exists.
        BadConfig: something in ``code.paths`` does not exist, or owner or tags cannot be stored.
    """
    _require_labels(owner, tags)
    folder = folder or Path.cwd()
    stored = StoredSpec(
        run_id=run_id or new_run_id(spec.name),
        created_at=utc_now(),
        owner=owner or user_name(),
        owner_account=THROUGH_PREFECT if flow_run_id else account(),
        config_source=config_source,
        overrides=tuple(overrides),
        package_version=__version__,
        code_revision=git_revision(folder) if revision is None else revision,
        code_folder=str(folder),
        tags=tuple(tags),
        flow_run_id=flow_run_id,
        spec=spec,
    )
    return _make_whole(runs, stored, lambda code: keep_code(code, spec, folder, stored.code_revision))


def _require_labels(owner: str, tags: Sequence[str]) -> None:
    named = [("owner", owner), *(("tag", tag) for tag in tags)]
    problems = [f"{name}: {problem}" for name, given in named if (problem := label_problem(given))]
    if len(tags) > MAX_TAGS:
        problems.append(f"found {len(tags)} tags, expected at most {MAX_TAGS}")
    if problems:
        raise BadConfig("; ".join(problems))


def prepare_trial(main: RunDir, run_id: str, spec: RunSpec) -> RunDir:
    """Create the directory of a trial of another run, next to that run and with the same code. An existing one is kept.

    Args:
        main: run that the trial is for.
        run_id: id of the trial.
        spec: spec of the trial.

    Raises:
        RunDirError: it cannot be written, or the main run is damaged.
    """
    runs = main.root.parent
    present = RunDir.of(runs, run_id)
    if present.spec.is_file():
        return present
    stored = main.read_spec().model_copy(
        update={"run_id": run_id, "created_at": utc_now(), "spec": spec, "trial_of": main.run_id}
    )
    return _make_whole(runs, stored, lambda code: _copy_folder(main.code, code))


def _make_whole(runs: Path, stored: StoredSpec, keep: Callable[[Path], object]) -> RunDir:
    run_dir, unfinished = RunDir.of(runs, stored.run_id), RunDir(runs / f".{stored.run_id}.new")
    try:
        remove_tree(unfinished.root)  # left by a process that was killed during an earlier try
        if not runs.exists():
            private_files.make_folder(runs)
        unfinished.root.mkdir()
        private_files.give_rights_of(runs, unfinished.root)
        keep(unfinished.code)
        write_model(unfinished.spec, stored)
        journal = Journal(unfinished, token=0)
        journal.append(
            RunCreated(
                name=stored.spec.name,
                owner=stored.owner,
                owner_account=stored.owner_account,
                config_source=stored.config_source,
            )
        )
        journal.close()
        unfinished.root.rename(run_dir.root)
    except BaseException as error:
        with suppress(OSError):  # if nothing can be looked up in that folder, nothing was written to it
            remove_tree(unfinished.root)
        if not isinstance(error, OSError):
            raise
        raise RunDirError(
            f"the run directory {run_dir.root} already exists"
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY)
            else f"cannot make the run directory {run_dir.root}: {error.strerror}. {_advice(error)}"
        ) from None
    return run_dir


def _advice(error: OSError) -> str:
    if is_disk_full(error):
        return "Make room there, or set RLHF_RUNS to a folder on another file system"
    if error.errno == errno.EACCES:
        return "Set RLHF_RUNS to a folder that you may write, or let the worker of the site make it: `rlhf submit`"
    return "Set RLHF_RUNS to a writable folder"


# ---------------------------------------------------------------------------------------------------------------------
# Code


def keep_code(target: Path, spec: RunSpec, folder: Path, revision: str) -> None:
    """Save the code for later attempts: git revision and diff for the record, a snapshot for the workers.

    Raises:
        BadConfig: something in ``code.paths`` does not exist, or part of the code cannot be copied.
    """
    target.mkdir(parents=True, exist_ok=True)
    write_text(target / "revision.txt", f"{revision or 'not a git repository'}\n")
    if revision:
        write_text(target / "diff.patch", git_diff(folder))
    snapshot = target / "snapshot"
    snapshot.mkdir()
    for path in code_sources(spec, folder):
        _copy(path, snapshot / path.name)


def not_code(folder: str, names: Sequence[str]) -> set[str]:
    """Names in a folder that are no part of the user's code, as an ``ignore`` of :func:`shutil.copytree`.

    Among them are links to nothing, by which an editor locks a file, and sockets and FIFOs, which cannot be copied.
    """
    paths = (Path(folder, name) for name in names)
    return {*_NOT_CODE(folder, [*names]), *(path.name for path in paths if not path.is_file() and not path.is_dir())}


def code_folder(stored: StoredSpec) -> Path:
    """Folder in which the user's modules are looked for: the one of the request, or the current one if not recorded."""
    return Path(stored.code_folder) if stored.code_folder else Path.cwd()


def code_sources(spec: RunSpec, folder: Path) -> list[Path]:
    """Files and folders that are copied as the user's code; one of each name, since two settings may name the same."""
    found = [*(Path(path) for path in spec.code.paths), *user_modules(spec, folder)]
    return list({path.name: path for path in reversed(found)}.values())[::-1]


def user_modules(spec: RunSpec, folder: Path) -> list[Path]:
    """Modules of functions that the config names found in ``folder`` rather than in an installed package."""
    functions = (*spec.reward.functions, *spec.rollout.turns.functions)
    named = [*functions, spec.evaluate.scorer_function, spec.data.generator]
    tops = dict.fromkeys(name.partition(":")[0].partition(".")[0] for name in named if name)
    # our own package is always installed, even if the current folder is its checkout
    tops.pop("rlhf_core", None)
    candidates = [path for top in tops for path in (folder / f"{top}.py", folder / top)]
    return [path for path in candidates if path.is_file() or (path.is_dir() and any(path.glob("**/*.py")))]


def git_revision(folder: Path) -> str:
    """Commit of the repository around ``folder``, with ``-dirty`` if it has changes; empty outside a repository."""
    commit = _git(folder, "rev-parse", "HEAD").strip()
    if not commit:
        return ""
    return f"{commit}-dirty" if _git(folder, "status", "--porcelain", "--untracked-files=no").strip() else commit


def program_revision(package: Path = Path(rlhf_core.__file__).parent) -> str:
    """Commit of the checkout that this program is installed from; empty for an installed package, even if its
    environment lies inside another repository."""
    return git_revision(package) if _git(package, "ls-files", "__init__.py").strip() else ""


def git_diff(folder: Path) -> str:
    """Uncommitted changes of tracked files, cut at :data:`DIFF_LIMIT_BYTES`.

    A patch that `git apply` accepts, whatever the user's settings: another program for differences, colours, prefixes.
    """
    plain = ("--no-ext-diff", "--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/")
    diff = _git(folder, "-c", "diff.relative=false", "diff", *plain, "HEAD")
    if len(diff) <= DIFF_LIMIT_BYTES:
        return diff
    return diff[:DIFF_LIMIT_BYTES] + f"\n(truncated: the full diff has {len(diff)} characters)\n"


def _git(folder: Path, *arguments: str) -> str:
    """Run a git command and return its output; empty without git, a repository, or an answer."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            timeout=20,
            check=False,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", errors="replace") if done.returncode == 0 else ""


def _copy(source: Path, target: Path) -> None:
    try:
        if source.is_dir():
            _copy_folder(source, target)
        elif source.is_file():
            shutil.copy2(source, target)
        else:
            raise BadConfig(f"code.paths names {source}, which does not exist; remove it or correct the path")
    except OSError as error:
        if is_disk_full(error):
            raise
        raise BadConfig(_uncopied(error.filename or source, error.strerror)) from None


def _uncopied(place: object, why: object) -> str:
    return f"cannot copy {place} with the code of the run: {why}. Correct or remove it"


def _copy_folder(source: Path, target: Path) -> None:
    try:
        shutil.copytree(source, target, ignore=not_code)
    except shutil.Error as error:
        place, _, why = error.args[0][0]
        if comes_from_full_disk(error):  # no file is to blame
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), place) from None
        raise BadConfig(_uncopied(place, why)) from None
