"""Checks of the checkpoint that a run resumes from."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_core.preflight.facts import Facts
from rlhf_core.preflight.registry import Finding, blocked, check, passed, warning

_WHOLE = ("model.config", "data.generator_args")
"""Tables of the user's own: compared as one value, because a key more or less is a change as well."""


@check("resume.checkpoint")
def checkpoint(facts: Facts) -> Iterator[Finding]:
    """Every rank refuses a damaged checkpoint; most other trainers also refuse one of another number of ranks."""
    found = facts.resume
    if found is None:
        return
    if found.problems:
        yield blocked(
            f"checkpoint {found.name} is damaged: {'; '.join(found.problems)}",
            "every file as COMPLETE says",
            f"remove the folder {found.name} to go on from the checkpoint before it",
        )
    elif found.num_ranks == facts.spec.num_ranks:
        yield passed(f"going on from {found.name}")
    elif facts.spec.trainer.kind == "native":
        yield passed(
            f"going on from {found.name}; {found.num_ranks} ranks wrote it, {facts.spec.num_ranks} share it out"
        )
    else:
        yield warning(
            f"checkpoint {found.name} was written by {found.num_ranks} ranks, this run has {facts.spec.num_ranks}",
            "the same number of ranks",
            f"run with {found.num_ranks} ranks, or leave it so if this trainer loads what another number of ranks has "
            f"saved; DeepSpeed and FSDP do not",
        )


@check("resume.version")
def version(facts: Facts) -> Iterator[Finding]:
    """Another version of the program may compute other numbers from the same state."""
    if facts.stored_version and facts.stored_version != facts.control_version:
        yield warning(
            f"the run was started with rlhf-flows {facts.stored_version}, this is {facts.control_version}",
            "the version it was started with, when its numbers are to be compared",
            f"install rlhf-flows=={facts.stored_version}, or read the curve with this in mind",
        )


@check("resume.settings")
def settings(facts: Facts) -> Iterator[Finding]:
    """Every rank refuses a checkpoint with other settings, after the wait in the queue and the start of the nodes."""
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
            f"{found.name} is at step {found.step}, the run has {total} steps in all",
            "a checkpoint before the last step",
            f"raise {_steps_setting(facts)}; otherwise only the evaluation is made",
        )


def _steps_setting(facts: Facts) -> str:
    return "loops.main.num_steps" if facts.spec.trainer.kind == "native" else "trainer.num_steps"


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Settings of a checkpoint that are others now: dotted name, then and now. Newer settings are not in older ones."""
    for key, value in before.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping) and isinstance(now.get(key), Mapping) and name not in _WHOLE:
            yield from _differences(value, now[key], f"{name}.")
        elif now.get(key) != value:
            yield name, value, now.get(key)


def _shown(value: Any, limit: int = 100) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= limit else text[: limit - 3] + "..."
