"""Probe of an engine's weights: log-probabilities of a few tokens, compared with those of the trainer."""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from pydantic import BaseModel
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.errors import NonFiniteLoss, StaleWeights
from rlhf_core.training.models.causal_lm import in_evaluation_mode

TOLERANCE: Mapping[str, float] = {"float32": 0.01, "bfloat16": 0.15}
"""Largest mean difference of log-probabilities explained by rounding and different kernels, by number format of the
weights. Wrong weights differ by nats.

At least three times what is reported of vLLM and a trainer with the same weights: means of 0.03 to 0.05 in bfloat16
(vllm-project/vllm#18352, huggingface/trl#6789), 0.002 in float32 (ServiceNow/Fast-LLM#525). Single tokens differ by up
to 0.5 there. As all engines have the same kernels, one such token would have all of them refused."""
PROBE_TOKENS = 16
"""Number of probe tokens, unless the engine's limit minus one is smaller."""


class WeightProbe(BaseModel):
    """Log-probabilities that identify the weights of an engine."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probability of every token but the first, as the trainer computes it."""
    tolerance: float
    """Largest mean difference explained by rounding and different kernels."""


class ProbeAnswer(NamedTuple):
    """Log-probabilities of a probe by an engine with one version, and by the trainer."""

    digest: str
    """Digest of the version; its number for an engine in the trainer's process, which computes none."""
    engine: tuple[float, ...]
    trainer: tuple[float, ...]


def probe_of(model: PreTrainedModel, max_tokens: int, dtype: str) -> WeightProbe:
    """Compute the trainer's side of a probe. Collective if the model is split.

    Args:
        max_tokens: longest sequence of the engine.
        dtype: number format of the weights.

    Raises:
        NonFiniteLoss: a log-probability is not finite, so nothing can be sampled with these weights.
    """
    vocab_size = model.config.get_text_config().vocab_size  # models that also read images keep it apart
    tokens = [position % vocab_size for position in range(1, min(PROBE_TOKENS, max_tokens - 1) + 1)]
    # Not under whole_model: all ranks make the same pass, so a split model is gathered module by module.
    with in_evaluation_mode(model), torch.no_grad():
        logits = model(torch.tensor([tokens], device=model.device)).logits[0]
    logprobs = probe_logprobs(logits, tokens)
    require_finite(logprobs)
    return WeightProbe(tokens=tuple(tokens), logprobs=tuple(logprobs), tolerance=TOLERANCE[dtype])


def require_finite(logprobs: Iterable[float]) -> None:
    """Refuse weights whose log-probabilities are NaN or infinite.

    Raises:
        NonFiniteLoss: one is.
    """
    for logprob in logprobs:
        if not math.isfinite(logprob):
            raise NonFiniteLoss(
                f"the policy gives the log-probability {logprob} to a token: its weights are not finite, or they "
                'overflow. Try model.dtype = "float32", and check the weights of the model folder or last checkpoint'
            )


def probe_logprobs(logits: Tensor, tokens: Sequence[int]) -> list[float]:
    """Log-probability of every token but the first.

    Args:
        logits: of each position, ``[T, V]``.
        tokens: ``T`` tokens.
    """
    targets = torch.tensor(list(tokens[1:]), device=logits.device)[:, None]
    logprobs: list[float] = logits[:-1].float().log_softmax(-1).gather(-1, targets)[:, 0].tolist()
    return logprobs


def require_same(name: str, found: Sequence[float], probe: WeightProbe, advice: str = "") -> None:
    """Refuse an engine whose log-probabilities differ from the trainer's.

    Args:
        name: name of the engine.
        found: its log-probabilities of the probe's tokens.
        advice: end of the message.

    Raises:
        StaleWeights: they differ by more than rounding explains.
    """
    differences = [abs(one - other) for one, other in zip(found, probe.logprobs, strict=True)]
    total, num = sum(differences), len(differences)
    if not total <= probe.tolerance * num:  # not >: NaN is refused too
        raise StaleWeights(
            f"{name} and the trainer compute different log-probabilities with the same weights, by {total / num:.3g} "
            f"on average and up to {max(differences):.3g}; expected at most {probe.tolerance} on average. The engine "
            f"did not apply all weights, or its kernels are wrong for this model{advice}"
        )


def require_update(name: str, found: ProbeAnswer, earlier: ProbeAnswer | None) -> None:
    """Refuse an engine that did not apply an update, however small it is: one step changes log-probabilities by less
    than the tolerance of :func:`require_same`.

    Args:
        name: name of the engine.
        found: with the version that it has applied. Not for adapters, whose first changes may be smaller than rounding.
        earlier: with the version that it had before, if it is known.

    Raises:
        StaleWeights: the weights and most log-probabilities of the trainer have changed, and none of the engine.
    """
    if earlier is None or found.digest == earlier.digest or found.engine != earlier.engine:
        return
    num_changed = sum(one != other for one, other in zip(found.trainer, earlier.trainer, strict=True))
    if num_changed > len(found.trainer) / 2:
        raise StaleWeights(
            f"{name} computes exactly the log-probabilities of the version before, but {num_changed} of "
            f"{len(found.trainer)} have changed in the trainer: it did not apply this version"
        )


class VersionCheck:
    """Check of each version that engines apply, by their log-probabilities of a few tokens."""

    def __init__(self, *, of_adapters: bool) -> None:
        """Args:
        of_adapters: True if versions are adapters, whose tensors are compared bit by bit instead of with the version
            before.
        """
        self._of_adapters = of_adapters
        self._answers: dict[Hashable, ProbeAnswer] = {}

    def has_seen(self, engine: Hashable) -> bool:
        """True if a version of this engine was checked before."""
        return engine in self._answers

    def require_applied(
        self, engine: Hashable, name: str, digest: str, found: Sequence[float], probe: WeightProbe, advice: str = ""
    ) -> None:
        """Refuse an engine that did not apply a version.

        Args:
            engine: identity of one start of the engine.
            name: name of the engine.
            digest: digest of the version, or what stands for it.
            found: its log-probabilities of the probe's tokens.
            advice: end of the message.

        Raises:
            StaleWeights: they differ from the trainer's, or stayed as they were.
        """
        require_same(name, found, probe, advice)
        answer = ProbeAnswer(digest, tuple(found), probe.logprobs)
        if not self._of_adapters:
            require_update(name, answer, self._answers.get(engine))
        self._answers[engine] = answer
