"""Algorithms as data.

Checks, reports and the memory model use traits of an algorithm (:class:`base.AlgorithmSpec`), never its name. A new
algorithm is one file, ``rlhf_core/training/algorithms/<name>.py``, and its settings here as a member of
:data:`Algorithm`.
"""

from collections.abc import Mapping
from typing import Annotated, get_args

from pydantic import Field

from rlhf_core.schemas.algorithms.base import AlgorithmSpec
from rlhf_core.schemas.algorithms.policy_gradient import (
    CispoSpec,
    DapoSpec,
    DistillationSpec,
    DrGrpoSpec,
    GrpoSpec,
    GspoSpec,
    PpoSpec,
    ReinforcePlusPlusBaselineSpec,
    ReinforcePlusPlusSpec,
    RlooSpec,
)
from rlhf_core.schemas.algorithms.preference import PreferenceAlgorithm
from rlhf_core.schemas.algorithms.supervised import SftSpec

Algorithm = Annotated[
    SftSpec
    | GrpoSpec
    | DrGrpoSpec
    | DapoSpec
    | GspoSpec
    | CispoSpec
    | RlooSpec
    | ReinforcePlusPlusSpec
    | ReinforcePlusPlusBaselineSpec
    | PpoSpec
    | DistillationSpec
    | PreferenceAlgorithm,
    Field(discriminator="name"),
]
"""Settings of all algorithms."""


def specs() -> Mapping[str, type[AlgorithmSpec]]:
    """Settings of every algorithm, by name."""
    members = get_args(get_args(Algorithm)[0])
    return {get_args(member.model_fields["name"].annotation)[0]: member for member in members}
