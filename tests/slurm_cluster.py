"""The throw-away Slurm of ``infra/slurm`` for tests: one per test process, started on first use."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "infra" / "slurm"))

import cluster as throwaway
import node_space
import pytest

__all__ = [
    *("WHY_NOT", "WHY_NO_NAMESPACES", "needs_namespaces", "needs_slurm"),
    *("Cluster", "missing_programs", "node_space", "throwaway"),
]

Cluster = throwaway.Cluster
missing_programs = throwaway.missing_programs
WHY_NOT = f"Slurm is not installed ({', '.join(missing_programs())}): sh infra/system_packages.sh slurm"
WHY_NO_NAMESPACES = WHY_NOT if missing_programs() else node_space.why_not()
needs_slurm = pytest.mark.skipif(bool(missing_programs()), reason=WHY_NOT)
needs_namespaces = pytest.mark.skipif(bool(WHY_NO_NAMESPACES), reason=WHY_NO_NAMESPACES)
