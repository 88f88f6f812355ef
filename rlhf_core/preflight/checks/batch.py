"""Arithmetic of batches, steps and schedules."""

import math
from collections.abc import Iterator

from rlhf_core.preflight.facts import Facts
from rlhf_core.preflight.registry import Finding, blocked, check, passed, warning
from rlhf_core.run_dir.initial_model import num_heads, unshareable_part
from rlhf_core.schemas.run import RunSpec

MAX_LEARNING_RATE = 0.1
"""Learning rate above which a finding is reported: AdamW moves every weight by about as much in a step, and models are
trained with a tenth of it at most."""


@check("batch.prompts_divide_ranks", trainer="native")
def prompts_divide_ranks(facts: Facts) -> Iterator[Finding]:
    """Ranks with different numbers of prompts would wait for each other forever in the first collective."""
    yield from _loops_divide(facts.spec, samples=True)


@check("batch.rows_divide_ranks", trainer="native")
def rows_divide_ranks(facts: Facts) -> Iterator[Finding]:
    """In supervised training, too, ranks with different numbers of rows wait for each other forever."""
    yield from _loops_divide(facts.spec, samples=False)


@check("batch.micro_batch", trainer="native")
def micro_batch(facts: Facts) -> Iterator[Finding]:
    """A micro-batch that is never full hides how much memory a step really needs."""
    spec, size = facts.spec, facts.spec.native_trainer.micro_batch_size
    algorithms = [loop.algorithm for loop in spec.loops.named.values()]
    sequences = [algorithm.sequences_per_step // spec.num_replicas for algorithm in algorithms]
    per_rank = ", ".join(
        f"{count} per {algorithm.name} step" for algorithm, count in zip(algorithms, sequences, strict=True)
    )
    ranks = f"{spec.ranks_per_row} ranks that share them" if spec.ranks_per_row > 1 else "rank"
    found = f"trainer.micro_batch_size {size}, sequences per {ranks}: {per_rank}"
    largest = max(sequences)
    if size > max(largest, 1):
        yield warning(
            found,
            "a micro-batch no larger than the sequences of a rank in a step",
            f"set trainer.micro_batch_size={max(largest, 1)}; it affects memory, not the result",
        )
    else:
        yield passed(found)


@check("batch.sequence_parallel", trainer="native")
def sequence_parallel(facts: Facts) -> Iterator[Finding]:
    """Ranks that cannot share sequences evenly end during setup, after the queue; across nodes they are slow."""
    spec, config, size = facts.spec, facts.model_config, facts.spec.ranks_per_row
    if size == 1:
        return
    found, heads = f"trainer.sequence_parallel = {size}", num_heads(config)
    per_node = spec.resources.ranks_per_node
    common = math.gcd(per_node, heads or per_node)
    numbers = " or ".join(str(number) for number in range(1, common + 1) if common % number == 0)
    if spec.num_ranks % size:
        yield blocked(f"{found} with {spec.num_ranks} ranks", "a divisor of the number of ranks", _set_it(numbers))
    elif heads is not None and heads % size:
        yield blocked(f"{found}, {heads} attention heads", "a divisor of the number of heads", _set_it(numbers))
    elif how := unshareable_part(config):
        yield blocked(
            f"{found}, a model with {how}",
            "layers that mix tokens by full attention alone, which ranks can share by heads",
            _set_it("1"),
        )
    elif per_node % size:
        yield warning(
            f"{found} with {per_node} ranks per node: ranks of different nodes exchange states in every layer",
            "a divisor of resources.ranks_per_node",
            _set_it(numbers),
        )
    else:
        yield passed(f"{found}: {spec.num_replicas} x {size} ranks, each with 1/{size} of the tokens of its sequences")


def _set_it(numbers: str) -> str:
    return f"set trainer.sequence_parallel to {numbers}"


@check("steps.warm_start", trainer="native")
def warm_start(facts: Facts) -> Iterator[Finding]:
    """A warm start with the main loop's algorithm is the same loop twice with two learning rates."""
    before, main = facts.spec.loops.warm_start, facts.spec.main_loop
    if before is not None and before.algorithm.name == main.algorithm.name:
        yield blocked(
            f'loops.warm_start.num_steps = {before.num_steps} and both loops use "{main.algorithm.name}"',
            "a warm start with a different algorithm, or none",
            "set loops.warm_start.num_steps=0 and loops.main.num_steps to the total number of steps",
        )
    if before is not None and before.algorithm.ranks_completions:
        yield blocked(
            f'loops.warm_start.algorithm.name = "{before.algorithm.name}", which trains a model that generates no text',
            "a warm start that produces a language model",
            "train the reward model in a separate run, as the main algorithm",
        )


@check("steps.learning_rate", trainer="native")
def learning_rate(facts: Facts) -> Iterator[Finding]:
    """A learning rate without its minus, 1e6 for 1e-6, destroys the model in the first step."""
    for name, loop in facts.spec.loops.named.items():
        if loop.optimizer.learning_rate > MAX_LEARNING_RATE:
            yield warning(
                f"loops.{name}.optimizer.learning_rate = {loop.optimizer.learning_rate:g}",
                f"at most {MAX_LEARNING_RATE:g}: AdamW moves every weight by about as much in a step",
                f"lower loops.{name}.optimizer.learning_rate; perhaps the minus of its exponent is missing, as in 1e-6",
            )


@check("steps.learning_rate_warmup", trainer="native")
def learning_rate_warmup(facts: Facts) -> Iterator[Finding]:
    """If the warm-up is as long as the training, the peak learning rate is never reached."""
    # The warm start is not checked: it may deliberately end while its rate still rises.
    loop = facts.spec.main_loop
    warmup, skipped = loop.optimizer.warmup_steps, loop.algorithm.steps_before_policy
    steps = loop.num_steps - skipped
    if 0 < steps <= warmup:  # without a step for the policy, algorithm.critic_warmup blocks
        before = f", of which {skipped} train the value model alone" if skipped else ""
        yield warning(
            f"loops.main.optimizer.warmup_steps = {warmup}, loops.main.num_steps = {loop.num_steps}{before}",
            "a warm-up shorter than the training",
            f"set loops.main.optimizer.warmup_steps to at most {steps // 10}",
        )


@check("steps.checkpoints")
def checkpoints(facts: Facts) -> Iterator[Finding]:
    """Without an intermediate checkpoint, a failure in the last step costs the whole run."""
    every, total = facts.spec.checkpoint.every_num_steps, facts.spec.total_steps
    if every >= total > 1:
        yield warning(
            f"checkpoint.every_num_steps = {every}, {total} steps in total",
            "at least one checkpoint before the last step",
            f"set checkpoint.every_num_steps to about {max(total // 10, 1)}",
        )
    else:
        yield passed(f"a checkpoint every {every} of {total} steps")


def _loops_divide(spec: RunSpec, *, samples: bool) -> Iterator[Finding]:
    for loop, found in spec.loops.named.items():
        algorithm = found.algorithm
        if algorithm.samples is samples:
            name = f"loops.{loop}.algorithm.{algorithm.rows_setting}"
            # Every rank samples for itself; without sampling, the ranks that share sequences have the same rows.
            if samples or spec.ranks_per_row == 1:
                yield _divides(name, algorithm.rows_per_step, spec.num_ranks, "ranks")
            else:
                yield _divides(name, algorithm.rows_per_step, spec.num_replicas, f"x {spec.ranks_per_row} ranks")


def _divides(name: str, value: int, parts: int, ranks: str) -> Finding:
    if value % parts == 0:
        return passed(f"{name} {value} over {parts} {ranks}: {value // parts} each")
    below = value - value % parts
    options = " or ".join(str(option) for option in (below, below + parts) if option)
    return blocked(
        f"{name} = {value} with {parts} {ranks}",
        f"a multiple of {parts}, the number of trainer ranks" + ("" if ranks == "ranks" else " with their own rows"),
        f"set {name} to {options}",
    )
