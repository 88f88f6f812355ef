"""Arithmetic of batches, steps and schedules."""

from collections.abc import Iterator

from rlhf_core.preflight.facts import Facts
from rlhf_core.preflight.registry import Finding, blocked, check, passed, warning


@check("batch.prompts_divide_ranks")
def prompts_divide_ranks(facts: Facts) -> Iterator[Finding]:
    """Ranks with different numbers of prompts would wait for each other forever in the first collective."""
    if facts.spec.train.algorithm == "grpo":
        yield _divides("grpo.prompts_per_step", facts.spec.grpo.prompts_per_step, facts.spec.num_ranks)


@check("batch.rows_divide_ranks")
def rows_divide_ranks(facts: Facts) -> Iterator[Finding]:
    """Ranks with different numbers of rows wait for each other forever in supervised training, too."""
    if facts.spec.sft.num_steps or facts.spec.train.algorithm == "sft":
        yield _divides("sft.batch_size", facts.spec.sft.batch_size, facts.spec.num_ranks)


@check("batch.micro_batch")
def micro_batch(facts: Facts) -> Iterator[Finding]:
    """A micro-batch that is never filled hides a wrong idea of the memory a step needs."""
    spec, size = facts.spec, facts.spec.train.micro_batch_size
    sequences = {}
    if spec.sft.num_steps or spec.train.algorithm == "sft":
        sequences["sft"] = spec.sft.batch_size // spec.num_ranks
    if spec.train.algorithm == "grpo":
        sequences["grpo"] = spec.grpo.prompts_per_step * spec.grpo.samples_per_prompt // spec.num_ranks
    per_rank = ", ".join(f"{count} per {loop} step" for loop, count in sequences.items())
    found = f"train.micro_batch_size {size}, sequences on a rank: {per_rank}"
    largest = max(sequences.values())
    if size > max(largest, 1):
        yield warning(
            found,
            "a micro-batch no larger than what a rank has in a step",
            f"set train.micro_batch_size={max(largest, 1)}; the result does not depend on it, the memory does",
        )
    else:
        yield passed(found)


@check("steps.warm_start")
def warm_start(facts: Facts) -> Iterator[Finding]:
    """A supervised warm start before supervised training is the same loop twice, with two learning rates."""
    if facts.spec.train.algorithm == "sft" and facts.spec.sft.num_steps:
        yield blocked(
            f'sft.num_steps = {facts.spec.sft.num_steps} with train.algorithm = "sft"',
            "sft.num_steps = 0 when the main algorithm is itself supervised",
            "set sft.num_steps=0 and train.num_steps to all steps wanted",
        )


@check("steps.learning_rate_warmup")
def learning_rate_warmup(facts: Facts) -> Iterator[Finding]:
    """With a warm-up as long as the training the peak learning rate is never reached."""
    # The warm start is left alone: it may end while its rate still rises, on purpose.
    warmup, steps = facts.spec.train.warmup_steps, facts.spec.train.num_steps
    if warmup and warmup >= steps:
        yield warning(
            f"train.warmup_steps = {warmup}, train.num_steps = {steps}",
            "a warm-up shorter than the training",
            f"set train.warmup_steps to at most {steps // 10}",
        )


@check("optimizer.betas")
def betas(facts: Facts) -> Iterator[Finding]:
    """A decay of exactly 1 never forgets its zero start: AdamW divides by zero in its first step."""
    for section, optimizer in (("train", facts.spec.train), ("sft", facts.spec.sft)):
        for name in ("adam_beta1", "adam_beta2"):
            if getattr(optimizer, name) >= 1:
                yield blocked(
                    f"{section}.{name} = 1", "a number below 1", f"set {section}.{name}, for instance, to 0.95"
                )


@check("steps.checkpoints")
def checkpoints(facts: Facts) -> Iterator[Finding]:
    """Without a checkpoint on the way, a failure in the last step costs the whole run."""
    every, total = facts.spec.checkpoint.every_num_steps, facts.spec.total_steps
    if every >= total > 1:
        yield warning(
            f"checkpoint.every_num_steps = {every}, {total} steps in all",
            "at least one checkpoint before the last step",
            f"set checkpoint.every_num_steps to {max(total // 10, 1)} or so",
        )
    else:
        yield passed(f"a checkpoint every {every} of {total} steps")


def _divides(name: str, value: int, ranks: int) -> Finding:
    if value % ranks == 0:
        return passed(f"{name} {value} over {ranks} ranks: {value // ranks} each")
    below = value - value % ranks
    options = " or ".join(str(option) for option in (below, below + ranks) if option)
    return blocked(
        f"{name} = {value} with {ranks} ranks",
        f"a multiple of {ranks} (resources.num_nodes x resources.ranks_per_node)",
        f"set {name} to {options}",
    )
