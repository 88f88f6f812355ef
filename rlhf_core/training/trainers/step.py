"""One optimizer step: its statistics and times while it runs, its log line, and the error for a loss that is not
finite."""

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rlhf_core.errors import NonFiniteLoss
from rlhf_core.training.algorithms.aggregation import Stats
from rlhf_core.training.algorithms.objective import MetricDef
from rlhf_core.training.metrics import StepMetrics

_MUST_BE_FINITE = ("train/loss", "train/grad_norm", "value/loss", "value/grad_norm")
"""Metrics of every step, and of the value model if there is one."""


class Totals:
    """Sums and weights by name, accumulated over micro-batches on the device and read at the end of the step."""

    def __init__(self) -> None:
        self._entries: Stats = {}

    def add(self, stats: Stats) -> None:
        """Add the statistics of one micro-batch."""
        for name, (total, weight) in stats.items():
            before = self._entries.get(name)
            self._entries[name] = (total, weight) if before is None else (before[0] + total, before[1] + weight)

    def __contains__(self, name: str) -> bool:
        """True if there is a sum of that name."""
        return name in self._entries

    def read(self, name: str) -> tuple[float, float]:
        """Return the sum and weight of one name."""
        total, weight = self._entries[name]
        return float(total), float(weight)

    def read_metric(self, definition: MetricDef) -> tuple[float, float]:
        """Return the sum and weight of a metric of an objective; zeros if no micro-batch had it."""
        if not all(name in self for name in definition.stats):
            return 0.0, 0.0
        sums, weights = zip(*map(self.read, definition.stats), strict=True)
        return sum(sums), weights[0]


@dataclass
class TrainingStep:
    """One optimizer step in progress."""

    number: int
    """Counted over the whole run, from 1."""
    metrics: StepMetrics
    started_s: float = field(default_factory=time.monotonic)
    """On the monotonic clock."""
    times_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of each part of the step."""
    grad_norms: list[float] = field(default_factory=list)
    """Global norm of the gradient of each update."""
    num_tokens: int = 0
    """Number of this rank's tokens in the losses of the updates."""

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time of a block to a part of the step."""
        started_s = time.monotonic()
        yield
        self.times_s[part] += time.monotonic() - started_s

    def seconds(self) -> float:
        """Seconds since the step began."""
        return time.monotonic() - self.started_s

    def add(self, definitions: Sequence[MetricDef], totals: Totals) -> None:
        """Add the metrics of an objective for which the step has statistics."""
        for definition in definitions:
            if all(name in totals for name in definition.stats):
                self.metrics.mean(definition.name, *totals.read_metric(definition))


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
