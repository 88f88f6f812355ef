"""Lengths given as ``loops.*.epochs``, converted to steps before a run is stored.

Everything afterwards (schedules, resumes, predictions, the history) knows the number of steps alone. The rows are
counted by the loader of training in the compute interpreter, since only the tokenizer tells which prompts are too long.
"""

import tempfile
from pathlib import Path

from pydantic import ValidationError

from rlhf_core.config.site import Site
from rlhf_core.errors import BadConfig
from rlhf_core.launch.prepare import keep_code
from rlhf_core.preflight.program_queries import ask_worker
from rlhf_core.schemas.changes import with_changes
from rlhf_core.schemas.content import RowCount
from rlhf_core.schemas.loops import MAX_STEPS
from rlhf_core.schemas.run import RunSpec

COUNT_TIMEOUT_S = 3600.0
"""Time limit to read and tokenize all training rows: a million of them take minutes."""


def with_steps_of_epochs(spec: RunSpec, site: Site, folder: Path) -> RunSpec:
    """The spec with ``num_steps`` in place of ``epochs`` in every loop.

    Args:
        spec: with absolute paths.
        folder: source of the user's code, for a generator of rows.

    Raises:
        BadConfig: the rows cannot be counted, or a loop would be too long.
    """
    counted = [name for name, loop in spec.loops.named.items() if loop.epochs]
    if not counted:
        return spec
    settings = " and ".join(f"loops.{name}.epochs" for name in counted)
    num_rows = _count_rows(spec, site, folder, settings)
    steps = {name: spec.loops.named[name].steps_of_epochs(num_rows) for name in counted}
    lengths = {f"loops.{name}.num_steps": number for name, number in steps.items()}
    try:
        return with_changes(spec, {**lengths, **{f"loops.{name}.epochs": 0.0 for name in counted}})
    except ValidationError:
        raise BadConfig(
            f"found {settings}, which are {max(steps.values())} steps of {num_rows} rows; expected at most {MAX_STEPS}"
        ) from None


def _count_rows(spec: RunSpec, site: Site, folder: Path, settings: str) -> int:
    """Number of training rows that are left after dropping."""
    with tempfile.TemporaryDirectory() as place:
        path, code = Path(place) / "spec.json", Path(place) / "code"
        path.write_text(spec.model_dump_json(), encoding="utf-8")
        words = ["count-rows", "--spec", str(path)]
        if spec.data.generator:
            keep_code(code, spec, folder, "")
            words += ["--path", str(code / "snapshot")]
        answer = ask_worker(spec, site, *words, timeout_s=COUNT_TIMEOUT_S)
    problem = answer if isinstance(answer, str) else RowCount.model_validate(answer).problem
    if problem:
        raise BadConfig(f"cannot count the training rows for {settings}: {problem}")
    return RowCount.model_validate(answer).num_rows
