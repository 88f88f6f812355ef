"""A script of torchrun that prints nothing and saves nothing, on two nodes: nothing is known of it but its ranks."""

import signal
import sys
import time
from typing import Any

import pytest
from fault_runs import TORCHRUN
from process_tools import until
from site_files import ROOT
from trainer_runs import STOPPED, TrainerSite, small_run

from rlhf_core.control.views.timeline import all_incidents
from rlhf_core.launch.journal import read_record
from rlhf_core.schemas.failures import FailureKind

pytestmark = [pytest.mark.trainers, pytest.mark.end_to_end, pytest.mark.timeout(900)]

SCRIPT = ROOT / "tests" / "worker" / "targets" / "torch_program.py"
STEP_S = 0.05


def external_program(num_steps: int) -> dict[str, Any]:
    trainer = {
        "kind": "command",
        "environment": sys.prefix,
        "num_steps": num_steps,
        "argv": [*TORCHRUN, str(SCRIPT), "{num_steps}", "0", "none"],
        "resume": "none",
    }
    return small_run(name="external-program", trainer=trainer, resources={"ranks_per_node": 2})


def test_it_completes_and_nothing_is_taken_for_a_failure(site: TrainerSite) -> None:
    """Negative control, for as long as several floors."""
    run = site.begin(site.write(external_program(600)))
    assert site.finish() == "completed", site.described()
    assert all_incidents(run, read_record(run)) == []


def test_a_stopped_rank_of_it_is_found(site: TrainerSite) -> None:
    site.begin(site.write(external_program(600)))
    until(lambda: len(site.ranks()) == 4, "the ranks", 120)
    time.sleep(10)  # so that they are at work
    stopped = site.strike(signal.SIGSTOP, rank=3)
    assert site.finish() == "completed", site.described()
    found = site.measured("SIGSTOP", STOPPED, stopped, time.time())
    print(f"external program: SIGSTOP found after {found.found_s:.1f} s, decided after {found.decided_s:.1f} s")
    assert (found.kind, found.blame_right, found.action_right) == (FailureKind.HANG, True, True), found
