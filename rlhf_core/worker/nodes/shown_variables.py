"""Allowlist of environment variables whose values a node reveals. Of all others only a keyed hash leaves the node.

A denylist is never complete: every tool has its own names for keys and passwords. So only variables that can explain
differences in training are listed, and credentials inside their values are masked. For all others a hash still shows
that nodes differ; its key is readable only by the owner of the run, so that values cannot be brute-forced.
"""

import fnmatch
from collections.abc import Collection, Mapping
from pathlib import Path

from rlhf_core.diagnosis.nodes.checks import MUST_AGREE
from rlhf_core.diagnosis.nodes.launch_variables import LAUNCHING
from rlhf_core.files.whole import shared_secret
from rlhf_core.schemas.resources import PASSED_VARIABLE
from rlhf_core.text.redaction import is_secret_name, keyed_hash, masked

_OTHERS = """
SLURM_* SLURMD_NODENAME OMPI_* PMI* PMIX* IBV_* MLX5_* NVIDIA_* NVTE_* RAY_* SGLANG_* MEGATRON_* XLA_* NUMEXPR_*
OPENBLAS_* ROCR_* MIOPEN_* GPU_DEVICE_ORDINAL PYTHON* LD_LIBRARY_PATH LD_PRELOAD PATH LANG LC_* TZ
VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV HOSTNAME USER HOME TMPDIR XDG_CACHE_HOME RLHF_NODES RLHF_JOB
RLHF_JOB_ENDS_AT
"""
SHOWN = (*MUST_AGREE, *LAUNCHING, *_OTHERS.split(), PASSED_VARIABLE)
"""Names of variables whose values are shown; ``*`` matches any text."""

HIDDEN = "hidden"
"""Shown in place of a value if there is no key to hash it with; nodes are then not compared by it."""


def shown_variables(environment: Mapping[str, str], key: bytes) -> dict[str, str]:
    """All variables in the form that may be shown.

    Args:
        environment: Environment given to the node.
        key: Key of the attempt; empty if it cannot be read.
    """
    passed = environment.get(PASSED_VARIABLE, "").split(",")
    return {name: shown(name, value, key, passed) for name, value in environment.items()}


def shown(name: str, value: str, key: bytes, passed: Collection[str] = ()) -> str:
    """A value in the form that may be shown: unchanged, with credentials masked, or hashed.

    Args:
        passed: Names of variables passed to the job as secrets.
    """
    is_listed = any(fnmatch.fnmatchcase(name, pattern) for pattern in SHOWN)
    if not is_listed or name in passed or is_secret_name(name):
        return _hash(value, key)
    text = masked(value)
    return value if text == value else f"{text} ({_hash(value, key)})"


def _hash(value: str, key: bytes) -> str:
    return f"{HIDDEN}, hash {keyed_hash(value, key)}" if key else HIDDEN


def attempt_key(path: Path) -> bytes:
    """The key of an attempt, shared by all its nodes and created by the first to need it. Empty if the run directory is
    unusable."""
    try:
        return shared_secret(path)
    except (OSError, ValueError):
        return b""
