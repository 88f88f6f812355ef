"""Algorithms that learn from reference answers."""

from typing import Literal

from rlhf_core.schemas.algorithms.base import AlgorithmSpec
from rlhf_core.schemas.base import Positive


class SftSpec(AlgorithmSpec):
    """Supervised fine-tuning on the reference answers."""

    name: Literal["sft"]
    """Supervised fine-tuning on the reference answers."""
    batch_size: Positive = 64
    """Rows per optimizer step, across all ranks."""
