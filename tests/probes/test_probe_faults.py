"""The probe on a real Slurm of three nodes: every fault is reported with its node, and a healthy cluster has none.

A slow link is found in a whole run in ``test_probe_runs.py``. For each fault in a separate probe, and 30 healthy
probes, see ``tests/benchmarks/bench_probe.py``.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from probe_faults import FEW_PROBES, NUM_NODES, Case, probe
from slurm_cluster import Cluster, needs_namespaces

pytestmark = needs_namespaces


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), nodes=NUM_NODES, namespaces=True)
    cluster.up()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield cluster
    cluster.down()


@pytest.mark.parametrize("cases", FEW_PROBES.values(), ids=FEW_PROBES)
def test_faults_are_named_with_their_node(cluster: Cluster, cases: tuple[Case, ...], tmp_path: Path) -> None:
    assert probe(cluster, tmp_path, *cases).problems_with(*cases) == []


def test_a_healthy_cluster_has_no_findings(cluster: Cluster, tmp_path: Path) -> None:
    seen = probe(cluster, tmp_path)
    assert seen.problems_with() == []
    made = {result.id for result in seen.results}
    assert {"probe.all_reduce", "probe.all_gather", "probe.bandwidth", "probe.matmul", "node.content"} <= made
    assert list((tmp_path / "runs" / ".probes").iterdir()) == []
