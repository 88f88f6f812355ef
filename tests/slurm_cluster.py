"""The throw-away Slurm of ``infra/slurm`` for tests: one for each test process, started when first asked for."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "infra" / "slurm"))

import cluster as throwaway

__all__ = ["WHY_NOT", "Cluster", "missing_programs", "throwaway"]

Cluster = throwaway.Cluster
missing_programs = throwaway.missing_programs
WHY_NOT = f"Slurm is not installed ({', '.join(missing_programs())}): sh infra/system_packages.sh slurm"
