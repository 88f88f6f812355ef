"""Conflicting settings of algorithms."""

from collections.abc import Iterator, Mapping

from rlhf_core.preflight.facts import Facts
from rlhf_core.preflight.registry import Finding, blocked, check, passed, warning
from rlhf_core.schemas.algorithms.policy_gradient import DapoSpec, PolicyGradientSpec, PpoSpec


@check("algorithm.minibatches", trainer="native")
def minibatches(facts: Facts) -> Iterator[Finding]:
    """A rank without a completion in an update waits idly for the others."""
    ranks = facts.spec.num_replicas
    for loop, algorithm in _sampling(facts).items():
        per_rank = algorithm.sequences_per_step // ranks
        name = f"loops.{loop}.algorithm.num_minibatches"
        found = f"{name} = {algorithm.num_minibatches}, completions per rank and step: {per_rank}"
        if algorithm.num_minibatches > per_rank:
            yield blocked(
                found,
                "at least one completion per rank in every mini-batch",
                f"set {name} to at most {max(per_rank, 1)}, or raise loops.{loop}.algorithm.prompts_per_step",
            )
        else:
            yield passed(found)


@check("algorithm.clip", trainer="native")
def clip(facts: Facts) -> Iterator[Finding]:
    """Several updates on the same completions, with no bound on the ratio, move far away from the sampling policy."""
    for loop, algorithm in _sampling(facts).items():
        if algorithm.updates_per_step > 1 and not algorithm.clip_low and not algorithm.clip_high:
            yield blocked(
                f"loops.{loop}.algorithm: clip_low = clip_high = 0 with {algorithm.updates_per_step} updates per step",
                "a clipping range above 0: after the first update, the probability ratio differs from 1",
                f"set loops.{loop}.algorithm.clip_high=0.2, for instance, or make one update per step",
            )


@check("algorithm.dual_clip", trainer="native")
def dual_clip(facts: Facts) -> Iterator[Finding]:
    """With one update per step, the probability ratio is always 1: there is nothing to clip."""
    for loop, algorithm in _sampling(facts).items():
        if algorithm.dual_clip and algorithm.updates_per_step == 1:
            yield warning(
                f"loops.{loop}.algorithm: dual_clip = {algorithm.dual_clip} with one update per step",
                "several updates per step, without which the probability ratio is always 1",
                f"set loops.{loop}.algorithm.num_epochs or num_minibatches to 2 or more, or remove dual_clip",
            )


@check("algorithm.kl_estimator", trainer="native")
def kl_estimator(facts: Facts) -> Iterator[Finding]:
    """A k1 penalty in the loss has an expected gradient of zero: it adds noise and restrains nothing."""
    for loop, algorithm in _sampling(facts).items():
        in_loss = algorithm.kl_coefficient > 0 and not algorithm.penalises_rewards
        if in_loss and algorithm.kl_estimator == "k1":
            name = f"loops.{loop}.algorithm.kl_estimator"
            yield warning(f'{name} = "k1" in the loss', '"k2" or "k3" for a penalty in the loss', f"set {name}=k2")


@check("algorithm.overlong_buffer", trainer="native")
def overlong_buffer(facts: Facts) -> Iterator[Finding]:
    """A buffer longer than the longest completion penalises completions of every length."""
    longest = facts.spec.rollout.max_new_tokens
    for loop, algorithm in _sampling(facts).items():
        if isinstance(algorithm, DapoSpec) and algorithm.overlong_buffer >= longest:
            name = f"loops.{loop}.algorithm.overlong_buffer"
            yield blocked(
                f"{name} = {algorithm.overlong_buffer}, rollout.max_new_tokens = {longest}",
                "a buffer shorter than the longest completion",
                f"set {name} to about {longest // 5}",
            )


@check("algorithm.critic_warmup", trainer="native")
def critic_warmup(facts: Facts) -> Iterator[Finding]:
    """If the value model warms up for the whole loop, the policy learns nothing."""
    for loop, algorithm in _sampling(facts).items():
        steps = facts.spec.loops.named[loop].num_steps
        if isinstance(algorithm, PpoSpec) and algorithm.critic_warmup_steps >= steps:
            name = f"loops.{loop}.algorithm.critic_warmup_steps"
            yield blocked(
                f"{name} = {algorithm.critic_warmup_steps}, loops.{loop}.num_steps = {steps}",
                "a warm-up shorter than the loop",
                f"set {name} to at most {steps // 10}",
            )


def _sampling(facts: Facts) -> Mapping[str, PolicyGradientSpec]:
    """Settings of the algorithms that sample, by loop."""
    named = facts.spec.loops.named
    return {name: loop.algorithm for name, loop in named.items() if isinstance(loop.algorithm, PolicyGradientSpec)}
