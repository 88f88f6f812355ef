"""Reports of evaluations."""

from typing import Annotated, Literal, get_args

from pydantic import Field

from rlhf_core.schemas.base import Finite, Int32, Label, Moment, Schema


class EvaluationSample(Schema):
    """One scored completion of an evaluation."""

    prompt_uid: Label
    """Identity of the prompt."""
    sample_index: Int32
    """Index of the sample of that prompt, from 0."""
    prompt: str
    """Text of the prompt."""
    completion: str
    """Text of the completion."""
    answer: str
    """The reference answer."""
    score: float
    """Score of the completion."""


EvaluationName = Literal["greedy", "sampled", "preference", "loss"]
"""Kinds of evaluation: of greedy or sampled completions, of the ranking of pairs, or of the loss on held-out rows."""
EVALUATIONS: tuple[EvaluationName, ...] = get_args(EvaluationName)
"""All kinds, in display order."""
PassName = Annotated[str, Field(pattern=r"^pass@[1-9][0-9]*$")]
"""``pass@k`` for a ``k``: the probability that at least one of ``k`` sampled completions of a prompt is correct."""
PASS = "pass@"
"""Beginning of a :data:`PassName`."""

When = Literal["before", "after"]
"""Before the main algorithm (after the warm start), or after training."""

CORRECT_SCORE = 0.5
"""Score from which a completion counts as correct, if all scores are between 0 and 1: those of scorers that grade are
split at the middle, and the built-in ones give 0 or 1."""


def display_order(name: str) -> tuple[int, int]:
    """Key that sorts names of evaluations for display: all kinds, then pass@k by ``k``."""
    if name in EVALUATIONS:
        return EVALUATIONS.index(name), 0
    k = name.removeprefix(PASS)
    return len(EVALUATIONS), int(k) if k.isdecimal() else 0


CROSS_ENTROPY = "cross_entropy"
"""Held-out loss of supervised training, in nats per token; its exponential is the perplexity."""


def gain(name: str, before: float, after: float) -> float:
    """Improvement from one value of an evaluation to another: a rise of a score, or a fall of the loss."""
    return before - after if name == "loss" else after - before


class EvaluationReport(Schema):
    """One evaluation (``evaluations/<when>-<name>.json``)."""

    name: EvaluationName | PassName
    """Kind of the completions, `preference` for ranked pairs, `loss`, or `pass@k` of the sampled completions."""
    when: When
    """Before the main algorithm (after the warm start), or after training."""
    metric: Label
    """Measure, for instance ``exact_match``."""
    value: float
    """Mean score over all samples; for `loss`, that of a training step with all held-out rows; for `pass@k`, the mean
    estimate over the prompts."""
    ci_low: float
    """Lower bound of the confidence interval of ``value``."""
    ci_high: float
    """Upper bound."""
    num_prompts: Int32
    """Held-out prompts."""
    num_samples: Int32
    """Completions scored."""
    checkpoint_step: Int32
    """Number of optimizer steps of the weights."""
    seconds: Finite
    """Duration in seconds."""
    time: Moment
    """Time of its end (UTC)."""
    by_source: dict[Label, Finite] = {}
    """Mean score of the rows of each source of a mixture (``data.sources``); empty without one, and for `pass@k`."""
    samples: tuple[EvaluationSample, ...]
    """The sample table; at most ``evaluate.keep_samples`` rows, the first by prompt order."""
