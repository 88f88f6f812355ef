"""Launch lines that a user has today: two commands from each to a supervised run that completes.

``rlhf wrap`` is run where the line would be: in its folder, with its environment active.
"""

import time
from typing import Any

import pytest
from fault_runs import steps
from site_files import ROOT
from sites import state_of
from trainer_runs import ENVIRONMENTS, Tiny, TrainerSite

from rlhf_core.schemas.attempts import RunState

pytestmark = [pytest.mark.trainers, pytest.mark.end_to_end, pytest.mark.timeout(1200)]

NUM_STEPS = 12
DRIVER = ROOT / "infra" / "trainers" / "trl_train.py"
SWIFT = """\
#!/bin/bash
# Preferences, on both cores.
export ACCELERATE_USE_CPU=true HF_HUB_OFFLINE=1
MODEL={model}
NPROC_PER_NODE=2 swift rlhf \\
    --rlhf_type dpo --model $MODEL --dataset {data} --split_dataset_ratio 0 \\
    --tuner_type full --max_length 128 --per_device_train_batch_size 4 --max_steps {steps} --save_steps 4 \\
    --logging_steps 1 --report_to tensorboard --output_dir output
"""


def in_environment(name: str) -> dict[str, Any]:
    """Variables of a shell in which a virtual environment is active."""
    return {"VIRTUAL_ENV": str(ENVIRONMENTS / name), "HF_HUB_OFFLINE": "1"}


def wrapped_and_run(site: TrainerSite, name: str, *line: str) -> None:
    """The two commands, and what has to come of them."""
    began = time.time()
    site.rlhf("wrap", "-o", "mine.toml", *line, **in_environment(name))
    written = time.time()
    site.rlhf("run", "mine.toml", "--no-prefect", timeout_s=600, **in_environment(name))
    print(f"{name}: config after {written - began:.1f} s, run completed {time.time() - written:.0f} s later")
    run = site.only_run()
    assert state_of(run) is RunState.COMPLETED
    assert [line.step for _, line in steps(run)] == list(range(1, NUM_STEPS + 1))
    assert all("train/loss" in line.metrics for _, line in steps(run))
    assert run.checkpoints()[-1].step == NUM_STEPS


def test_a_line_for_torchrun(site: TrainerSite, tiny: Tiny) -> None:
    line = ["torchrun", "--nproc_per_node", "2", str(DRIVER), "cpo", "--model_name_or_path", tiny.model]
    line += ["--train_file", tiny.data("trl-cpo"), "--max_length", "128", "--per_device_train_batch_size", "4"]
    line += ["--max_steps", str(NUM_STEPS), "--save_steps", "4", "--logging_steps", "1", "--report_to", "tensorboard"]
    wrapped_and_run(site, "trl", "--", *line, "--output_dir", "out")


def test_a_shell_script_with_swift(site: TrainerSite, tiny: Tiny) -> None:
    text = SWIFT.format(model=tiny.model, data=tiny.data("swift-dpo"), steps=NUM_STEPS)
    (site.home / "dpo.sh").write_text(text)
    wrapped_and_run(site, "swift", "dpo.sh")
