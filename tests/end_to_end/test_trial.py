"""A trial of a change on this machine, with real workers, before the run itself starts."""

import pytest
from process_tools import until
from site_files import options, write_pretended_agent
from sites import TIMEOUT_S, Site, go

pytestmark = [pytest.mark.end_to_end, pytest.mark.training]

BREAKS = """
import os

def score(*, completions, **columns):
    if "RANK" in os.environ:
        raise RuntimeError("the new reward does not work")
    return [float("1" in completion) for completion in completions]
"""
"""A fault that only the nodes show: a look at the data before finds nothing wrong with it."""

SHORT = (*options("loops.warm_start.num_steps=1", "loops.main.num_steps=4", "evaluate.num_prompts=8"), "--no-prefect")
TRIAL = ("--set", "preflight.trial=run", "--set", "preflight.trial_steps=1", *SHORT)


def before_the_change(site: Site, config: str) -> None:
    """Make a run that completes, without workers: only its settings and its end count."""
    write_pretended_agent(site.home / "python")
    process = site.start("run", config, *SHORT, RLHF_COMPUTE_PYTHON=str(site.home / "python"))
    go(until(lambda: next(iter(site.runs()), None), "the run directory"))
    assert process.wait(TIMEOUT_S) == 0, process.communicate()


def test_a_change_gets_a_trial_and_a_broken_one_costs_only_its_trial(site: Site) -> None:
    config = site.config({"resources.ranks_per_node": 1})
    before_the_change(site, config)
    (site.home / "broken.py").write_text(BREAKS)

    broken = site.rlhf("run", config, "--set", 'reward.functions=["broken:score"]', *TRIAL, code=2)
    assert "trial.all_nodes" in broken.stderr
    assert "the new reward does not work" in broken.stderr
    (run, *_) = site.rlhf("runs", "--json").json()
    shown = site.rlhf("show", run["run_id"], "--json").json()
    assert (run["state"], shown["attempts"]) == ("failed", [])
    found = {check["id"]: check for check in shown["checks"]}
    assert "reward.functions" in found["trial.needed"]["found"]
    assert "code none -> " in found["trial.needed"]["found"]

    good = site.rlhf("run", config, "--set", "rollout.max_new_tokens=5", *TRIAL, "--json")
    assert "trial on one node" in [stage["name"] for stage in good.json()["stages"]]
    (run, *_) = site.rlhf("runs", "--json").json()
    shown = site.rlhf("show", run["run_id"], "--json").json()
    assert run["state"] == "completed"
    found = {check["id"]: check for check in shown["checks"]}
    assert found["trial.all_nodes"]["status"] == "passed"
    assert "2 steps on 1 node" in found["trial.all_nodes"]["found"]
    assert "s per step" in found["trial.all_nodes"]["found"]

    trials = [one for one in site.rlhf("runs", "--trials", "--json").json() if one["trial_of"]]
    assert [one["state"] for one in trials] == ["completed", "failed"]
