"""A Slurm for all files of this folder."""

from collections.abc import Iterator

import pytest
from slurm_cluster import Cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes; a test leaves them idle, and its controller at work."""
    made = Cluster(tmp_path_factory.mktemp("slurm"), nodes=3, gpus=2, kill_wait_s=2)
    made.up()
    yield made
    made.down()
