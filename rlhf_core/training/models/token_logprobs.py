"""Memory-efficient log-probabilities of tokens from their logits.

With ``z`` the logits, ``p = softmax(z)`` and ``y`` the token

    log p(y) = z_y - logsumexp(z)        d log p(y) / dz = 1[y] - p
    H = - sum p log p                    dH / dz = - p (log p + H)

Besides the logits only one tensor of their size exists at a time: the log-probabilities in the forward pass, which are
kept, and the gradient in the backward pass. Automatic differentiation of the same expressions would create four.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

_ENTROPY_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Number of probabilities that exist at once for the entropy: 4 MiB in float32, which a processor's cache holds. A GPU
would wait for the launches of so many small operations."""
_LOG_ZERO = -1e3
"""Logarithm of a probability that is 0 in every number format, in place of minus infinity."""


def token_logprobs(logits: Tensor, labels: Tensor, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
    """Compute log-probability and entropy.

    Args:
        logits: ``[N, V]`` in float32 or float64.
        labels: ``[N]`` int64.
        entropy_gradient: the entropies have a gradient too.

    Returns:
        ``[N]`` log-probabilities of the labels, and ``[N]`` entropies in nats.
    """
    picked: Tensor
    entropy: Tensor
    if entropy_gradient:
        picked, entropy = _TokenLogprobsAndEntropy.apply(logits, labels)
        return picked, entropy
    logprobs: Tensor
    picked, logprobs = _TokenLogprobs.apply(logits, labels)
    # Last: recomputing activations ends with the last tensor that the backward pass needs.
    return picked, _entropy(logprobs)


class _TokenLogprobs(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = torch.log_softmax(logits, dim=-1)
        ctx.save_for_backward(logprobs, labels)
        ctx.mark_non_differentiable(logprobs)
        ctx.set_materialize_grads(False)  # else the backward pass gets zeros of the size of the logits for them
        return logprobs.gather(-1, labels[:, None]).squeeze(-1), logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None]:
        logprobs, labels = ctx.saved_tensors
        grad = grad[:, None]
        return logprobs.exp().mul_(-grad).scatter_add_(-1, labels[:, None], grad), None


class _TokenLogprobsAndEntropy(Function):
    """One gradient for both results; two functions would need another tensor of the size of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = torch.log_softmax(logits, dim=-1)
        entropy = _entropy(logprobs)
        ctx.save_for_backward(logprobs, labels, entropy)
        return logprobs.gather(-1, labels[:, None]).squeeze(-1), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, entropy_grad: Tensor) -> tuple[Tensor, None]:
        logprobs, labels, entropy = ctx.saved_tensors
        columns = (grad[:, None], entropy_grad[:, None], entropy[:, None])
        found, rows = logprobs.exp(), _rows_at_once(logprobs)
        tensors = (found, logprobs, *columns)
        for part, logs, own, of_entropy, entropies in zip(*(one.split(rows) for one in tensors), strict=True):
            part.mul_(logs.clamp(min=_LOG_ZERO).add_(entropies).mul_(-of_entropy).sub_(own))
        return found.scatter_add_(-1, labels[:, None], columns[0]), None


@torch.no_grad()
def _entropy(logprobs: Tensor) -> Tensor:
    """``[N, V]`` -> ``[N]``, a few rows at a time; a token with probability 0 adds nothing."""
    lowest = torch.finfo(logprobs.dtype).min
    parts = logprobs.split(_rows_at_once(logprobs))
    return torch.cat([-part.exp().mul_(part.clamp(min=lowest)).sum(-1) for part in parts])


def _rows_at_once(logprobs: Tensor) -> int:
    return max(1, _ENTROPY_ELEMENTS[logprobs.device.type] // logprobs.shape[-1])
