"""Memory of GPUs by name."""

import re
from collections.abc import Iterable, Mapping

GIB = 2**30

GPU_MEMORY_GB: Mapping[str, tuple[int, ...]] = {
    "gb200": (186,),
    "b200": (180,),
    "b300": (288,),
    "h200": (141,),
    "gh200": (96, 144),
    "h100": (80, 94),
    "h20": (96,),
    "a100": (40, 80),
    "a800": (40, 80),
    "h800": (80,),
    "l40s": (48,),
    "l40": (48,),
    "l4": (24,),
    "a40": (48,),
    "a30": (24,),
    "a16": (16,),
    "a10g": (24,),
    "a10": (24,),
    "a6000": (48,),
    "a5000": (24,),
    "v100": (16, 32),
    "p100": (12, 16),
    "t4": (16,),
    "rtx5090": (32,),
    "rtx4090": (24,),
    "rtx3090": (24,),
}
"""Memory of each type of GPU in GB, from the vendor's data sheet; several values for types with several sizes."""

USABLE_SHARE = 0.93
"""Usable share of a GPU's memory; the driver, error correction and fragmentation take the rest."""


def gpu_memory_bytes(kind: str) -> int | None:
    """Usable memory of a GPU by its name in Slurm or the driver; None if it is not in the table.

    For a type with several sizes, the size in the name (``a100_80gb``), otherwise the smallest. For a part of a GPU
    (MIG), the size of the part (``h100_1g.10gb``).
    """
    sizes = _sizes_gb(kind)
    return int(sizes[0] * GIB * USABLE_SHARE) if sizes else None


def with_largest_size(kind: str) -> str:
    """Name of a GPU with its largest size, if it leaves the size open; otherwise unchanged."""
    sizes = _sizes_gb(kind)
    return f"{kind}_{sizes[-1]}gb" if len(sizes) > 1 else kind


def _sizes_gb(kind: str) -> tuple[int, ...]:
    """Sizes that a GPU of this name may have, ascending."""
    part = re.search(r"\dg\.(\d+)gb", kind.lower())
    if part is not None:
        return (int(part[1]),)
    sizes = GPU_MEMORY_GB.get(known_type(kind, GPU_MEMORY_GB), ())
    return tuple(size for size in sizes if re.search(rf"(?<!\d){size}(?!\d)", kind)) or sizes


def known_type(kind: str, types: Iterable[str]) -> str:
    """The type that a name of a GPU in Slurm or the driver contains, the longest of several; empty without one."""
    text = re.sub(r"[\s_-]+", " ", kind.lower()).replace("rtx ", "rtx")
    found = (one for one in types if re.search(rf"(?<![a-z0-9])(?:rtx)?{one}(?![0-9])", text))
    return max(found, key=len, default="")
