"""TRL 0.16.1, whose CPO hangs on several ranks with NCCL (huggingface/trl#3068): refused, found, and not retried.

gloo does not wait for ever: it compares the sizes, throws in a thread of its own, and the rank is ended by SIGABRT.
Both are the same disagreement.
"""

from pathlib import Path

import pytest
from fault_runs import TORCHRUN
from trainer_runs import ENVIRONMENTS, Tiny, TrainerSite, merged, small_run

from rlhf_core.control.views.timeline import all_decisions, all_incidents
from rlhf_core.launch.journal import read_record
from rlhf_core.schemas.failures import Action, FailureKind

pytestmark = [
    pytest.mark.trainers,
    pytest.mark.end_to_end,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (ENVIRONMENTS / "trl016").is_dir(),
        reason=f"needs {ENVIRONMENTS}/trl016 with trl==0.16.1 and transformers==4.51.3, made by hand",
    ),
]
SCRIPT = Path(__file__).parent / "targets" / "cpo_of_trl_016.py"


def test_ranks_that_disagree_are_found_and_the_run_is_stopped(site: TrainerSite, tmp_path: Path) -> None:
    tiny = Tiny.made_with("trl016", tmp_path / "tiny")
    trainer = {
        "kind": "command",
        "framework": "trl",
        "algorithm": "cpo",
        "environment": str(ENVIRONMENTS / "trl016"),
        "num_steps": 40,
        "argv": [*TORCHRUN, str(SCRIPT), "{model}", "{train}", "{output_dir}", "{num_steps}"],
        "variables": {"HF_HUB_OFFLINE": "1"},
    }
    settings = small_run(
        name="hangs", trainer=trainer, model={"path": tiny.model}, data={"train": tiny.data("trl-cpo")}
    )

    checked = site.rlhf("check", site.write(settings), "--json", code=2).json()
    (block,) = (one for one in checked if one["status"] == "blocked")
    assert "trl 0.16.1: CPO, SimPO and ORPO" in block["found"]
    assert "issues/3068" in block["expected"]

    off = {"preflight": {"off": {"environment.versions": "to see what becomes of it"}}}
    config = site.write(merged(settings, off), "off.toml")
    run = site.begin(config)
    assert site.finish() == "failed", site.described()
    found = all_incidents(run, read_record(run))
    print([(one.failure_kind.value, one.message) for one in found])
    assert {one.failure_kind for one in found} == {FailureKind.COLLECTIVE_MISMATCH}, found
    assert all_decisions(run, read_record(run))[-1].action is Action.STOP
    assert [(one.attempt, one.restart) for one in run.restarts()] == [(1, 0), (1, 1)], "confirmed once, then given up"
