"""Paths of a config. Relative ones start at the folder in which `rlhf` is called, for all files that it names."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_core.config import loading as config
from rlhf_core.errors import BadConfig
from rlhf_core.machine.accounts import expanded
from rlhf_core.schemas.base import storable_text
from rlhf_core.schemas.command_trainer import CommandTrainer, named_placeholders
from rlhf_core.schemas.run import RunSpec
from rlhf_core.schemas.scoring_models import PROMOTED


def load_spec(source: str | Path, overrides: Sequence[str], folder: Path, *, refuse_misplaced: bool = False) -> RunSpec:
    """Load the config of a new run, with absolute paths.

    Args:
        folder: start of relative paths.
        refuse_misplaced: raise an error for :func:`misplaced` paths, before anything is started, requested or stored.

    Raises:
        BadConfig: the config is invalid, or has misplaced paths.
    """
    spec = config.load(source, overrides)
    problems = misplaced(spec, source, folder) if refuse_misplaced else []
    if problems:
        raise BadConfig(f"{config.find(source)}:\n" + "\n".join(f"  {problem}" for problem in problems))
    return absolute_paths(spec, folder)


def misplaced(spec: RunSpec, source: str | Path, folder: Path) -> list[str]:
    """Describe the paths that lead nowhere from ``folder``, but to something from the folder of the config.

    Args:
        spec: with paths as given.
        source: its config.
        folder: start of relative paths.
    """
    beside = config.find(source).parent.absolute()
    return [
        f"{name}: found no {text} in {folder}, where relative paths start, but {meant} beside the config; "
        f'write "{os.path.relpath(meant, folder)}", or call rlhf in {beside}'
        for name, text in [*spec.paths.items(), *(("code.paths", path) for path in spec.code.paths)]
        if not text.startswith(PROMOTED) and not expanded(text).is_absolute()
        if _is_only(meant := _joined(beside, text), _joined(folder, text))
    ]


def _joined(folder: Path, text: str) -> Path:
    return Path(os.path.normpath(folder / text))


def _is_only(there: Path, here: Path) -> bool:
    with suppress(OSError):  # preflight says why something is not accessible
        return there.exists() and not here.exists()
    return False


def absolute_paths(spec: RunSpec, folder: Path) -> RunSpec:
    """The spec with its paths made absolute, relative to ``folder``: workers and a later `rlhf resume` start elsewhere.

    Raises:
        BadConfig: the name of the folder is not valid UTF-8, and the spec would contain it, or a path names a user who
            does not exist.
    """

    def absolute(text: str) -> str:
        path = str(Path(os.path.normpath(folder / expanded(text)))) if text else text
        if storable_text(path) != path:
            raise BadConfig(f"found the path {path!r}, expected a UTF-8 path; rename the folder or use an absolute one")
        return path

    given = {setting: path for setting, path in spec.paths.items() if not path.startswith(PROMOTED)}
    changes: dict[str, Any] = {setting: absolute(path) for setting, path in given.items()}
    if spec.promote.folder:
        changes["promote.folder"] = absolute(spec.promote.folder)
    if spec.code.paths:
        changes["code.paths"] = tuple(map(absolute, spec.code.paths))
    trainer = spec.trainer
    if isinstance(trainer, CommandTrainer):
        # It starts in the folder that its launch line was written for.
        working_dir = str(expanded(trainer.working_dir or str(folder)))
        changes["trainer.working_dir"] = working_dir if named_placeholders(working_dir) else absolute(working_dir)
        changes["trainer.output_dir"] = str(expanded(trainer.output_dir))
    for setting, value in changes.items():
        spec = _changed(spec, setting.split("."), value)
    return spec


def _changed(holder: Any, names: Sequence[str], value: Any) -> Any:
    """A spec or table with another value of a setting. Unlike ``with_changes``, it sets no other: a kept config has
    only what its user has given."""
    first, *inner = names
    if isinstance(holder, Mapping):
        return {**holder, first: _changed(holder[first], inner, value)}
    return holder.model_copy(update={first: _changed(getattr(holder, first), inner, value) if inner else value})
