"""A real run on a site that goes down and up during the run; the other tests use stand-ins for jobs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from process_tools import until
from site_files import QUICK, ROOT, options
from sites import Site, state_of
from slurm_cluster import Cluster, needs_slurm

from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import RunState

pytestmark = [pytest.mark.site, needs_slurm, pytest.mark.training, pytest.mark.end_to_end]

TIMEOUT_S = 150.0

REWARD = """\
import os
import time
from pathlib import Path


def held(*, prompts, completions, answer, **columns):
    while "SLURM_JOB_ID" in os.environ and not Path({go!r}).exists():  # preflight tries it too, and is not held
        time.sleep(0.1)
    return [float(one.startswith(right)) for one, right in zip(completions, answer)]
"""
"""In training for as long as the test wants."""

SMALL = (
    "name=held", "model.config.num_hidden_layers=1", "data.generator_args.num_train=64", "preflight.probe=false",
    "data.generator_args.num_eval=8", "loops.warm_start.num_steps=2", "loops.warm_start.algorithm.batch_size=8",
    "loops.main.num_steps=2", "loops.main.algorithm.prompts_per_step=4", "loops.main.algorithm.samples_per_prompt=2",
    "evaluate.num_prompts=8", "resources.num_nodes=1",
)  # fmt: skip


@pytest.fixture
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), nodes=1, kill_wait_s=1)
    with Site(tmp_path_factory.mktemp("site"), cluster=cluster, settings=QUICK).running() as site:
        yield site


def test_a_real_run_outlives_its_site(site: Site, tmp_path: Path) -> None:
    """Its evaluator is started by an agent whose controller ended long before, in the original folder of the agent."""
    site.working_dir = tmp_path
    (tmp_path / "held_reward.py").write_text(REWARD.format(go=str(tmp_path / "go")))
    preset = (ROOT / "infra" / "presets" / "slurm-quickstart.toml").read_text()
    (tmp_path / "held.toml").write_text(preset.replace("rlhf_core.training.rewards:exact_match", "held_reward:held"))
    run_id = site.rlhf("submit", "held.toml", *options(*SMALL), "--json").json()["run_id"]
    run_dir = RunDir.of(site.home / "runs", run_id)
    metrics = run_dir.attempt(1).restart(0).metrics
    until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, timeout_s=TIMEOUT_S)
    assert run_id in site.rlhf("down").stdout
    assert len(site.jobs(run_id)) == 1, "its job does not notice"
    site.rlhf("up")
    until(lambda: site.flow_runs(run_dir) == [("Crashed", False), ("Running", True)], timeout_s=TIMEOUT_S)
    (tmp_path / "go").touch()
    until(lambda: state_of(run_dir) is RunState.COMPLETED, timeout_s=TIMEOUT_S)
    until(lambda: site.flow_runs(run_dir) == [("Crashed", False), ("Completed", True)])
    shown = site.rlhf("show", run_id, "--json").json()
    assert {one["when"] for one in shown["evaluations"]} == {"before", "after"}
    assert (len(shown["attempts"]), shown["incidents"]) == (1, [])
