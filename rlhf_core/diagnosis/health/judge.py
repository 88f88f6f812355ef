"""Health judge of training: detects training that no longer learns. Pure: metrics of a step in, findings out.

The loss is uninformative: that of GRPO is near 0 when all is well. The judge examines gradient and weights, the spread
of rewards within groups, repeated completions and seeds, the reward against its own best, entropy, truncation,
clipping, the distance of training from sampling and from the reference model, and rewards earned by length
(``[health]`` has the windows and thresholds, each with its reason, and the action for a finding).

Three things look like failures but are not, and no rule may mistake them for failures:

- A task that is *solved* has no spread, no gradient and hardly any entropy: its mean reward is the highest that any
  completion ever had.
- A policy that has *gained* reward since it began may have become certain of its answers, some of them wrong.
- A *rare* reward may be absent for many steps: the criteria are the number of completions without it, and a fall of the
mean beyond chance.

Every rank sees the same metrics and reaches the same findings. The state is part of each checkpoint, so that a resumed
run is judged as if it had never stopped. A new rule is a function over the state and a row of ``RULES`` in
``rules.py``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rlhf_core.diagnosis.health.rules import HealthFinding, findings
from rlhf_core.diagnosis.health.state import Batch, HealthState, observe
from rlhf_core.schemas.health import UNINTENDED, HealthAction, HealthRule, HealthSpec

_ADVICE = "`rlhf report` shows curves and completions; health.off disables a rule that does not fit the task"


@dataclass(frozen=True)
class HealthVerdict:
    """Consequence of the findings of one step."""

    warnings: tuple[tuple[HealthRule, str], ...] = ()
    """Rule and message of each warning; warnings do not stop the run."""
    ends_by: HealthRule | Literal[""] = ""
    """Rule that ends training at this step; empty if none does."""
    message: str = ""
    """Messages of the findings that end it."""


class Judge:
    """Judges the steps of one run, in order."""

    def __init__(self, spec: HealthSpec, batch: Batch, state: HealthState | None = None) -> None:
        """Start afresh or from the state of a checkpoint."""
        self._spec = spec
        self._batch = batch
        self.state = state or HealthState()

    def observe(
        self,
        step: int,
        samples: bool,
        metrics: Mapping[str, float],
        by_rank: Mapping[str, Sequence[float]],
        peak_rate: float = 0.0,
    ) -> list[HealthFinding]:
        """Observe one step (``state.observe``).

        Returns:
            The current findings, the most conclusive first; empty if all is well.
        """
        self.state = observe(self.state, self._spec, self._batch, step, samples, metrics, by_rank, peak_rate)
        return findings(self.state, self._spec, self._batch)

    def verdict(self, found: Sequence[HealthFinding], step: int) -> HealthVerdict:
        """Decide on the findings of a step (``health.actions``).

        A warning is reported once, and again only after a window of steps without it.
        """
        by_action: dict[HealthAction, list[HealthFinding]] = {"warn": [], "stop": [], "roll_back": []}
        for finding in found:
            by_action[self._spec.action(finding.rule)].append(finding)
        warned = {key: last for key, last in self.state.warned if step - last <= self._spec.window_steps}
        unreported = [finding for finding in by_action["warn"] if finding.key not in warned]
        warned |= {finding.key: step for finding in by_action["warn"]}
        self.state = self.state.model_copy(update={"warned": tuple(warned.items())})
        warnings = tuple((finding.rule, f"{in_words([finding], step)}. Training continues.") for finding in unreported)
        ending = by_action["stop"] + by_action["roll_back"]
        if not ending:
            return HealthVerdict(warnings)
        return HealthVerdict(warnings, ending[0].rule, in_words(ending, step))


def in_words(found: Sequence[HealthFinding], step: int) -> str:
    """Format findings as an error message, without its full stop."""
    since = min(finding.since_step for finding in found)
    also = "".join(f". Also ({finding.rule}): {finding.message}" for finding in found[1:])
    is_unintended = all(finding.rule in UNINTENDED for finding in found)
    outcome = "Training goes wrong" if is_unintended else "Training no longer learns"
    return f"{outcome} at step {step}, since step {since} ({found[0].rule}): {found[0].message}{also}. {_ADVICE}"
