"""Each preset of ms-swift and TRL on two nodes of Slurm: two ranks lost on the way, trained to the end, evaluated.

Seconds are printed (``pytest -s``) and not held: docs/benchmarks.md has those of a quiet machine.
"""

import signal
import time
from itertools import pairwise

import pytest
from fault_inject import Truth
from fault_runs import steps
from trainer_runs import KILLED, STOPPED, Tiny, TrainerSite, preset_run

from rlhf_core.files.whole import read_model
from rlhf_core.run_dir.run import RunDir
from rlhf_core.worker.command.launch import LaunchOrder

pytestmark = [pytest.mark.trainers, pytest.mark.end_to_end, pytest.mark.timeout(1800)]

NUM_STEPS = 160
"""Far more than lie before the second fault: on a machine with nothing else to do a step takes a tenth of a second, and
is known a second or more after it was made."""
EVERY = 24
"""A checkpoint is taken once nothing has been written to it for two seconds; the trainers keep their last two."""
OF_ALL = {"train/loss", "train/grad_norm", "train/learning_rate"}
OF_GRPO = {"reward/mean", "rollout/length_mean"}
OF_PAIRS = {"preference/chosen_reward", "preference/margin", "preference/accuracy"}
CURVE = "SELECT step FROM run_curve WHERE run_id = ? AND key = 'train/loss' ORDER BY step"
EVALUATIONS = "SELECT when_made, name, checkpoint_step, num_prompts FROM evaluations WHERE run_id = ? ORDER BY 1, 2"


@pytest.mark.parametrize("preset", ["trl-cpo", "trl-orpo", "trl-grpo", "swift-cpo", "swift-dpo", "swift-grpo"])
def test_it_is_trained_to_the_end_whatever_becomes_of_its_ranks(preset: str, site: TrainerSite, tiny: Tiny) -> None:
    began = time.time()
    run = site.begin(site.write(preset_run(preset, tiny, NUM_STEPS, EVERY)))
    killed = site.strike_at(EVERY + 2, signal.SIGKILL, rank=1)
    site.goes_on(killed)
    stopped = site.strike_at(killed.step + EVERY + 2, signal.SIGSTOP, rank=0)
    site.goes_on(stopped)
    assert site.finish() == "completed", site.described()
    ended = time.time()
    assert_found(site, preset, killed, stopped, ended)
    assert_goes_on_where_it_was(run)
    print(f"{preset}: completed after {ended - began:.0f} s with both")

    # Metrics of every step under the names of this project, in the files and in the database.
    names = OF_ALL | (OF_GRPO if preset.endswith("grpo") else OF_PAIRS)
    by_step = {line.step: line.metrics for _, line in steps(run)}
    assert sorted(by_step) == list(range(1, NUM_STEPS + 1))
    assert {step: names - values.keys() for step, values in by_step.items() if names - values.keys()} == {}
    assert [step for (step,) in site.rows(CURVE, run.run_id)] == list(range(1, NUM_STEPS + 1))

    # Its last checkpoint is published, and measured against the model that it began with.
    assert run.checkpoints()[-1].step == NUM_STEPS
    assert site.rows(EVALUATIONS, run.run_id) == [
        ("after", "greedy", NUM_STEPS, 8),
        ("after", "sampled", NUM_STEPS, 8),
        ("before", "greedy", 0, 8),
        ("before", "sampled", 0, 8),
    ]


def assert_found(site: TrainerSite, preset: str, killed: Truth, stopped: Truth, ended: float) -> None:
    """Both faults were found, the right rank and node blamed, and the right thing done."""
    kinds = []
    for row, expected, truth, until in (
        ("SIGKILL", KILLED, killed, stopped.time),
        ("SIGSTOP", STOPPED, stopped, ended),
    ):
        found = site.measured(row, expected, truth, until)
        print(
            f"{preset}: {row} found after {found.found_s:.1f} s, decided after {found.decided_s:.1f} s, training again "
            f"after {found.again_s:.1f} s (cold start {found.cold_s:.1f} s), {found.steps_lost} steps lost"
        )
        assert (found.class_right, found.blame_right, found.action_right) == (True, True, True), found
        kinds.append(found.kind)
    # A model of random weights may never end a completion, which is an incident too, and leaves the run going.
    asked = "SELECT failure_kind FROM incidents WHERE run_id = ? AND failure_kind != 'degenerate_rl' ORDER BY seen_at"
    assert [kind for (kind,) in site.rows(asked, site.only_run().run_id)] == kinds


def assert_goes_on_where_it_was(run: RunDir) -> None:
    """Every start goes on at the step after its checkpoint, and makes each step once."""
    trained = []
    for start in run.restarts():
        order = read_model(start.launch_order, LaunchOrder)
        if order is not None:  # the evaluation is a start as well
            made = [line.step for one, line in steps(run) if one.root == start.root]
            trained.append((int(order.checkpoint.rpartition("-")[2] or 0), made))
    assert len(trained) == 3
    assert trained[0][0] == 0
    for (_, before), (saved, after) in pairwise(trained):
        assert saved % EVERY == 0
        assert 0 < saved <= before[-1] + EVERY
        # Steps that the start before had made, and had no time to record, come first.
        assert after[0] in range(before[-1] + 1, saved + 1) or after[0] == saved + 1
        assert after == list(range(after[0], after[-1] + 1))
