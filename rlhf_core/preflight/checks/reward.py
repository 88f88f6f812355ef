"""Reward models and functions that score completions."""

from collections.abc import Iterator

from rlhf_core.preflight.facts import Facts, RewardModelFolder
from rlhf_core.preflight.missing_paths import folder_advice
from rlhf_core.preflight.registry import Finding, blocked, check, passed, warning
from rlhf_core.preflight.size_estimates import num_positions
from rlhf_core.schemas.scoring_models import ScoringModelSpec
from rlhf_core.text.formatting import size

_EXACT_MATCH = "rlhf_core.training.rewards:exact_match"


@check("reward.models")
def models(facts: Facts) -> Iterator[Finding]:
    """A folder without a trained head gives random rewards; a missing one ends every rank during set-up."""
    settings = facts.spec.reward.models
    if unused := [name for name in settings if name not in facts.spec.scoring_models]:
        yield warning(
            f"reward.models names {', '.join(unused)}, but no completions are sampled",
            "an algorithm that samples, for instance grpo, or evaluate.scorer = reward.models.<name>",
            "remove [reward.models]",
        )
    for name, found in facts.reward_models.items():
        yield _model(f"reward.models.{name}", settings[name], found)


@check("reward.weights", trainer="native")
def weights(facts: Facts) -> Iterator[Finding]:
    """If all weights are 0, every reward is 0: hours of sampling in which nothing is learned."""
    reward = facts.spec.reward
    counted = [*(reward.weights or [1.0] * len(reward.functions)), *(model.weight for model in reward.models.values())]
    learns = any(one.algorithm.samples and not one.algorithm.distils for one in facts.spec.loops.named.values())
    if learns and not any(counted):
        yield blocked(
            "every weight in reward.weights and reward.models is 0",
            "at least one reward that counts",
            "set a weight above 0 for rewards to learn from; weight 0 is for rewards that are only measured",
        )


@check("rollout.stop_strings")
def stop_strings(facts: Facts) -> Iterator[Finding]:
    """A completion ends with its stop string, so it never equals an answer unless that is white space."""
    spec = facts.spec
    shown = [string for string in spec.rollout.stop_strings if string.strip()]
    completes = spec.completes_held_out(pairs_have_answers=facts.pairs_have_answers)
    uses = {
        "reward.functions": spec.any_loop_samples and _EXACT_MATCH in spec.reward.functions,
        "evaluate.scorer": completes and spec.evaluate.scorer == _EXACT_MATCH,
    }
    # An environment's protocol may end only the turns before the answer with one.
    if shown and any(uses.values()) and not spec.rollout.turns.are_used:
        compared = " and ".join(name for name, is_used in uses.items() if is_used)
        yield warning(
            f"rollout.stop_strings = {shown}, and {_EXACT_MATCH} as {compared}, which compares whole completions",
            "a function that finds the answer in a text that ends with a stop string, or stop strings of white space",
            "use a function of your own that removes the stop string, or stop at white space",
        )


def _model(setting: str, settings: ScoringModelSpec, found: RewardModelFolder) -> Finding:
    if found.problem:
        return blocked(
            f"{setting}.path = {settings.path}: {found.problem}",
            "the folder of a sequence classifier with one output, with weights and tokenizer",
            folder_advice(f"{setting}.path", settings.path),
        )
    if settings.template == "chat" and not found.has_chat_template:
        return blocked(
            f'{setting}.template = "chat", but the tokenizer in {found.path} has no chat template',
            "a tokenizer with the chat template that the model was trained with",
            f'set {setting}.template="text", or add its chat template',
        )
    positions = num_positions(found.config)
    if positions is not None and settings.max_tokens > positions:
        return blocked(
            f"{setting}.max_tokens = {settings.max_tokens}, the model has positions for {positions}",
            f"at most {positions}",
            f"set {setting}.max_tokens={positions}, or 0 for all of them",
        )
    return passed(f"{found.path}: {size(found.weight_bytes)} of weights, fingerprint {found.fingerprint}")
