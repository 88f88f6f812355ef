"""Fixtures of the trials of other projects' trainers: their environments, a tiny model, and a Slurm of two nodes.

Needs minutes for each test and environments of gigabytes: ``make test-trainers``.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from slurm_cluster import WHY_NOT, Cluster, missing_programs
from trainer_runs import Tiny, TrainerSite

NUM_NODES = 2


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The tiny model and its data, made with the environment of TRL."""
    return Tiny.made_with("trl", tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def site(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerSite]:
    """A home and a Slurm for one run."""
    if missing_programs():
        pytest.skip(WHY_NOT)
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), nodes=NUM_NODES, kill_wait_s=2)
    with TrainerSite(tmp_path / "home", cluster=cluster).running(services=False) as site:
        assert isinstance(site, TrainerSite)
        yield site
