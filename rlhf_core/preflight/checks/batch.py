"""Arithmetic of batches, steps and schedules."""

from collections.abc import Iterator

from rlhf_core.preflight.facts import Facts
from rlhf_core.preflight.registry import Finding, blocked, check, passed, warning
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
    sequences = [algorithm.sequences_per_step // spec.num_ranks for algorithm in algorithms]
    per_rank = ", ".join(
        f"{count} per {algorithm.name} step" for algorithm, count in zip(algorithms, sequences, strict=True)
    )
    found = f"trainer.micro_batch_size {size}, sequences per rank: {per_rank}"
    largest = max(sequences)
    if size > max(largest, 1):
        yield warning(
            found,
            "a micro-batch no larger than the sequences of a rank in a step",
            f"set trainer.micro_batch_size={max(largest, 1)}; it affects memory, not the result",
        )
    else:
        yield passed(found)


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
            yield _divides(f"loops.{loop}.algorithm.{algorithm.rows_setting}", algorithm.rows_per_step, spec.num_ranks)


def _divides(name: str, value: int, ranks: int) -> Finding:
    if value % ranks == 0:
        return passed(f"{name} {value} over {ranks} ranks: {value // ranks} each")
    below = value - value % ranks
    options = " or ".join(str(option) for option in (below, below + ranks) if option)
    return blocked(
        f"{name} = {value} with {ranks} ranks",
        f"a multiple of {ranks}, the number of trainer ranks",
        f"set {name} to {options}",
    )
