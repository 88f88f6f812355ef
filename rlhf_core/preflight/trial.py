"""Trials that precede a run: the same run on fewer nodes, then on all of them, with a few steps each."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from rlhf_core.schemas.algorithms.policy_gradient import PpoSpec
from rlhf_core.schemas.changes import with_changes
from rlhf_core.schemas.checks import CheckResult, CheckStatus
from rlhf_core.schemas.command_trainer import named_placeholders
from rlhf_core.schemas.run import RunSpec
from rlhf_core.shell.launch_line import read_launch_line

SMALL = 3
"""Largest run that serves as its own trial: the fewest nodes and this many times the steps of a trial."""

PROMPTS = 8
"""Held-out prompts of a trial: enough to see that the evaluation works."""

_NODE_OPTIONS = ("nnodes", "num_machines", "num_nodes")


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


def is_small(spec: RunSpec) -> bool:
    """Return True if a trial would cost about as much as the run."""
    return has_fewest_nodes(spec) and spec.total_steps <= SMALL * spec.preflight.trial_steps


def has_fewest_nodes(spec: RunSpec) -> bool:
    """Return True if no trial could use fewer nodes: one for training, and one for engines if they have nodes."""
    return spec.resources.num_nodes == 1 + bool(spec.rollout.nodes)


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
            "trainer.sequence_parallel": math.gcd(spec.ranks_per_row, num_ranks),
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
