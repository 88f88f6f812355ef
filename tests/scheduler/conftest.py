"""A Slurm cluster for all files of this folder."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from folder_fixtures import for_folder
from slurm_cluster import Cluster


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """Three nodes; every test leaves them idle, with a running controller."""

    @contextmanager
    def up() -> Iterator[Cluster]:
        made = Cluster(tmp_path_factory.mktemp("slurm"), nodes=3, gpus=2, kill_wait_s=2)
        made.up()
        yield made
        made.down()

    return for_folder(request, up)
