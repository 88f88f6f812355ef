"""A real run on a site that goes down and up in the middle of it: what the others show with jobs that only pretend."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from shop_floor import Floor, free_port, until
from slurm_cluster import WHY_NOT, Cluster, missing_programs
from whole_site import Site, state_of

from rlhf_core.run_dir import RunDir
from rlhf_core.schemas.attempts import RunState

pytestmark = [
    pytest.mark.site,
    pytest.mark.skipif(bool(missing_programs()), reason=WHY_NOT),
    pytest.mark.training,
    pytest.mark.end_to_end,
]

PATIENCE_S = 150.0

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
    "data.generator_args.num_eval=8", "sft.num_steps=2", "sft.batch_size=8", "train.num_steps=2",
    "grpo.prompts_per_step=4", "grpo.samples_per_prompt=2", "evaluate.num_prompts=8", "resources.num_nodes=1",
)  # fmt: skip


@pytest.fixture
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), nodes=1, kill_wait_s=1)
    cluster.up()
    folder = tmp_path_factory.mktemp("site")
    floor = Floor(folder / "home", free_port(), settings="reconcile_s = 1.0\ningest_s = 0.5")
    floor.variables = {
        **cluster.environment,
        "RLHF_SCHEDULER": "slurm",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    floor.write_settings()
    try:
        floor.rlhf("up")
        yield Site(floor, cluster)
    finally:
        floor.kill_all()
        cluster.down()


def test_a_real_run_outlives_its_site(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its evaluator is started by an agent whose controller is long gone, with the folder that it was started in."""
    monkeypatch.chdir(tmp_path)
    Path("held_reward.py").write_text(REWARD.format(go=str(tmp_path / "go")))
    preset = Path(__file__).parents[2] / "infra" / "presets" / "slurm-quickstart.toml"
    Path("held.toml").write_text(
        preset.read_text().replace("rlhf_core.training.rewards:exact_match", "held_reward:held")
    )
    words = [word for one in SMALL for word in ("--set", one)]
    run_id = json.loads(site.floor.rlhf("submit", "held.toml", *words, "--json").stdout)["run_id"]
    run_dir = RunDir.of(site.floor.home / "runs", run_id)
    metrics = run_dir.attempt(1).restart(0).metrics
    until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, PATIENCE_S)
    assert run_id in site.floor.rlhf("down").stdout
    assert len(site.queue(run_dir)) == 1, "its job does not notice"
    site.floor.rlhf("up")
    until(lambda: site.flow_runs(run_dir) == [("Crashed", False), ("Running", True)], PATIENCE_S)
    Path("go").touch()
    until(lambda: state_of(run_dir) is RunState.COMPLETED, PATIENCE_S)
    until(lambda: site.flow_runs(run_dir) == [("Crashed", False), ("Completed", True)])
    shown = json.loads(site.floor.rlhf("show", run_id, "--json").stdout)
    assert {one["when"] for one in shown["evaluations"]} == {"before", "after"}
    assert (len(shown["attempts"]), shown["incidents"]) == (1, [])
