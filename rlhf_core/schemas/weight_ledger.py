"""Ledger of the weights that rollout engines were given."""

from typing import Annotated

from pydantic import Field

from rlhf_core.schemas.base import Finite, Int32, Int64, Label, Moment, Schema

Count = Annotated[Int32, Field(ge=0)]


class WeightSyncLine(Schema):
    """One line of ``weight-syncs.jsonl``: a version of the weights on its way into the rollout engines.

    Each sync has two lines with the same number: one before anything is sent, one with the engines' answers. The later
    one counts. A sync that was killed in between keeps the first, which no engine has acknowledged.
    """

    number: Count
    """Number of the sync in this start of the workers, from 0."""
    time: Moment
    """Time of the line (UTC)."""
    version: Count
    """Optimizer steps that the weights have behind them."""
    engines: Count
    """Engines that were to take it over."""
    acknowledged: Count = 0
    """Engines that have it in force."""
    transport: Label = ""
    """Way that the weights went, for instance ``in_process``; empty before the answers."""
    bytes: Annotated[Int64, Field(ge=0)] = 0
    """Bytes that were moved, over all senders."""
    seconds: Finite | None = None
    """From the request to the last answer, on the slowest rank; null before the answers."""
    wire_s: Finite = 0.0
    """Part of it on the wire; 0 where the weights stay in the process."""
    apply_s: Finite = 0.0
    """Part of it in which engines took the weights over. The two overlap where buckets are sent ahead."""
    limit_gb_per_s: Finite | None = None
    """Limit of the links of all senders together; null where it is not known."""

    @property
    def gb_per_s(self) -> float | None:
        """Bytes over all seconds, in GB/s; None before the answers."""
        return self.bytes / 1e9 / self.seconds if self.seconds else None

    @property
    def share_of_limit(self) -> float | None:
        """Rate on the wire over the limit of the links; None where there is no wire or no known limit."""
        return self.bytes / 1e9 / self.wire_s / self.limit_gb_per_s if self.wire_s and self.limit_gb_per_s else None
