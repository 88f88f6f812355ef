"""GPUs that a process may use."""

import os
from collections.abc import Mapping

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
"""List for CUDA, and for HIP unless ``HIP_VARIABLE`` is set."""
HIP_VARIABLE = "HIP_VISIBLE_DEVICES"
HIDDEN_FROM_HIP = "-1"
"""List with which HIP finds no GPU: it ignores an empty one, and ends a list at the first number that no GPU has."""
ROCR_VARIABLE = "ROCR_VISIBLE_DEVICES"
"""List for the runtime below HIP: the numbers in HIP's own list count only the GPUs of this one."""


def numbered_gpus(environment: Mapping[str, str] = os.environ) -> str:
    """List of the GPUs that CUDA or HIP may use, as either takes it; empty if no variable limits them or none is left.

    Where only the runtime below HIP has a list, these are the numbers that HIP gives to its GPUs.
    """
    below = environment.get(ROCR_VARIABLE)
    numbers = ",".join(map(str, range(below.count(",") + 1))) if below else ""
    of_hip = environment.get(HIP_VARIABLE)
    return "" if of_hip == HIDDEN_FROM_HIP else of_hip or environment.get(VISIBLE_VARIABLE, numbers)


def listed_gpus() -> list[str] | None:
    """Numbers or UUIDs of the GPUs that this process may use, as NVML takes them; None if the variable is not set.

    CUDA skips spaces in its list, and NVML does not.
    """
    given = os.environ.get(VISIBLE_VARIABLE)
    return None if given is None else [name for part in given.split(",") if (name := part.strip())]
