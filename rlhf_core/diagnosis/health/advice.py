"""Usual causes of the findings of the health rules, and their remedies."""

from collections.abc import Mapping
from typing import NamedTuple


class Advice(NamedTuple):
    """Both as phrases without a full stop."""

    causes: str
    remedy: str


_SEEDS = Advice(
    "a formula for seeds that repeats itself in this layout, as those do that derive seeds from a rank, a replica, a "
    "batch or a variable of the node",
    "derive the seed of each completion from the step, the prompt and the sample, as "
    "`rlhf_core.training.rollouts.seeds.sample_seed` does",
)

_CUT_OFF = Advice(
    "a limit below the length of an answer, or a model that does not emit its end token",
    "raise rollout.max_new_tokens; if completions go on after their answer, check the chat template (data.chat) "
    "or set rollout.stop_strings",
)

ADVICE: Mapping[str, Advice] = {
    "identical/within groups": Advice(
        "one sampling seed for all completions of a prompt, or a sampler that ignores the seed or takes the most "
        "likely token",
        "find out which seed and temperature the sampler of these ranks really uses, and derive each seed from the "
        "step, the prompt and the sample",
    ),
    "identical/across ranks": Advice(
        "ranks that read the same rows, or seeds from a number that ranks of several nodes have in common, such as the "
        "local rank",
        "compare the prompts of these ranks: if they differ, derive each seed from the step, the prompt and the "
        "sample; otherwise repair the distribution of the rows",
    ),
    "identical/across steps": Advice(
        "rows that are the same at every step, or seeds that do not contain the step",
        "compare the prompts of two steps: if they differ, put the step into the seeds; otherwise check the number "
        "and the order of the rows",
    ),
    "identical/seeds within groups": _SEEDS,
    "identical/seeds across prompts": _SEEDS,
    "identical/seeds across steps": _SEEDS,
    "frozen/no gradient": Advice(
        "trained weights that the loss does not reach (requires_grad, a detached tensor in a loss of your own), or a "
        "number format that rounds the gradient to zero",
        "check what is trained (model.lora) and the changes to the loss, and try float32 weights (model.dtype)",
    ),
    "frozen/no change": Advice(
        "a learning rate so low that the number format of the weights rounds every change to zero",
        "raise the learning rate of this loop (optimizer.learning_rate), or train float32 weights (model.dtype)",
    ),
    "frozen/all cut off": _CUT_OFF,
    "reward_collapse": Advice(
        "updates so large that the model lost what it had learned, or a reward function that has begun to score "
        "everything low",
        "read completions from before and after: if they became worse, try a lower "
        "loops.main.optimizer.learning_rate or a KL penalty (loops.main.algorithm.kl_coefficient); otherwise repair "
        "the reward function",
    ),
    "no_spread": Advice(
        "a task that the model never solves, a reward function that does not recognise right answers, or a learning "
        "rate that has destroyed the model",
        "read some completions: if right answers are not rewarded, repair the reward function; if none is right, use "
        "easier prompts or a warm start (loops.warm_start); if they are no language any more, lower "
        "loops.main.optimizer.learning_rate",
    ),
    "truncated": _CUT_OFF,
    "entropy_collapse": Advice(
        "large updates towards the few answers that were rewarded, or a clip that keeps unlikely tokens unlikely",
        "try a lower loops.main.optimizer.learning_rate, a higher loops.main.algorithm.clip_high, a KL penalty "
        "(loops.main.algorithm.kl_coefficient) or an entropy bonus (loops.main.algorithm.entropy_coefficient)",
    ),
    "clipped": Advice(
        "large updates, many updates with the same completions, or old log-probabilities of another policy",
        "try a lower loops.main.optimizer.learning_rate or fewer updates a step (num_epochs, num_minibatches), and "
        "check that the old log-probabilities come from the sampling policy. Healthy runs clip less than a third",
    ),
    "train_gap": Advice(
        "a sampler with other weights, another number format or another temperature than the trainer",
        "make them equal, or correct for the difference (loops.main.algorithm.correction). About 0.01 is usual",
    ),
    "kl": Advice(
        "large updates, or a KL penalty too weak to hold the model near the reference",
        "try a higher loops.main.algorithm.kl_coefficient or a lower loops.main.optimizer.learning_rate. Healthy runs "
        "stay under 1",
    ),
    "kl/not finite": Advice(
        "log-probabilities of the policy or of the reference model that overflow",
        "compare the two, and try float32 weights (model.dtype)",
    ),
    "length": Advice(
        "a reward that counts length, or a reward model that prefers long answers",
        "read some long completions, and remove the length from the reward or penalise it there",
    ),
}
"""Advice by rule, or by rule and kind (``HealthFinding.key``)."""
