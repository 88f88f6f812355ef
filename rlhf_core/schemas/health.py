"""Settings of the judge of training."""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_core.schemas.base import Positive, PositiveFloat, Schema, Share

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
"""Rules that judge training while it runs (``rlhf_core/training/health_rules.py``), the most telling first. Of another
program ``frozen``, ``no_spread``, ``truncated`` and ``kl`` are judged (``rlhf_core/worker/command/health.py``)."""


HealthAction = Literal["warn", "stop", "roll_back"]
"""Consequence of a finding."""


_WARNINGS: frozenset[HealthRule] = frozenset({"clipped", "train_gap", "kl", "length"})


class HealthSpec(Schema):
    """Judgement of training: one that learns nothing goes back once to an older checkpoint, then the run stops; one
    that merely looks wrong gets a warning."""

    off: dict[HealthRule, str] = {}
    """Rules that are not applied: `identical`, `frozen`, `reward_collapse`, `no_spread`, `truncated`,
    `entropy_collapse`, `clipped`, `train_gap`, `kl` or `length` to the reason, which is kept with the run."""
    actions: dict[HealthRule, HealthAction] = {}
    """Consequences of rules: `warn` (an incident that leaves the run going), `stop` the run, or `roll_back` (go on
    once from an older checkpoint, then stop). Without an entry `clipped`, `train_gap`, `kl` and `length` warn and the
    others roll back. Training by another program is only warned of."""
    window_steps: Positive = 20
    """Steps over which reward, spread, entropy and truncation are judged: healthy runs have dips of some steps, and
    what is still gone after twenty does not come back."""
    frozen_steps: Positive = 5
    """Steps in a row without a gradient although rewards differ, or without any change of the weights, after which
    training is ended: one may be rounding, in five nothing has been learned."""
    min_completions: Positive = 4096
    """Completions without any difference in reward before that counts: a task that is solved once in a thousand times
    has shown it by then (the chance that it has not is under 2 %)."""
    identical_chance: Annotated[float, Field(gt=0, lt=1)] = 1e-9
    """Chance, judged by the policy's entropy, below which identical completions are no accident: no run has a thousand
    million steps, and a policy that is certain of its answers may repeat them."""
    collapsed_share: Share = 0.2
    """A reward that has kept no more than this share of its own best, above the lowest reward seen, has collapsed:
    healthy runs lose a half at times and win it back."""
    entropy_share: Share = 0.01
    """An entropy below this share of what it began with, without a gain in reward, is the end of exploration: a policy
    that learns gives up entropy too, but for reward."""
    truncated_share: Share = 0.99
    """Share of completions cut off at `rollout.max_new_tokens` from which on, without any reward, nothing is ever
    finished: a few that end are enough to learn from."""
    max_kl: PositiveFloat = 10.0
    """Divergence from the reference model, in nats per token, above which a model is far from anything that it was:
    healthy runs stay below 1, and 10 leaves the likely tokens a chance of 1 in 20,000."""
    max_train_gap: PositiveFloat = 0.1
    """Mean difference between the log-probabilities of tokens at sampling and in training, in nats, above which the two
    do not have the same model: bfloat16 makes 0.01, and at 0.1 every token's gradient is a tenth off."""
    clipped_share: Share = 0.9
    """Share of tokens whose gradient the clip has taken away, from which on nothing is left to learn from: healthy runs
    stay below a third."""
    length_correlation: Share = 0.8
    """Correlation of reward and length among the completions of a prompt, from which on the reward is little else than
    length: of a reward for right answers it is under 0.5 either way."""
    length_rise: PositiveFloat = 0.25
    """Rise of the mean length, as a share of what it was, that is more than chance and the form of the answer."""

    def action(self, rule: HealthRule) -> HealthAction:
        """Consequence of a finding of this rule."""
        return self.actions.get(rule, "warn" if rule in _WARNINGS else "roll_back")
