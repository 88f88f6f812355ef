"""Judgement of training while it runs: does it still learn? Pure: the metrics of a step in, findings out.

The loss tells nothing: that of GRPO is near 0 when all is well. Judged are gradient and weights, the spread of rewards
within groups, repeated completions and seeds, the reward against its own best, entropy, truncation, what the clip takes
away, the distance of training from sampling and from the reference model, and length as what the reward is paid for
(``[health]`` has the windows and thresholds, each with its reason, and what follows from a finding).

Three things look like a failure and are none, and no rule may take them for one:

- A task that is *solved* has no spread, no gradient and hardly any entropy: its mean reward is the highest that any
  completion ever had.
- A policy that has *gained* reward since it began may have become certain of its answers, some of them wrong.
- A *rare* reward may not come for many steps: what counts is how many completions went without, and whether a mean has
  fallen by more than chance allows.

Every rank sees the same metrics and comes to the same findings. The state is part of each checkpoint, so that a run
that goes on is judged as if it had never stopped. A new rule is a function over the state and a row of ``RULES`` in
``rules.py``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rlhf_core.schemas.health import HealthAction, HealthRule, HealthSpec
from rlhf_core.training.health.rules import HealthFinding, findings
from rlhf_core.training.health.state import Batch, HealthState, observe

_ADVICE = "`rlhf report` shows curves and completions; health.off turns off a rule that does not fit the task"


_LEARNS_ON = frozenset[HealthRule]({"clipped", "train_gap", "kl", "length"})
"""Rules whose findings do not mean that nothing is learned: what is learned is not what was meant."""


@dataclass(frozen=True)
class HealthVerdict:
    """Consequence of the findings of one step."""

    warnings: tuple[tuple[HealthRule, str], ...] = ()
    """Rule and sentences of what is told and leaves the run going."""
    ends_by: HealthRule | Literal[""] = ""
    """Rule that ends the training here; empty if none does."""
    message: str = ""
    """Findings that end it, in sentences."""


class Judge:
    """Judges the steps of one run, in their order."""

    def __init__(self, spec: HealthSpec, batch: Batch, state: HealthState | None = None) -> None:
        """Begin, or go on from the state of a checkpoint."""
        self._spec = spec
        self._batch = batch
        self.state = state or HealthState()

    def look(
        self, step: int, samples: bool, metrics: Mapping[str, float], by_rank: Mapping[str, Sequence[float]]
    ) -> list[HealthFinding]:
        """Take in one step. Returns what is found by now, the most telling first; empty when all is well."""
        self.state = observe(self.state, self._spec, self._batch, step, samples, metrics, by_rank)
        return findings(self.state, self._spec, self._batch)

    def verdict(self, found: Sequence[HealthFinding], step: int) -> HealthVerdict:
        """Decide on the findings of a step (``health.actions``).

        A warning is told once, and again only if a window of steps went by without it.
        """
        by_action: dict[HealthAction, list[HealthFinding]] = {"warn": [], "stop": [], "roll_back": []}
        for finding in found:
            by_action[self._spec.action(finding.rule)].append(finding)
        warned = {key: last for key, last in self.state.warned if step - last <= self._spec.window_steps}
        news = [finding for finding in by_action["warn"] if finding.key not in warned]
        warned |= {finding.key: step for finding in by_action["warn"]}
        self.state = self.state.model_copy(update={"warned": tuple(warned.items())})
        warnings = tuple((finding.rule, f"{in_words([finding], step)}. Training goes on.") for finding in news)
        ending = by_action["stop"] + by_action["roll_back"]
        if not ending:
            return HealthVerdict(warnings)
        return HealthVerdict(warnings, ending[0].rule, in_words(ending, step))


def in_words(found: Sequence[HealthFinding], step: int) -> str:
    """Findings as the message of an error, without its full stop."""
    since = min(finding.since_step for finding in found)
    also = f". Also: {'; '.join(finding.message for finding in found[1:])}" if len(found) > 1 else ""
    learns_on = all(finding.rule in _LEARNS_ON for finding in found)
    what = "Training goes wrong" if learns_on else "Training learns nothing any more"
    return f"{what} at step {step}, since step {since} ({found[0].rule}): {found[0].message}{also}. {_ADVICE}"
