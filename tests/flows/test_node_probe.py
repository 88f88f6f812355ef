"""The check of the nodes that a run would get (``rlhf check --probe``)."""

from pathlib import Path

from control_fakes import NODE, FakeAgent, FakeScheduler, make_spec

from rlhf_core.config.site import Site
from rlhf_core.control.node_probe import PROBES, probe_nodes
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import AttemptState
from rlhf_core.schemas.cluster import SlurmSpec


def test_the_nodes_are_those_of_the_partition_of_the_site(tmp_path: Path) -> None:
    """The default partition of the cluster, which no option of the run names, has no GPUs."""
    site = Site(
        home=tmp_path,
        runs_dir=tmp_path / "runs",
        database_url="",
        scheduler="slurm",
        compute_python="python",
        slurm=SlurmSpec(partition="gpu"),
    )
    scheduler = FakeScheduler(
        nodes=("login", NODE),
        gpus_per_node=8,
        node_gpus={"login": 0, NODE: 8},
        node_partitions={"login": ("cpu",), NODE: ("gpu",)},
        default_partition="cpu",
    )

    def answer() -> None:
        (folder,) = (site.runs_dir / PROBES).iterdir()
        agent = FakeAgent(RunDir(folder))
        agent.probe(unfit=NODE)
        agent.end(AttemptState.FAILED)

    scheduler.on_status = answer
    spec = make_spec(resources={"ranks_per_node": 8, "gpus_per_node": 8})
    (found,) = probe_nodes(spec, site, scheduler, lambda text: None)
    assert found.node == NODE
    assert scheduler.submitted[0].slurm.partition == "gpu"
