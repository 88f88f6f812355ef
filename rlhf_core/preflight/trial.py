"""Decision on a small trial run: changes since the last good run of the same name.

Only what can stop a run that used to work, or make it run out of memory, counts: data, algorithm, versions, scale. A
learning rate does not: a trial of a few steps would not show its effect.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue

from rlhf_core.preflight.facts import DataFile, Facts, GoodRun
from rlhf_core.schemas.algorithms.policy_gradient import PpoSpec
from rlhf_core.schemas.changes import with_changes
from rlhf_core.schemas.checks import CheckResult, CheckStatus
from rlhf_core.schemas.command_trainer import named_placeholders
from rlhf_core.schemas.migration import current_document
from rlhf_core.schemas.run import RunSpec
from rlhf_core.shell.launch_line import read_launch_line

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

SMALL = 3
"""Largest run that serves as its own trial: the fewest nodes and this many times the steps of a trial."""

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
_OF_THE_USER = ("model.config", "data.generator_args", "data.template_args", "reward.models", "trainer.variables")
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


def is_small(spec: RunSpec) -> bool:
    """Return True if a trial would cost about as much as the run."""
    return has_fewest_nodes(spec) and spec.total_steps <= SMALL * spec.preflight.trial_steps


def has_fewest_nodes(spec: RunSpec) -> bool:
    """Return True if no trial could use fewer nodes: one for training, and one for engines if they have nodes."""
    return spec.resources.num_nodes == 1 + bool(spec.rollout.nodes)


# ---------------------------------------------------------------------------------------------------------------------
# Versions, data and code of a run


def basis_of(facts: Facts) -> dict[str, str]:
    """Return versions, rows and code: everything that may change while the config stays the same."""
    found = {f"rows of {name}": _rows(file) for name, file in (("data.train", facts.train), ("data.eval", facts.eval))}
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


def _rows(file: DataFile | None) -> str:
    if file is None or file.problem or not file.scanned:
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


# ---------------------------------------------------------------------------------------------------------------------
# The ladder

_NODE_OPTIONS = ("nnodes", "num_machines", "num_nodes")

PROMPTS = 8
"""Held-out prompts of a trial: enough to see that the evaluation works."""


@dataclass(frozen=True)
class Rung:
    """One trial of the ladder."""

    check_id: str
    """Id of the check that reports its result."""
    num_nodes: int
    engine_nodes: int = 0
    """Nodes among them that have only rollout engines."""

    @property
    def title(self) -> str:
        """Display name."""
        return f"trial on {self.nodes}"

    @property
    def nodes(self) -> str:
        """Its nodes as text."""
        if self.check_id == "trial.all_nodes":
            return "one node" if self.num_nodes == 1 else f"all {self.num_nodes} nodes"
        return "one node for training and one for engines" if self.engine_nodes else "one node"


def rungs(spec: RunSpec) -> tuple[Rung, ...]:
    """Return the trials of a run, in order; only one with the fewest nodes."""
    whole = Rung("trial.all_nodes", spec.resources.num_nodes, spec.rollout.nodes)
    if has_fewest_nodes(spec):
        return (whole,)
    beside = min(1, spec.rollout.nodes)
    return (Rung("trial.one_node", 1 + beside, beside), whole)


def is_due(spec: RunSpec, results: Sequence[CheckResult]) -> bool:
    """Return True if the trials are to be run, according to the finding of the check ``trial.needed``."""
    is_needed = any(result.id == "trial.needed" and result.status is CheckStatus.WARNING for result in results)
    return is_needed and spec.preflight.trial == "run"


def trial_spec(spec: RunSpec, rung: Rung) -> RunSpec:
    """Reduce a run: few steps and prompts, one checkpoint, on the nodes of a rung.

    Batches are unchanged, so a step needs the same memory, and still divide over the ranks: the ranks of one node are a
    divisor of those of all nodes.
    """
    steps, evaluate = spec.preflight.trial_steps, spec.evaluate
    changes: dict[str, JsonValue] = {
        "resources.num_nodes": rung.num_nodes,
        "resources.min_nodes": 0,
        # As many engines on each of its nodes.
        "rollout.nodes": rung.engine_nodes,
        "rollout.engines": _engines(spec, rung),
        "evaluate.num_prompts": min(evaluate.num_prompts or PROMPTS, PROMPTS),
        "preflight.trial": "off",
        "preflight.off": {
            **spec.preflight.off,
            "steps.checkpoints": "a trial saves only once, at its end",
            "steps.learning_rate_warmup": "a trial starts like its run",
        },
    }
    if spec.trainer.kind == "command":
        num_steps = min(spec.total_steps, steps)
        return with_changes(spec, {**changes, "trainer.num_steps": num_steps, "checkpoint.every_num_steps": num_steps})
    of_loops = {name: min(loop.num_steps, steps) for name, loop in spec.loops.named.items()}
    num_ranks = (rung.num_nodes - rung.engine_nodes) * spec.resources.ranks_per_node
    return with_changes(
        spec,
        {
            **changes,
            **{f"loops.{name}.num_steps": number for name, number in of_loops.items()},
            **_shorter_warmups(spec, of_loops),
            "rollout.sync.senders": min(spec.rollout.sync.senders, num_ranks),
            # Intermediate evaluations may fail too, so one is made.
            "evaluate.every_num_steps": min(evaluate.every_num_steps, of_loops["main"]),
            "checkpoint.every_num_steps": sum(of_loops.values()),
            "checkpoint.keep_best": False,  # its evaluation falls on no checkpoint
        },
    )


def _shorter_warmups(spec: RunSpec, of_loops: Mapping[str, int]) -> dict[str, JsonValue]:
    """Let the policy learn too, if its steps begin only after those of a trial."""
    algorithms = {name: loop.algorithm for name, loop in spec.loops.named.items()}
    return {
        f"loops.{name}.algorithm.critic_warmup_steps": min(one.critic_warmup_steps, of_loops[name] - 1)
        for name, one in algorithms.items()
        if isinstance(one, PpoSpec)
    }


def _engines(spec: RunSpec, rung: Rung) -> int:
    if rung.num_nodes == spec.resources.num_nodes:
        return spec.rollout.engines
    return spec.engines_per_node * max(1, rung.engine_nodes)


def obstacle(spec: RunSpec) -> str:
    """Reason why no trial of a run can be made; empty if one can.

    An external trainer makes fewer steps on fewer nodes only if its launch line has placeholders for both, and its
    files must be separate from those of the run.
    """
    if spec.trainer.kind == "native":
        return ""
    trainer = spec.command_trainer
    texts = (*trainer.argv, *trainer.variables.values())
    named = {name for text in texts for name in named_placeholders(text)}
    if "num_steps" not in named:
        return "trainer.argv lacks {num_steps}: a trial would train to the end"
    if not {"run_dir", "run_id"} & set(named_placeholders(trainer.output_dir)):
        return f"trainer.output_dir = {trainer.output_dir} is also that of the run"
    options = read_launch_line(trainer.argv).launcher_options
    fixed = [name for name in _NODE_OPTIONS if "{num_nodes}" not in options.get(name, "{num_nodes}")]
    if spec.resources.num_nodes > 1 and fixed:
        return f"trainer.argv has a fixed --{fixed[0]}, but a trial starts on one node"
    return ""
