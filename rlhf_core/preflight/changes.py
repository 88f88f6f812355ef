"""Changes since the last good run of the same name, which make a trial due.

Only what can stop a run that used to work, or make it run out of memory, counts: data, algorithm, versions, scale. A
learning rate does not: a trial of a few steps would not show its effect.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_core.preflight.facts import DataFile, Facts, GoodRun
from rlhf_core.schemas.migration import current_document
from rlhf_core.schemas.run import RunSpec

COMMAND_PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "ms-swift",
    "openrlhf",
    "deepspeed",
    "accelerate",
    "peft",
    "vllm",
    "datasets",
    "ray",
)
"""Packages of another program's environment whose versions count."""

WATCHED = (
    "data",
    "model",
    "trainer",
    "reward",
    "evaluate.completions",
    "evaluate.scorer",
    "evaluate.max_new_tokens",
    "loops.main.algorithm",
    "loops.warm_start.algorithm",
    "rollout.engine",
    "rollout.nodes",
    "rollout.max_new_tokens",
    "rollout.turns",
    "rollout.batch_size",
    "resources.num_nodes",
    "resources.ranks_per_node",
    "resources.gpus_per_node",
)
"""Settings, or whole sections, whose change requires a trial."""

_WITHOUT_EFFECT = tuple(
    f"trainer.{name}."
    for name in ("log_samples_every", "num_steps", "artifacts", "progress", "stdout_patterns", "metrics")
)
_OF_THE_USER = (
    "model.config",
    "data.generator_args",
    "data.sources",
    "data.template_args",
    "reward.models",
    "trainer.variables",
)
"""Tables whose keys the user chooses: there, an added or removed key is a change."""
NOTHING = "nothing"
_LONGEST = 60


@dataclass(frozen=True)
class Change:
    """One difference from an earlier run."""

    what: str
    """Dotted name of a setting, or a name of :func:`basis_of`."""
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.what} {self.old} -> {self.new}"


def changes_since(before: GoodRun, spec: RunSpec, basis: Mapping[str, str]) -> list[Change]:
    """List the differences from an earlier run. A setting that only one of the runs has counts as unchanged: another
    version of this program may have had different settings or recorded less."""
    then, now = current_document(before.spec), spec.model_dump(mode="json")
    found = [
        Change(name, _shown(old), _shown(new))
        for watched in WATCHED
        if _pick(then, watched) is not None and _pick(now, watched) is not None
        for name, old, new in _differences(watched, _pick(then, watched), _pick(now, watched))
        if not f"{name}.".startswith(_WITHOUT_EFFECT)
    ]
    warm_started = [_pick(loops, "loops.warm_start.num_steps") or 0 for loops in (then, now)]
    if "warm_start" in (_pick(then, "loops") or {}) and bool(warm_started[0]) != bool(warm_started[1]):
        found.append(Change("loops.warm_start.num_steps", *map(str, warm_started)))
    found += [
        Change(name, before.basis[name], basis[name])
        for name in basis
        if name in before.basis and before.basis[name] != basis[name]
    ]
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Versions, data and code of a run


def basis_of(facts: Facts) -> dict[str, str]:
    """Return versions, rows and code: everything that may change while the config stays the same."""
    found = {f"rows of {name}": _rows(file) for name, file in facts.files.items()}
    found |= {f"reward model {name}": one.fingerprint for name, one in facts.reward_models.items()}
    found["code"] = facts.code_hash or "none"
    found["rlhf-flows"] = facts.control_version
    names = COMMAND_PACKAGES if facts.trainer is not None else [requirement.name for requirement in facts.requirements]
    for name in names:
        found[name] = facts.training_packages.get(name, "")
    return {name: value for name, value in found.items() if value}


def basis_text(basis: Mapping[str, str]) -> str:
    """Format the basis as one line, for the user and for :func:`read_basis`."""
    return "; ".join(f"{name} = {value}" for name, value in basis.items())


def read_basis(text: str) -> dict[str, str]:
    """Parse the basis that :func:`basis_text` wrote."""
    pairs = (part.partition(" = ") for part in text.split("; "))
    return {name: value for name, sign, value in pairs if sign}


def _rows(file: DataFile) -> str:
    if file.problem or not file.scanned:
        return ""
    prompts = hashlib.blake2b(b"".join(sorted(file.prompt_hashes)), digest_size=4).hexdigest()
    return f"{file.num_rows}, prompts {prompts}"


# ---------------------------------------------------------------------------------------------------------------------
# Differences


def _pick(spec: Mapping[str, Any], name: str) -> Any:
    """Return a section or setting of a spec as JSON; None if it has none."""
    found: Any = spec
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _differences(name: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys([*old, *new]):
            if name in _OF_THE_USER or (key in old and key in new):
                yield from _differences(f"{name}.{key}", old.get(key, NOTHING), new.get(key, NOTHING))
    elif old != new:
        yield name, old, new


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) and value else json.dumps(value)
    return text if len(text) <= _LONGEST else f"...{text[-_LONGEST:]}"
