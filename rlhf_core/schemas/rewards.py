"""Settings of the reward of a completion."""

from typing import Literal, Self

from pydantic import model_validator

from rlhf_core.schemas.base import Finite, ImportPath, NonNegativeSeconds, Schema, UnitInterval
from rlhf_core.schemas.scoring_models import ModelName, ScoringModelSpec

REWARD_METRICS = frozenset(
    {"mean", "std", "max", "min", "failed_share", "cut_share", "length_correlation", "length_slope"}
)
"""Metrics of all rewards together."""

COMPARE_ANSWERS = frozenset({"rlhf_core.training.rewards:exact_match", "rlhf_core.training.rewards:gsm8k_answer"})
"""Reward functions that compare completions with reference answers."""

ENVIRONMENT_REWARD = "rlhf_core.training.rewards:environment_reward"
"""Reward function that returns the reward by the environment of a rollout (``rollout.turns``)."""


class RewardSpec(Schema):
    """Rewards of completions: functions and models, with their weights."""

    functions: tuple[ImportPath, ...] = ("rlhf_core.training.rewards:exact_match",)
    """Reward functions as `module:function`; called as `function(prompts=, completions=, answer=, **columns)`, each
    returning one number per completion, or None for one that it does not judge. They are added to `reward.models`; give
    an empty list to use only reward models."""
    weights: tuple[Finite, ...] = ()
    """Weight of each function in the sum; empty for 1 each. A function with weight 0 is only measured."""
    conversations: Literal["text", "messages"] = "text"
    """Form in which functions, `evaluate.scorer` included, are given rows that are conversations: `text`, the rendered
    prompt and the text of the completion; or `messages`, both as lists of messages, as trainers of TRL do."""
    models: dict[ModelName, ScoringModelSpec] = {}
    """Reward models by name, each a table `[reward.models.<name>]` with the settings below."""
    timeout_s: NonNegativeSeconds = 180.0
    """Time limit of one call of a function, for all completions of a rank in one step, in seconds. Functions run in a
    process beside each rank; a call that takes longer is killed along with all processes it started. 0 calls them in
    the trainer's own process without a limit, where a hang or a crash affects the rank."""
    on_failure: Literal["stop", "zero"] = "stop"
    """Response to a function that raises an error, crashes, times out or returns no number for a completion: `stop` the
    run with an error that names the completion, or score the completion as `zero`, warn and continue."""
    max_failed_share: UnitInterval = 0.1
    """Share of a rank's completions in one step that may be scored as zero; more than that stops the run. One is always
    allowed."""

    @model_validator(mode="after")
    def _same_length(self) -> Self:
        if not self.functions and not self.models:
            raise ValueError(
                "found neither reward.functions nor reward.models; give at least one module:function, or a "
                "reward model as [reward.models.<name>]"
            )
        if self.weights and len(self.weights) != len(self.functions):
            raise ValueError(
                f"found {len(self.weights)} reward.weights for {len(self.functions)} reward.functions; "
                f"give one each, or none"
            )
        return self

    @model_validator(mode="after")
    def _metrics_have_one_meaning(self) -> Self:
        taken = REWARD_METRICS | {function.partition(":")[2] for function in self.functions}
        for name in self.models:
            if name in taken:
                raise ValueError(
                    f"found reward.models.{name}, but reward/{name} is another metric; choose another name"
                )
        return self
