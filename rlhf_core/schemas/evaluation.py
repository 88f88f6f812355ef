"""Settings of the evaluations of a run, and of the promotion that depends on them."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlhf_core.schemas.base import Finite, NonNegative, Positive, PositiveFloat, Schema
from rlhf_core.schemas.evaluation_reports import EvaluationName

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
