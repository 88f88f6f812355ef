"""Reports on one step: its log line, and the error for a loss that is not finite."""

import math
from collections.abc import Mapping

from rlhf_core.errors import NonFiniteLoss

_MUST_BE_FINITE = ("train/loss", "train/grad_norm", "value/loss", "value/grad_norm")
"""Metrics of every step, and of the value model if there is one."""


def summary(step: int, total_steps: int, loop: str, values: Mapping[str, float]) -> str:
    """Format the log line of a step.

    Args:
        loop: name of the loop's algorithm.
        values: metrics reduced over all ranks.
    """
    parts = [f"loss {values['train/loss']:.4f}", f"gradient norm {values['train/grad_norm']:.3f}"]
    if "reward/mean" in values:
        parts.insert(0, f"reward {values['reward/mean']:.3f}")
    return f"step {step}/{total_steps} {loop}: {', '.join(parts)}, {values['time/step_s']:.2f} s"


def refuse_non_finite(step: int, values: Mapping[str, float]) -> None:
    """Refuse to continue from weights that cannot be right.

    Raises:
        NonFiniteLoss: a loss or gradient norm is NaN or infinite.
    """
    for name in _MUST_BE_FINITE:
        if not math.isfinite(values.get(name, 0.0)):
            raise NonFiniteLoss(
                f"{name} is {values[name]} at step {step}; the last checkpoint has the weights before it. Try a lower "
                "learning rate, more warm-up or float32 weights, and check the reward function and the data"
            )
