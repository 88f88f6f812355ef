"""Runs of other projects' trainers on a throw-away Slurm: their configs, their ranks, and what is done to these."""

import json
import os
import signal
import subprocess
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from fault_cases import Expected, Fault
from fault_inject import Truth
from fault_measure import Row, measure
from fault_runs import DisturbedSite, Stuck, Worker, program_ranks, steps
from site_files import ROOT
from sites import last_step

from rlhf_core.launch.journal import read_record
from rlhf_core.run_dir.run import RunDir

ENVIRONMENTS = Path(os.environ.get("RLHF_TRAINER_ENVIRONMENTS", ROOT / ".trainers")).absolute()
"""Folder of the trainers' environments."""
PRESETS = ROOT / "infra" / "presets"
START_S = 600.0
"""Longest time to the first step: two trainers import at once, on few cores."""
END_S = 1200.0
FLOORS = {"floor_s": 6.0, "rollout_floor_s": 6.0, "reward_floor_s": 6.0, "checkpoint_floor_s": 8.0}
"""Silence that is allowed, far below the defaults."""
PROMPT = "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
"""A prompt of the evaluation, in the words of the tiny model's chat template."""
KILLED = Expected(frozenset({"worker_killed"}), frozenset({"restart_in_place"}), "rank", "death")
STOPPED = Expected(frozenset({"hang"}), frozenset({"restart_in_place"}), "rank", "hang")


