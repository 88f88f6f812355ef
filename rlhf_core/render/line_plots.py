"""Plots of metrics over steps, as data: for the report, and for the image of a running run."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rlhf_core.render.series import Curve
from rlhf_core.schemas.loops import LoopSpec
from rlhf_core.schemas.run import RunSpec


@dataclass(frozen=True)
class LinePlot:
    """A plot of metrics over steps."""

    name: str
    title: str
    unit: str
    keys: tuple[tuple[str, str], ...]
    """Metrics and their labels; metrics that the run lacks are left out."""
    explanation: str
    """A sentence that helps to read the plot."""
    if_missing: str
    """Sentence that replaces the plot if the run has none of the metrics."""
    stage: str = ""
    """``sft``, ``main`` (sampling) or ``preference`` to draw only the steps of loops of that kind; empty for all."""
    only_with: str = ""
    """Kind of loop, as ``stage``, without which there is nothing to draw; empty if every loop has the metrics."""
    from_zero: bool = False


LEARNING = (
    LinePlot(
        name="reward",
        title="Reward",
        unit="mean reward per completion",
        keys=(("reward/mean", "mean"), ("reward/std", "deviation within a group")),
        explanation="What the sampled completions of a step earned.",
        if_missing="no reward was measured, because the run made no step of reinforcement learning",
        only_with="main",
    ),
    LinePlot(
        name="kl",
        title="Distance from the start (KL)",
        unit="nats per token",
        keys=(("policy/kl", "KL"),),
        explanation="How far the model has moved from the one before the main algorithm.",
        if_missing="it was not measured; set measure_kl = true, or a kl_coefficient above 0, in [loops.main.algorithm]",
        only_with="main",
    ),
    LinePlot(
        name="entropy",
        title="Entropy",
        unit="nats per token",
        keys=(("rollout/entropy", "entropy"),),
        explanation="How undecided the model is when it samples; at zero it has nothing left to try.",
        if_missing="it was not measured, because nothing was sampled in training",
        only_with="main",
        from_zero=True,
    ),
    LinePlot(
        name="signal",
        title="What there is to learn from",
        unit="share",
        keys=(
            ("rollout/zero_std_groups", "groups of equal reward"),
            ("rollout/distinct_share", "distinct completions"),
            ("rollout/truncated_share", "cut off"),
        ),
        explanation="A group whose rewards are all equal teaches nothing; copies of one completion add nothing.",
        if_missing="no groups of completions were sampled",
        only_with="main",
        from_zero=True,
    ),
    LinePlot(
        name="length",
        title="Completion length",
        unit="tokens",
        keys=(("rollout/length_mean", "mean length"),),
        explanation="Mean over the completions of a step, end token included.",
        if_missing="no completions were sampled in training",
        only_with="main",
        from_zero=True,
    ),
    LinePlot(
        name="grad-norm",
        title="Gradient norm",
        unit="norm before clipping",
        keys=(("train/grad_norm", "gradient norm"),),
        explanation="Zero for long means that nothing is learned.",
        if_missing="no step was made",
        from_zero=True,
    ),
    LinePlot(
        name="loss-sft",
        title="Loss of the supervised steps",
        unit="nats per token",
        keys=(("train/loss", "loss"),),
        explanation="Cross-entropy of the reference answers.",
        if_missing="the run made no supervised step",
        stage="sft",
        from_zero=True,
    ),
    LinePlot(
        name="loss-main",
        title="Loss of the policy steps",
        unit="loss",
        keys=(("train/loss", "loss"),),
        explanation="Near zero is normal here: judge learning by reward and gradient norm.",
        if_missing="the run made no step of reinforcement learning",
        stage="main",
    ),
    LinePlot(
        name="preference",
        title="Preferences",
        unit="share",
        keys=(("preference/accuracy", "ranked correctly"),),
        explanation="Pairs whose chosen completion has the higher reward, or rows on the side that their label says.",
        if_missing="the run made no step of preference learning",
        only_with="preference",
        from_zero=True,
    ),
    LinePlot(
        name="margin",
        title="Preference margin",
        unit="reward",
        keys=(("preference/margin", "chosen minus rejected"),),
        explanation="Reward of the chosen completion less that of the rejected one.",
        if_missing="no pairs were compared",
        only_with="preference",
    ),
    LinePlot(
        name="loss-preference",
        title="Loss of the preference steps",
        unit="loss",
        keys=(("train/loss", "loss"),),
        explanation="Mean over the pairs or rows of a step.",
        if_missing="the run made no step of preference learning",
        stage="preference",
    ),
)

LEARNING_ELSEWHERE = (
    *(plot for plot in LEARNING if not plot.stage),
    LinePlot(
        name="loss",
        title="Loss",
        unit="loss",
        keys=(("train/loss", "loss"),),
        explanation="As the trainer logs it; its meaning is that of its algorithm.",
        if_missing="it was not logged",
    ),
)
"""Plots of a run with an external trainer; one sentence names the metrics that it does not log."""

SPEED = (
    LinePlot(
        name="tokens-per-s",
        title="Throughput",
        unit="tokens per second, all ranks",
        keys=(("speed/tokens_per_s", "tokens per second"),),
        explanation="Tokens sampled, or taught in supervised steps, over the time of the whole step.",
        if_missing="no step was made",
        from_zero=True,
    ),
)


_OF_SOURCES = (
    ("reward/mean", "Reward by source", "mean reward per completion"),
    ("train/loss", "Loss by source", "loss"),
    ("preference/accuracy", "Preferences by source", "share ranked correctly"),
    ("eval/greedy", "Held-out scores by source", "score"),
    ("eval/preference", "Held-out preferences by source", "share ranked correctly"),
    ("eval/loss", "Held-out loss by source", "loss"),
)
"""Metrics that each source of a mixture has, with title and unit of their plot."""


def source_plots(spec: RunSpec | None, measured: Collection[str]) -> list[LinePlot]:
    """Plots with a line for each source of a mixture; none for metrics that no source has.

    Args:
        measured: names of the metrics of the run.
    """
    return [
        LinePlot(
            name=f"{metric.replace('/', '-')}-by-source",
            title=title,
            unit=unit,
            keys=keys,
            explanation="Each line is a source of the data.",
            if_missing="it was not measured",
        )
        for metric, title, unit in _OF_SOURCES
        if (keys := tuple((key, name) for name in _sources(spec) if (key := f"{metric}/{name}") in measured))
    ]


def _sources(spec: RunSpec | None) -> list[str]:
    return sorted(spec.data.sources) if spec else []


def stages_of(spec: RunSpec | None) -> tuple[str, str]:
    """Kinds (``LinePlot.stage``) of the warm start and of the main loop of a run of the native trainer."""
    if spec is None:
        return "sft", "main"
    return _stage(spec.loops.warm_start, "sft"), _stage(spec.loops.main, "main")


def kinds_of_loops(spec: RunSpec | None) -> set[str]:
    """Kinds of the loops that a run of the native trainer has."""
    return {_stage(loop, "") for loop in spec.loops.named.values()} if spec else {"sft", "main"}


def _stage(loop: LoopSpec | None, otherwise: str) -> str:
    if loop is None:
        return otherwise
    if loop.algorithm.samples:
        return "main"
    return "preference" if loop.algorithm.pairs or loop.algorithm.labelled else "sft"


def of_stage(curve: Sequence[tuple[int, float]], stage: str, border: int, stages: tuple[str, str]) -> Curve:
    """Points of a curve that belong to a plot.

    Args:
        stage: ``LinePlot.stage`` of the plot.
        border: last step of the warm start; 0 without one.
        stages: kinds of the warm start and of the main loop, from :func:`stages_of`.
    """
    before, after = stages
    return [point for point in curve if not stage or (before if point[0] <= border else after) == stage]
