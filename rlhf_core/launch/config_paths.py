"""Paths of a config. Relative ones start at the folder in which `rlhf` is called, for all files that it names."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from rlhf_core.config import loading as config
from rlhf_core.errors import BadConfig
from rlhf_core.machine.accounts import expanded
from rlhf_core.schemas.base import storable_text
from rlhf_core.schemas.command_trainer import CommandTrainer, named_placeholders
from rlhf_core.schemas.data import RowSource
from rlhf_core.schemas.model import BUILT_TOKENIZERS
from rlhf_core.schemas.run import RunSpec
from rlhf_core.schemas.scoring_models import PROMOTED
from rlhf_core.schemas.trainers import Trainer


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
        for name, text in _read_paths(spec)
        if text and not expanded(text).is_absolute()
        if _is_only(meant := _joined(beside, text), _joined(folder, text))
    ]


def _joined(folder: Path, text: str) -> Path:
    return Path(os.path.normpath(folder / text))


def _is_only(there: Path, here: Path) -> bool:
    with suppress(OSError):  # preflight says why something is not accessible
        return there.exists() and not here.exists()
    return False


def _read_paths(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Settings with a path that must exist, and that path as given."""
    yield "model.path", spec.model.path
    if spec.model.tokenizer not in BUILT_TOKENIZERS:
        yield "model.tokenizer", spec.model.tokenizer
    yield from spec.data.files.items()
    for name, one in spec.reward.models.items():
        if not one.path.startswith(PROMOTED):
            yield f"reward.models.{name}.path", one.path
    for name, path in spec.references.items():
        if not path.startswith(PROMOTED):
            yield name, path
    for path in spec.code.paths:
        yield "code.paths", path


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

    def files(source: RowSource) -> dict[str, str]:
        return {"train": absolute(source.train), "eval": absolute(source.eval)}

    sources = {name: one.model_copy(update=files(one)) for name, one in spec.data.sources.items()}
    models = {
        name: one if one.path.startswith(PROMOTED) else one.model_copy(update={"path": absolute(one.path)})
        for name, one in spec.reward.models.items()
    }
    loops = {
        name: loop.model_copy(update={"reference": absolute(loop.reference)})
        for name, loop in spec.loops.named.items()
        if not loop.reference.startswith(PROMOTED)
    }
    tokenizer = spec.model.tokenizer
    if tokenizer not in ("", *BUILT_TOKENIZERS):
        tokenizer = absolute(tokenizer)
    return spec.model_copy(
        update={
            "model": spec.model.model_copy(update={"path": absolute(spec.model.path), "tokenizer": tokenizer}),
            "loops": spec.loops.model_copy(update=loops),
            "data": spec.data.model_copy(update={**files(spec.data), "sources": sources}),
            "reward": spec.reward.model_copy(update={"models": models}),
            "promote": spec.promote.model_copy(update={"folder": absolute(spec.promote.folder)}),
            "trainer": _with_absolute_paths(spec.trainer, folder, absolute),
            "code": spec.code.model_copy(update={"paths": tuple(absolute(path) for path in spec.code.paths)}),
        }
    )


def _with_absolute_paths(trainer: Trainer, folder: Path, absolute: Callable[[str], str]) -> Trainer:
    """The trainer with absolute paths. An external trainer starts in the folder its launch line was written for."""
    if not isinstance(trainer, CommandTrainer):
        return trainer
    working_dir = str(expanded(trainer.working_dir or str(folder)))
    return trainer.model_copy(
        update={
            "working_dir": working_dir if named_placeholders(working_dir) else absolute(working_dir),
            "output_dir": str(expanded(trainer.output_dir)),
        }
    )
