"""Ledger of the weights sent to rollout engines."""

from typing import Annotated

from pydantic import Field

from rlhf_core.schemas.base import Finite, Int64, Label, Moment, NonNegative, Schema


class WeightSyncLine(Schema):
    """One line of ``weight-syncs.jsonl``: the sync of a version of the weights to the rollout engines.

    Each sync has two lines with the same number: one before anything is sent, one with the engines' acknowledgements.
    The last one counts. A sync that was killed in between has only the first, without acknowledgements.
    """

    number: NonNegative
    """Number of the sync in this start of the workers, from 0."""
    time: Moment
    """Time of the line (UTC)."""
    version: NonNegative
    """Number of optimizer steps of the weights."""
    engines: NonNegative
    """Engines to update."""
    acknowledged: NonNegative = 0
    """Engines that have applied it."""
    transport: Label = ""
    """Transport, for instance ``in_process``; empty before the acknowledgements."""
    bytes: Annotated[Int64, Field(ge=0)] = 0
    """Bytes sent, over all senders."""
    seconds: Finite | None = None
    """Time from the request to the last acknowledgement, on the slowest rank; null before the acknowledgements."""
    wire_s: Finite = 0.0
    """Part of it on the wire; 0 if the weights stay in the process."""
    apply_s: Finite = 0.0
    """Part of it in which engines loaded the weights. The two overlap if buckets are sent ahead."""

    @property
    def gb_per_s(self) -> float | None:
        """Bytes over all seconds, in GB/s; None before the acknowledgements."""
        return self.bytes / 1e9 / self.seconds if self.seconds else None