@dataclass(frozen=True)
class Tiny:
    """A model and data that every trainer trains in seconds."""

    folder: Path

    @classmethod
    def made_with(cls, environment: str, folder: Path) -> "Tiny":
        """Make them with the Python of an environment: what one version of transformers writes an older one may not
        read."""
        program = ROOT / "tests" / "worker" / "command" / "tiny_model.py"
        subprocess.run(
            [ENVIRONMENTS / environment / "bin" / "python", program, folder], check=True, capture_output=True
        )
        return cls(folder)

    @property
    def model(self) -> str:
        return str(self.folder / "Qwen3-0.6B")

    def data(self, preset: str) -> str:
        """Training data in the format of a preset."""
        framework, _, algorithm = preset.partition("-")
        return str(self.folder / f"{framework}_{'grpo' if algorithm == 'grpo' else 'pairs'}.jsonl")

    def held_out(self) -> str:
        """Prompts and answers for the evaluation."""
        path = self.folder / "held_out.jsonl"
        rows = [{"prompt": f"sort {one}", "answer": "".join(sorted(str(one)))} for one in range(321, 337)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A config with others of its settings, table by table."""
    result = dict(base)
    for name, value in changes.items():
        old = result.get(name)
        result[name] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def with_arguments(line: Sequence[str], changes: Mapping[str, str]) -> list[str]:
    """A launch line with other values of some options; those that it has not are added."""
    words = list(line)
    for option, value in changes.items():
        if option in words:
            words[words.index(option) + 1] = value
        else:
            words += [option, value]
    return words


def small_run(**changes: Any) -> dict[str, Any]:
    """Settings of every run of these tests: two nodes, quick supervision, and no trial."""
    base = {
        "resources": {"num_nodes": 2, "ranks_per_node": 1},
        "supervise": {**FLOORS, "suspect_s": 2.0, "setup_floor_s": 120.0, "evaluate_floor_s": 60.0, "backoff_s": 0.0},
        "preflight": {"trial": "off"},
    }
    return merged(base, changes)


def preset_run(preset: str, tiny: Tiny, num_steps: int, every: int) -> dict[str, Any]:
    """A preset for the tiny model, with an evaluation of its checkpoint."""
    config = tomllib.loads((PRESETS / f"{preset}.toml").read_text())
    framework, _, algorithm = preset.partition("-")
    arguments = {"--max_length": "128"}
    code: dict[str, Any] = {}
    if algorithm == "grpo":
        code = {"code": {"paths": [str(tiny.folder / "rewards.py")]}}
        arguments = {"--max_completion_length": "16", "--num_generations": "4", "--per_device_train_batch_size": "4"}
    if preset == "trl-grpo":
        arguments |= {"--reward_functions": "rewards.digits"}
    if preset == "swift-grpo":
        arguments |= {"--external_plugins": "{code}/rewards.py", "--reward_funcs": "digits"}
    changes = small_run(
        model={"path": tiny.model},
        data={"train": tiny.data(preset), "eval": tiny.held_out(), "prompt_template": PROMPT},
        rollout={"max_new_tokens": 12},
        evaluate={"num_prompts": 8},
        trainer={
            "num_steps": num_steps,
            "argv": with_arguments(config["trainer"]["argv"], arguments),
            "environment": str(ENVIRONMENTS / framework),
        },
        checkpoint={"every_num_steps": every},
        **code,
    )
    return merged(config, changes)


@dataclass
class TrainerSite(DisturbedSite):
    """A site with one run of another project's trainer."""

    def write(self, config: Mapping[str, Any], name: str = "trial.toml") -> str:
        """Write a config; its path."""
        path = self.home / name
        path.write_text(tomli_w.dumps(config))
        return str(path)

    def begin(self, config: str, *options: str) -> RunDir:
        """Start ``rlhf run`` and wait for the run directory."""
        self.drive("run", config, "--no-prefect", *options)
        return self.wait_for(lambda: self.run, "the run directory", START_S)

    def finish(self) -> str:
        """Wait for the end of ``rlhf run``; the state of the run."""
        self.wait_for(lambda: self.ended, "the end of the run", END_S)
        assert self.run is not None
        return read_record(self.run).state.value

    def ranks(self) -> list[Worker]:
        """The ranks of the trainer itself."""
        assert self.run is not None
        return program_ranks(self.run.run_id)

    def strike(self, number: signal.Signals, rank: int) -> Truth:
        """Send a signal to a rank of the trainer, now."""
        victim = next((one for one in self.ranks() if one.rank == rank), None)
        if victim is None:
            raise Stuck(f"rank {rank} is gone, perhaps because training is over; {self.described()}")
        truth = Truth(time.time(), last_step(self.run), victim.rank, victim.node)
        os.kill(victim.pid, number)
        return truth

    def strike_at(self, step: int, number: signal.Signals, rank: int) -> Truth:
        """Wait until a step was made and is saved by a checkpoint, then send the signal."""
        run = self.run
        assert run is not None

        def trains() -> bool:
            newest = max((restart.restart for restart, _ in steps(run)), default=-1)
            made = [line.step for restart, line in steps(run) if restart.restart == newest]
            return max(made, default=0) >= step and bool(run.checkpoints())

        self.wait_for(trains, f"step {step}", START_S)
        return self.strike(number, rank)

    def goes_on(self, truth: Truth) -> None:
        """Wait until training is two steps past a fault, in a start of its own."""
        run = self.run
        assert run is not None

        def again() -> bool:
            made = [line.step for _, line in steps(run) if line.time.timestamp() > truth.time + 1]
            newest = max(restart.restart for restart, _ in steps(run))
            first = min(line.time.timestamp() for restart, line in steps(run) if restart.restart == newest)
            return first > truth.time and max(made, default=0) >= truth.step + 2

        self.wait_for(again, "training to go on", START_S)

    def measured(self, row: str, expected: Expected, truth: Truth, until: float) -> Row:
        """Read what became of a fault."""
        assert self.run is not None
        fault = Fault(row, expected, truth.step)
        return measure(row, 0, fault, truth, until, self.run, read_record(self.run).state.value, None, 1)

    def described(self) -> str:
        """Everything that says what happened, for the message of an assertion."""
        assert self.run is not None
        logs = "\n".join(
            f"== {path}\n{path.read_text(errors='replace')[-3000:]}" for path in self.run.root.rglob("*.log")
        )
        return f"{(self.home / 'rlhf.log').read_text()}\n{logs}"
