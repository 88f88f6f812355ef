"""Errors and warnings about the rewards of a rank's completions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

from rlhf_core.errors import RewardFailed
from rlhf_core.schemas.rewards import RewardSpec
from rlhf_core.training.rewards.functions import RewardCall, shown
from rlhf_core.training.rewards.process import NO_RESPONSE
from rlhf_core.training.types import Completion, Row


@dataclass(frozen=True)
class Completions:
    """Completions to score."""

    rows: Sequence[Row]
    """Row of each."""
    completions: Sequence[Completion]

    @property
    def pairs(self) -> list[tuple[Row, Completion]]:
        """Each with its row."""
        return list(zip(self.rows, self.completions, strict=True))

    def part(self, first: int, end: int) -> "Completions":
        """Return some of them."""
        return Completions(self.rows[first:end], self.completions[first:end])

    def named(self, index: int) -> str:
        """One of them, in a message."""
        return f"completion {index} ({shown(self.completions[index].text)}, prompt {self.rows[index].uid})"


@dataclass(frozen=True)
class SourceScores:
    """Scores of some completions by one reward function or model."""

    name: str
    source: Literal["function", "model"]
    raw: list[float | None]
    """Scores as in the metric, one per completion; 0 for a failure, None for one that is not judged."""
    counted: list[float]
    """Scores as they enter the sum; unspecified for a failure, 0 for one that is not judged."""
    problems: dict[int, RewardCall]
    """Reason for a missing score, by index."""
    as_one: RewardCall | None = None
    """Failure of the call for all completions at once."""
    passing: RewardCall | None = None
    """The same, if the call succeeded when it was repeated."""
    num_cut: int = 0
    """Number of sequences truncated because they exceed the model's maximum length."""


class RewardFailures:
    """Judge of failures: those that stop the run raise an error, others become warnings, each kind once."""

    def __init__(self, reward: RewardSpec, weights: Mapping[str, float], rank: int) -> None:
        """Args:
        weights: weights of functions and models by name.
        """
        self._reward = reward
        self._weights = weights
        self._rank = rank
        self._reported: set[tuple[str, str]] = set()
        """Warnings so far, as name of the function or model and kind."""

    def num_allowed(self, count: int) -> float:
        """Number of completions, out of ``count``, for which a function or model may fail."""
        return 0.0 if self._reward.on_failure == "stop" else max(1.0, self._reward.max_failed_share * count)

    def refuse(
        self, source: str, name: str, problems: dict[int, RewardCall], allowed: float, made: Completions
    ) -> NoReturn:
        """Stop the run for a function or model that failed for more than ``allowed`` completions.

        Raises:
            RewardFailed: always; it names the first of them.
        """
        index, problem = next(iter(problems.items()))
        sentence = self._sentence(source, name, index, problem, made)
        advice = (
            "Call it with this completion alone to find the cause; "
            'reward.on_failure = "zero" counts it as 0 in training, but not in evaluations'
            if not allowed
            else f"It has failed for {len(problems)} of {len(made.completions)} completions, more than "
            f"reward.max_failed_share = {self._reward.max_failed_share:g}"
        )
        raise _error(f"{sentence}. {advice}", problem)

    def refuse_as_one(self, name: str, as_one: RewardCall, count: int) -> NoReturn:
        """Stop the run for a function that failed for all ``count`` completions at once, but for none alone.

        Raises:
            RewardFailed: always.
        """
        raise _error(f"{_as_one(name, as_one, count)}; {_advice(as_one)}", as_one)

    def refuse_scorer(self, name: str, index: int, made: Completions) -> NoReturn:
        """Stop the run for a scorer of evaluations that does not judge a completion.

        Raises:
            RewardFailed: always.
        """
        raise RewardFailed(
            f"evaluate.scorer {name} returned None for {made.named(index)}; return a finite number for every "
            "completion, because a mean over some of them would not be comparable"
        )

    def new_warnings(self, found: SourceScores, made: Completions) -> list[str]:
        """Warnings about a function or model, each of its kind only once."""
        count, warnings = len(made.completions), dict[tuple[str, str], str]()
        if found.passing:
            warnings[found.name, "passing"] = (
                f"On rank {self._rank}, reward function {found.name} {found.passing.failure} for {count} completions, "
                "but not when it was called again, so none counts as 0."
            )
        if found.problems or found.as_one:
            warnings[found.name, "failed"] = self._warning(found, made)
        if found.num_cut:
            warnings[found.name, "cut"] = (
                f"On rank {self._rank}, {found.num_cut} of {count} completions with their prompts exceed the limit of "
                f"reward model {found.name}: their beginnings are cut off (reward.models.{found.name}.max_tokens)."
            )
        return self._unreported(warnings)

    def _unreported(self, warnings: Mapping[tuple[str, str], str]) -> list[str]:
        """The warnings whose source and kind are new."""
        new = {key: text for key, text in warnings.items() if key not in self._reported}
        self._reported.update(new)
        return list(new.values())

    def _warning(self, found: SourceScores, made: Completions) -> str:
        if not found.problems and found.as_one is not None:
            sentence = _as_one(found.name, found.as_one, len(made.completions))
            return f"On rank {self._rank}, {sentence}, so none counts as 0; {_advice(found.as_one)}."
        index, problem = next(iter(found.problems.items()))
        effect = (
            "The completion counts as 0 (reward.on_failure), and so will others"
            if self._weights[found.name]
            else "Its weight is 0, so the rewards are not affected"
        )
        return (
            f"On rank {self._rank}, {self._sentence(found.source, found.name, index, problem, made)}. {effect}; "
            "reward/failed_share is the share of such completions."
        )

    def _sentence(self, source: str, name: str, index: int, problem: RewardCall, made: Completions) -> str:
        has_limit = self._reward.timeout_s and source == "function"
        limit = f" within reward.timeout_s = {self._reward.timeout_s:g} s" if has_limit else ""
        return f"reward {source} {name} {problem.failure} for {made.named(index)}; expected a finite number{limit}"

    def about_unjudged(self, unjudged: Sequence[int], made: Completions, allowed: float) -> list[str]:
        """Warning about completions for which every function that counts returned None, once.

        Raises:
            RewardFailed: there are more than ``allowed``.
        """
        if not unjudged:
            return []
        found = (
            f"every reward function that counts returned None for {len(unjudged)} of {len(made.completions)} "
            f"completions, first for {made.named(unjudged[0])}"
        )
        if len(unjudged) > allowed:
            if allowed:
                found = f"{found}, more than reward.max_failed_share = {self._reward.max_failed_share:g}"
            zero = "" if allowed else ', or set reward.on_failure = "zero" to count them as 0'
            raise RewardFailed(f"{found}; return a number, or add a function that judges such completions{zero}")
        warning = f"On rank {self._rank}, {found}. They count as 0 (reward.on_failure)."
        return self._unreported({("", "unjudged"): warning})


def _as_one(name: str, as_one: RewardCall, count: int) -> str:
    return f"reward function {name} {as_one.failure} for {count} completions at once, but for none of them alone"


def _advice(as_one: RewardCall) -> str:
    """Advice about a call that failed for many completions and for none alone."""
    if as_one.failure.startswith(NO_RESPONSE):
        return "allow more time (reward.timeout_s), or use fewer completions per step"
    return "call it with that many to find the cause, or use fewer completions per step"


def _error(message: str, call: RewardCall) -> RewardFailed:
    error = RewardFailed(message)
    error.__cause__ = call.error
    if call.trace:
        error.add_note(call.trace)
    return error
