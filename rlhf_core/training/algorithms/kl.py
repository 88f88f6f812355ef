"""Estimators of the KL divergence of the policy from a reference, per sampled token.

With ``x ~ policy`` and ``d = log reference(x) - log policy(x)`` (Schulman 2020, http://joschu.net/blog/kl-approx.html):

``k1 = -d``             unbiased, high variance, may be negative
``k2 = d^2 / 2``        biased, low variance
``k3 = exp(d) - d - 1`` unbiased, low variance, never negative; the penalty of GRPO (arXiv 2402.03300, eq. 4)

None of them is clamped, as in TRL; verl clamps ``d`` to +-20 and k3 to +-10.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``[B, T]`` log-probabilities under policy and reference -> ``[B, T]`` estimates."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``[B, T]`` log-probabilities under policy and reference -> ``[B, T]`` estimates."""
    return (ref_logprobs - logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``[B, T]`` log-probabilities under policy and reference -> ``[B, T]`` estimates."""
    difference = ref_logprobs - logprobs
    return torch.exp(difference) - difference - 1


Estimator = Literal["k1", "k2", "k3"]

_ESTIMATORS: Mapping[Estimator, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def divergence(logprobs: Tensor, ref_logprobs: Tensor, estimator: Estimator) -> Tensor:
    """``[B, T]`` log-probabilities under policy and reference -> ``[B, T]`` estimates."""
    return _ESTIMATORS[estimator](logprobs, ref_logprobs)
