"""Rewards of a rank's completions: weighted functions with time limits, and the handling of failures.

A function is called once for all completions. If that fails, other than by exceeding its time or ending its process, it
is called once more, because a failure of a service that it uses may be over. If that fails as well, bisection finds the
completion that it fails for: an error that names it is quick to reproduce, and the others are unaffected. A part of the
completions gets the same fraction of the time limit, but at least a sixteenth, so that one endless completion costs
little more than the time limit once more.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from rlhf_core.schemas.rewards import COMPARE_ANSWERS, REWARD_METRICS, RewardSpec
from rlhf_core.schemas.run import RunSpec
from rlhf_core.schemas.scoring_models import ScoringModelState
from rlhf_core.training.rewards.failures import Completions, RewardFailures, SourceScores
from rlhf_core.training.rewards.functions import Conversations, RewardCall, call_reward, load_reward, reward_arguments
from rlhf_core.training.rewards.process import RewardProcess
from rlhf_core.training.rewards.scoring_models import ModelScores, ScoringModels
from rlhf_core.training.types import Completion, Row

LEAST_SHARE = 1 / 16
"""Smallest fraction of the time limit for a part of the completions."""


@dataclass(frozen=True)
class Scores:
    """Rewards of some completions."""

    total: list[float]
    """Weighted sum over the functions that judge it, one per completion."""
    by_function: dict[str, list[float | None]]
    """Unweighted rewards of each function; None for what it does not judge."""
    num_failed: int
    """Completions for which at least one function or model failed."""
    warnings: list[str]
    """Failures of a kind not reported before, as sentences."""

    def take(self, indices: Sequence[int]) -> "Scores":
        """Select the scores of some completions, without failures."""
        by_function = {name: [values[index] for index in indices] for name, values in self.by_function.items()}
        return Scores([self.total[index] for index in indices], by_function, 0, [])

    @classmethod
    def joined(cls, parts: Sequence["Scores"]) -> "Scores":
        """Concatenate several, in order."""
        return cls(
            [value for part in parts for value in part.total],
            {name: [value for part in parts for value in part.by_function[name]] for name in parts[0].by_function},
            sum(part.num_failed for part in parts),
            [warning for part in parts for warning in part.warnings],
        )


def reward_names(paths: Sequence[str]) -> dict[str, str]:
    """Metric names of reward functions, mapped to their paths: the function's name, or the full path if two share it or
    if it is the name of a metric of all rewards, such as ``mean``."""
    repeated = Counter(path.partition(":")[2] for path in dict.fromkeys(paths))
    taken = REWARD_METRICS | {name for name, count in repeated.items() if count > 1}
    return {(path if name in taken else name): path for path, name in ((p, p.partition(":")[2]) for p in paths)}


def _weights(reward: RewardSpec, functions: Mapping[str, str]) -> dict[str, float]:
    """Weights of functions and models by name. A function that is listed twice counts twice."""
    of_paths = dict.fromkeys(reward.functions, 0.0)
    for path, weight in zip(reward.functions, reward.weights or (1.0,) * len(reward.functions), strict=True):
        of_paths[path] += weight
    of_models = {name: model.weight for name, model in reward.models.items()}
    return {**{name: of_paths[path] for name, path in functions.items()}, **of_models}


class RewardScorer:
    """Scores completions by the reward functions of a run, and by the scorer of its evaluations."""

    def __init__(self, spec: RunSpec, rank: int = 0) -> None:
        """Start the process of the functions, if they need one.

        Args:
            rank: rank in the role's process group; part of the random seed of the functions.
        """
        self._spec = spec
        self._reward = spec.reward
        self._rank = rank
        self._functions = reward_names(spec.reward.functions) if spec.any_loop_samples else {}
        self._weights = _weights(spec.reward, self._functions)
        self._evaluation = reward_names([path for path in (spec.evaluate.scorer_function,) if path])
        paths = [*self._functions.values(), *self._evaluation.values()]
        self._process = RewardProcess(paths) if paths and spec.reward.timeout_s else None
        self._failures = RewardFailures(spec.reward, self._weights, rank)
        # Its own, so that a warning in an evaluation does not replace the incident of the same kind in training.
        self._measuring = RewardFailures(spec.reward, {}, rank)
        self._models: ScoringModels | None = None

    def use(self, models: ScoringModels) -> None:
        """Also score by these reward models from now on: those of the run, or only that of ``evaluate.scorer``."""
        self._models = models

    @property
    def uses_models(self) -> bool:
        """True once the reward models are loaded."""
        return self._models is not None

    @property
    def model_states(self) -> dict[str, ScoringModelState]:
        """State of the reward models, for a checkpoint."""
        return dict(self._models.states) if self._models is not None else {}

    def close(self) -> None:
        """End the process with everything its functions started."""
        if self._process is not None:
            self._process.close()

    def load(self, beat: Callable[[], None]) -> None:
        """Wait until the functions are imported.

        Raises:
            BadConfig: one of them cannot be imported.
        """
        if self._process is not None:
            self._process.await_loaded(beat)
        else:
            for path in (*self._functions.values(), *self._evaluation.values()):
                load_reward(path)

    def score(
        self,
        rows: Sequence[Row],
        completions: Sequence[Completion],
        step: int,
        beat: Callable[[], None],
        sampling_round: int = 0,
    ) -> Scores:
        """Compute weighted rewards by ``reward.functions`` and ``reward.models``. Collective if a model normalises.

        Args:
            rows: the row of each completion (repeated for each of its samples).
            completions: one for each row.
            step: optimizer step; random functions draw the same numbers if it is repeated.
            beat: called before and after each function, and every fraction of a second while one runs.
            sampling_round: round of the step, if it samples several times.

        Raises:
            BadConfig: a function cannot be imported.
            RewardFailed: a function failed and ``reward.on_failure`` is ``stop``, or failed for too many completions;
                being judged by none that counts is a failure of a completion.
        """
        made = Completions(rows, completions)
        seed, allowed = self._seed(step, sampling_round), self._failures.num_allowed(len(completions))
        # Before the models, whose statistics are a collective: a function that fails ends the rank outside of it.
        sources = [self._by_function(*one, made, seed, beat, allowed) for one in self._functions.items()]
        sources += self._by_models(made, beat, allowed)
        counting = [one for one in sources if self._weights[one.name]]
        total = [0.0] * len(completions)
        for one in counting:
            weight = self._weights[one.name]
            total = [before + weight * value for before, value in zip(total, one.counted, strict=True)]
        # A failure counts as 0, except of what has the weight 0 and is only measured.
        lost = {index for one in counting for index in one.problems}
        rewards = [0.0 if index in lost else value for index, value in enumerate(total)]
        judging = counting or sources  # with all weights 0, rewards are only measured
        unjudged = [index for index in range(len(total)) if all(one.raw[index] is None for one in judging)]
        warnings = [text for one in sources for text in self._failures.new_warnings(one, made)]
        warnings += self._failures.about_unjudged(unjudged, made, allowed)
        failed = {*unjudged, *(index for one in sources for index in one.problems)}
        return Scores(rewards, {one.name: one.raw for one in sources}, len(failed), warnings)

    def _by_models(self, made: Completions, beat: Callable[[], None], allowed: float) -> list[SourceScores]:
        if self._models is None:
            return []
        found = self._models.score(made.pairs, beat)
        return [self._by_model(name, scores, made, allowed) for name, scores in found.items()]

    def _by_model(self, name: str, scores: ModelScores, made: Completions, allowed: float) -> SourceScores:
        reasons = {index: f"gives no score ({reason})" for index, reason in scores.unread.items()}
        gives = {index: f"gives {value}" for index, value in enumerate(scores.raw) if not math.isfinite(value)}
        problems = {index: RewardCall(failure=text) for index, text in {**gives, **reasons}.items()}
        if len(problems) > allowed:
            self._failures.refuse("model", name, problems, allowed, made)
        raw: list[float | None] = [0.0 if index in problems else value for index, value in enumerate(scores.raw)]
        return SourceScores(name, "model", raw, scores.counted, problems, num_cut=scores.num_cut)

    def evaluate(self, rows: Sequence[Row], completions: Sequence[Completion], beat: Callable[[], None]) -> list[float]:
        """Score by ``evaluate.scorer``. A failure ends the run even if ``reward.on_failure`` allows it to go on: zeros
        would invalidate the measurement.

        Args: see :meth:`score`.

        Raises:
            BadConfig: the scorer cannot be imported.
            RewardFailed: the scorer failed.
        """
        made = Completions(rows, completions)
        if name := self._spec.evaluate.scorer_model:
            assert self._models is not None, "the evaluator and the trainer load the model of the scorer"
            found = self._by_model(name, self._models.rate(name, made.pairs, beat), made, 0.0)
        else:
            ((name, path),) = self._evaluation.items()
            found = self._by_function(name, path, made, self._seed(0, 0), beat, 0.0)
        for warning in self._measuring.new_warnings(found, made):
            print(f"warning: {warning}", flush=True)
        scores = [value for value in found.raw if value is not None]
        if len(scores) < len(completions):
            self._measuring.refuse_scorer(name, found.raw.index(None), made)
        return scores

    def _by_function(
        self, name: str, path: str, made: Completions, seed: int, beat: Callable[[], None], allowed: float
    ) -> SourceScores:
        count = len(made.completions)
        values: list[float | None] = [0.0] * count
        problems: dict[int, RewardCall] = {}
        as_one: RewardCall | None = None
        passing: RewardCall | None = None
        pending = [(0, count)]
        while pending:
            first, end = pending.pop()
            share = (end - first) / max(count, 1)
            called = self._call(path, made.part(first, end), seed, beat, share)
            if end - first == count and called.failure and called.returned:
                # With the same seed, so that a passing failure leaves no trace in the rewards.
                again = self._call(path, made, seed, beat, share)
                passing, called = (None if again.failure else called), again
            if called.failure and end - first > 1:
                as_one = as_one or called
                middle = (first + end) // 2
                pending += [(middle, end), (first, middle)]
                continue
            if called.failure:
                problems[first] = called
            else:
                values[first:end] = called.values
                problems |= {first + index: RewardCall(failure=text) for index, text in called.problems.items()}
            if len(problems) > allowed:
                self._failures.refuse("function", name, problems, allowed, made)
        if as_one is not None and not allowed:
            self._failures.refuse_as_one(name, as_one, count)
        counted = [0.0 if value is None else value for value in values]
        return SourceScores(name, "function", values, counted, problems, as_one, passing)

    def _call(self, path: str, made: Completions, seed: int, beat: Callable[[], None], share: float) -> RewardCall:
        beat()
        # Reference answers are texts, and do not repeat the beginning of a message that the prompt has.
        form: Conversations = "last_turn" if path in COMPARE_ANSWERS else self._reward.conversations
        arguments = reward_arguments(made.rows, made.completions, form)
        if self._process is None:
            called = call_reward(load_reward(path), arguments)
        else:
            limit_s = self._reward.timeout_s * max(share, LEAST_SHARE)
            called = self._process.call(path, arguments, seed, limit_s, beat)
        beat()
        return called

    def _seed(self, step: int, sampling_round: int) -> int:
        text = f"{self._spec.seed}|{step}|{sampling_round}|{self._rank}"
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
