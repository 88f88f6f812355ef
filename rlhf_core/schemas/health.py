"""Settings of the health rules of training."""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_core.schemas.base import Positive, PositiveFloat, Schema, UnitInterval

HealthRule = Literal[
    "identical",
    "frozen",
    "reward_collapse",
    "no_spread",
    "truncated",
    "entropy_collapse",
    "clipped",
    "train_gap",
    "kl",
    "length",
]
"""Rules that judge training while it runs (``rlhf_core/diagnosis/health/rules.py``), most specific first. For external
trainers: ``frozen``, ``no_spread``, ``truncated`` and ``kl`` (``rlhf_core/diagnosis/health/metric_judge.py``)."""


HealthAction = Literal["warn", "stop", "roll_back"]
"""Consequence of a finding."""


UNINTENDED: frozenset[HealthRule] = frozenset({"clipped", "train_gap", "kl", "length"})
"""Rules whose findings mean that training learns something unintended, not that it learns nothing: they only warn by
default."""


class HealthSpec(Schema):
    """Judgement of training. A run that learns nothing is rolled back once to an older checkpoint, then stopped; one
    that merely looks wrong gets a warning."""

    off: dict[HealthRule, str] = {}
    """Rules to turn off: `identical`, `frozen`, `reward_collapse`, `no_spread`, `truncated`, `entropy_collapse`,
    `clipped`, `train_gap`, `kl` or `length`, each with the reason, which is stored with the run."""
    actions: dict[HealthRule, HealthAction] = {}
    """Response of each rule: `warn` (an incident that does not stop the run), `stop` the run, or `roll_back` (resume
    once from an older checkpoint, then stop). By default, `clipped`, `train_gap`, `kl` and `length` warn and the others
    roll back. With external trainers, all rules only warn."""
    window_steps: Positive = 20
    """Steps over which reward, spread, entropy and truncation are judged. Healthy runs have dips of a few steps; a dip
    of twenty steps does not recover."""
    frozen_steps: Positive = 5
    """Consecutive steps without a gradient although rewards differ, or without any change of the weights at a tenth or
    more of the peak learning rate, after which training is ended. One may be rounding; after five, nothing is being
    learned."""
    min_completions: Positive = 4096
    """Completions without any difference in reward before this counts. By then, a task that is solved once in a
    thousand times has been solved with a probability above 98 %."""
    identical_chance: Annotated[float, Field(gt=0, lt=1)] = 1e-9
    """Probability, estimated from the policy's entropy, below which identical completions are not chance. No run has a
    billion steps, and a policy that is certain of its answers may repeat them."""
    collapsed_share: UnitInterval = 0.2
    """Share of the best reward, above the lowest reward seen, at or below which the reward has collapsed. Healthy runs
    sometimes lose half and recover."""
    entropy_share: UnitInterval = 0.01
    """Share of the initial entropy below which exploration has ended, if the reward has not risen. A policy that learns
    also loses entropy, but gains reward."""
    truncated_share: UnitInterval = 0.99
    """Share of truncated completions (`rollout.max_new_tokens`) from which, without any reward, no completion is
    considered to finish. A few finished ones are enough to learn from."""
    max_kl: PositiveFloat = 10.0
    """Divergence from the reference model, in nats per token, above which the model has moved too far. Healthy runs
    stay below 1; at 10, likely tokens have a probability of 1 in 20,000."""
    max_train_gap: PositiveFloat = 0.1
    """Mean difference between the log-probabilities of tokens at sampling and in training, in nats, above which the two
    differ in their model. bfloat16 causes 0.01; at 0.1, every token's gradient is off by a tenth."""
    clipped_share: UnitInterval = 0.9
    """Share of tokens with a clipped gradient above which nothing remains to learn. Healthy runs stay below a third."""
    length_correlation: UnitInterval = 0.8
    """Correlation of reward and length among the completions of a prompt above which the reward mainly measures length.
    For a reward for correct answers, it is between -0.5 and 0.5."""
    length_rise: PositiveFloat = 0.25
    """Relative rise of the mean length that chance and the form of the answer do not explain."""

    def action(self, rule: HealthRule) -> HealthAction:
        """Consequence of a finding of this rule."""
        return self.actions.get(rule, "warn" if rule in UNINTENDED else "roll_back")
