"""Metrics of each source of a mixture (``data.sources``): those of the step, with the name of the source behind."""

from collections.abc import Sequence

import torch

from rlhf_core.schemas.algorithms.base import AlgorithmSpec
from rlhf_core.training.algorithms import ALGORITHMS
from rlhf_core.training.algorithms.objective import MicroBatch, PolicyOutput, StepSums, select_rows
from rlhf_core.training.metrics import StepMetrics
from rlhf_core.training.trainers.step import Totals
from rlhf_core.training.types import Row

OF_ROWS = ("train/loss", "preference/accuracy")
"""Metrics of an algorithm that learns from rows which each source has as well."""


class SourceTotals:
    """Statistics of a step for each source, accumulated over micro-batches. Empty without a mixture."""

    def __init__(self, names: Sequence[str], algorithm: AlgorithmSpec) -> None:
        self._totals = {name: Totals() for name in names}
        self._algorithm = algorithm
        self._objective = ALGORITHMS[algorithm.name]

    @torch.no_grad()
    def add(self, rows: Sequence[Row], output: PolicyOutput, batch: MicroBatch, sums: StepSums) -> None:
        """Add one micro-batch.

        Args:
            rows: its rows; none for padding.
        """
        for name, totals in self._totals.items():
            places = [place for place, row in enumerate(rows) if row.source == name]
            if places:
                selected = select_rows(output, batch, places, paired=self._algorithm.pairs)
                totals.add(self._objective.loss(*selected, sums, self._algorithm)[1])

    def write(self, metrics: StepMetrics, rows: Sequence[Row]) -> None:
        """Add the metrics of the step. A source without rows in the step has none, whatever its rank.

        Args:
            rows: this rank's rows of the step.
        """
        add_shares(metrics, list(self._totals), rows)
        for name, totals in self._totals.items():
            for definition in self._objective.metrics:
                if definition.name in OF_ROWS:
                    metrics.mean(f"{definition.name}/{name}", *totals.read_metric(definition))


def add_shares(metrics: StepMetrics, names: Sequence[str], rows: Sequence[Row]) -> None:
    """Add the share of each source in the rows of a step."""
    for name in names:
        metrics.mean(f"data/share/{name}", sum(row.source == name for row in rows), len(rows))
