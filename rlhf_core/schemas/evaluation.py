"""Evaluations of a run: their settings, with the promotion that depends on them, and their reports."""

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from rlhf_core.schemas.base import Finite, Int32, Label, Moment, NonNegative, Positive, PositiveFloat, Schema

EvaluationName = Literal["greedy", "sampled", "preference", "loss"]
"""Kinds of evaluation: of greedy or sampled completions, of the ranking of pairs, or of the loss on held-out rows."""
EVALUATIONS: tuple[EvaluationName, ...] = get_args(EvaluationName)
"""All kinds, in display order."""
PassName = Annotated[str, Field(pattern=r"^pass@[1-9][0-9]*$")]
"""``pass@k`` for a ``k``: the probability that at least one of ``k`` sampled completions of a prompt is correct."""
PASS = "pass@"
"""Beginning of a :data:`PassName`."""

_OF_MODELS = "reward.models."
ScorerName = Annotated[str, Field(pattern=r"^(reward\.models\.[a-z0-9][a-z0-9_-]*|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$")]
"""Reward function as `module:function`, or reward model as `reward.models.<name>`."""


class EvaluateSpec(Schema):
    """Measurement of the model on held-out data, before and after training."""

    scorer: ScorerName = "rlhf_core.training.rewards:exact_match"
    """Reward function as `module:function`, or reward model as `reward.models.<name>`, whose mean is reported: of a
    model, the mean of its raw scores."""
    completions: bool = True
    """Sample completions and score them (evaluations `greedy` and `sampled`). false: only the loss, and for pairs or
    labelled rows the ranking, both of which need no sampling."""
    num_prompts: NonNegative = 512
    """Number of held-out prompts, from the start of the split; 0 for all."""
    samples_per_prompt: Positive = 1
    """Completions per prompt in the sampled evaluation. With several, pass@k is also reported, for k = 1, 2, 4 ... up
    to this number, if all scores are between 0 and 1; a completion is correct with a score of at least 0.5."""
    temperature: PositiveFloat = 1.0
    """Temperature of the sampled evaluation; the greedy one always takes the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The sampled evaluation draws from the fewest likeliest tokens that together have this probability; 1 for all."""
    top_k: NonNegative = 0
    """The sampled evaluation draws from this many of the likeliest tokens; 0 for all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The sampled evaluation draws from the tokens with at least this share of the likeliest token's probability."""
    max_new_tokens: NonNegative = 0
    """Maximum length of a completion in evaluations, also in those during training, in tokens; 0 for
    `rollout.max_new_tokens`."""
    every_num_steps: NonNegative = 0
    """Also evaluate at this interval of steps during training: greedily, as metric `eval/greedy`, and if the main loop
    learns from rows, also `eval/loss` and `eval/preference`; 0 for never."""
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Level of the reported confidence interval."""
    keep_samples: NonNegative = 64
    """Scored completions kept in the sample table of each evaluation."""

    @model_validator(mode="after")
    def _model_has_completions_to_score(self) -> Self:
        if self.scorer_model and not self.completions:
            raise ValueError(
                f"found evaluate.scorer = {self.scorer} and evaluate.completions = false, with which there are no "
                "completions to score; leave one of them out"
            )
        return self

    @property
    def scorer_function(self) -> str:
        """Path of the function that scores; empty if a reward model does."""
        return "" if self.scorer_model else self.scorer

    @property
    def scorer_model(self) -> str:
        """Name of the reward model that scores; empty if a function does."""
        return self.scorer.removeprefix(_OF_MODELS) if self.scorer.startswith(_OF_MODELS) else ""


class PromoteSpec(Schema):
    """Promotion of the evaluated checkpoint to a model directory for others to use: the last, or with
    `checkpoint.keep_best` the best."""

    when: Literal["never", "approved", "always"] = "never"
    """Condition: `never`; `approved`, once a user approves it after the evaluation (in Prefect, or with `rlhf
    approve`); or `always`, without approval."""
    folder: str = ""
    """Folder of promoted models, each in `<folder>/<run id>`. Empty: `promoted` beside the run directories."""
    metric: EvaluationName = "greedy"
    """Evaluation whose gain decides; `preference` ranks held-out pairs, and `loss` is the loss on held-out rows, of
    which a lower one is better."""
    min_gain: Finite = 0.0
    """Minimum gain over the evaluation before training; with less, nothing is promoted and no approval is requested."""
    timeout_h: Annotated[float, Field(gt=0, le=876_000, allow_inf_nan=False)] = 72.0
    """Time to wait for an approval, in hours; after that, nothing is promoted, but `rlhf approve` still works."""


# ---------------------------------------------------------------------------------------------------------------------
# Reports


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
