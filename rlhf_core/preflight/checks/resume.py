"""Checks of the checkpoint that a run resumes from."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_core.preflight.facts import Facts
from rlhf_core.preflight.registry import Finding, blocked, check, passed, warning

_WHOLE = ("model.config", "data.generator_args")
"""User-defined tables, compared as one value because an added or removed key is also a change."""


@check("resume.checkpoint")
def checkpoint(facts: Facts) -> Iterator[Finding]:
    """Every rank rejects a damaged checkpoint; most external trainers also reject one of another number of ranks."""
    found = facts.resume
    if found is None:
        return
    if found.problems:
        yield blocked(
            f"checkpoint {found.name} is damaged: {'; '.join(found.problems)}",
            "every file as listed in COMPLETE",
            f"remove the folder {found.name} to resume from the checkpoint before it",
        )
    elif found.num_ranks == facts.spec.num_ranks:
        yield passed(f"resuming from {found.name}")
    elif facts.spec.trainer.kind == "native":
        yield passed(
            f"resuming from {found.name}, written by {found.num_ranks} ranks and redistributed over "
            f"{facts.spec.num_ranks}"
        )
    else:
        yield warning(
            f"checkpoint {found.name} was written by {found.num_ranks} ranks, this run has {facts.spec.num_ranks}",
            "the same number of ranks",
            f"run with {found.num_ranks} ranks, or keep the number if this trainer loads checkpoints of a different "
            "number of ranks; DeepSpeed and FSDP do not",
        )


@check("resume.version")
def version(facts: Facts) -> Iterator[Finding]:
    """A different version of the program may compute different numbers from the same state."""
    if facts.stored_version and facts.stored_version != facts.control_version:
        yield warning(
            f"the run was started with rlhf-flows {facts.stored_version}, this is {facts.control_version}",
            "the same version, if numbers are to be compared",
            f"install rlhf-flows=={facts.stored_version}, or read the curve with this in mind",
        )


@check("resume.settings")
def settings(facts: Facts) -> Iterator[Finding]:
    """Every rank rejects a checkpoint with different settings, after the queue and the start of the nodes."""
    found = facts.resume
    if found is None or not found.settings:
        return
    now = facts.spec.model_dump(mode="json")
    changed = list(_differences(found.settings, now))
    for name, before, after in changed:
        yield blocked(
            f"{name} is {_shown(after)}, {found.name} was trained with {_shown(before)}",
            f"{name} = {_shown(before)}, as before",
            f"set {name} back, or start a new run from the model in {found.name}/model",
        )
    if not changed:
        yield passed(f"{found.name} was trained with the same settings")


@check("resume.steps")
def steps(facts: Facts) -> Iterator[Finding]:
    """A run with nothing left to do ends at once as a success, without training anything."""
    found, total = facts.resume, facts.spec.total_steps
    if found is not None and found.step > total:
        yield warning(
            f"{found.name} is at step {found.step}, the run has {total} steps in total",
            "a checkpoint before the last step",
            f"raise {_steps_setting(facts)}; otherwise only the evaluation runs",
        )


def _steps_setting(facts: Facts) -> str:
    return "loops.main.num_steps" if facts.spec.trainer.kind == "native" else "trainer.num_steps"


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Settings that differ from the checkpoint's: dotted name, old and new value. Newer settings are ignored."""
    for key, value in before.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping) and isinstance(now.get(key), Mapping) and name not in _WHOLE:
            yield from _differences(value, now[key], f"{name}.")
        elif now.get(key) != value:
            yield name, value, now.get(key)


def _shown(value: Any, limit: int = 100) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= limit else text[: limit - 3] + "..."
