"""Losses as small pure functions, one file per algorithm with its formula and paper.

Every loss of a micro-batch is a sum divided by a number that belongs to the whole optimizer step (``aggregation.py``),
so that summing gradients over micro-batches and ranks gives the same gradient however the batch was split.

Each member of ``rlhf_core.schemas.algorithms.Algorithm`` has a module of that name here, whose ``OBJECTIVE`` is
registered in :data:`ALGORITHMS`.
"""

import importlib
from collections.abc import Mapping

from rlhf_core.schemas.algorithms import specs
from rlhf_core.training.algorithms.objective import Objective

ALGORITHMS: Mapping[str, Objective] = {
    name: importlib.import_module(f"{__name__}.{name}").OBJECTIVE for name in specs()
}
"""Objectives by name of their algorithm."""
