"""Real runs through the real command line: controller, local scheduler, agent, two ranks, evaluator, database."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhf_core.run_dir import RunDir, read_models
from rlhf_core.schemas.reports import MetricsLine

CONFIG = """
name = "tiny"
seed = 3

[model]
tokenizer = "char"
[model.config]
model_type = "qwen3"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
max_position_embeddings = 64

[data]
generator = "rlhf_core.training.tasks:sort_digits"
generator_args = { num_digits = 3, num_train = 400, num_eval = 32 }
max_prompt_tokens = 8

[sft]
num_steps = 12
batch_size = 32
learning_rate = 3e-3

[train]
algorithm = "grpo"
num_steps = 30
learning_rate = 1e-4
micro_batch_size = 16
log_samples_every = 1

[grpo]
prompts_per_step = 8
samples_per_prompt = 4
measure_kl = true

[rollout]
max_new_tokens = 4

[evaluate]
num_prompts = 32
every_num_steps = 10

[checkpoint]
every_num_steps = 5

[resources]
ranks_per_node = 2

[supervise]
backoff_s = 0
"""


@dataclass
class Finished:
    """A command that ended."""

    returncode: int
    stdout: str
    stderr: str

    def json(self) -> Any:
        """Its standard output, parsed."""
        return json.loads(self.stdout)


@dataclass
class Shop:
    """A home of its own, and the ``rlhf`` command run in it as a user would run it."""

    home: Path
    environment: dict[str, str] = field(default_factory=dict)
    _started: list["subprocess.Popen[str]"] = field(default_factory=list)

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """Start the command in its own session and go on."""
        process = subprocess.Popen(
            [sys.executable, "-m", "rlhf_core.cli.main", *arguments],
            cwd=self.home,
            env={**os.environ, "RLHF_HOME": str(self.home), "COLUMNS": "120", **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def rlhf(self, *arguments: str, expect: int | None = 0, timeout: float = 240) -> Finished:
        """Run the command to its end."""
        process = self.start(*arguments)
        stdout, stderr = process.communicate(timeout=timeout)
        if expect is not None:
            assert process.returncode == expect, f"rlhf {arguments} -> {process.returncode}\n{stdout}\n{stderr}"
        return Finished(process.returncode, stdout, stderr)

    def config(self, text: str = CONFIG) -> str:
        """A config file in this home."""
        path = self.home / "tiny.toml"
        path.write_text(text)
        return str(path)

    def only_run(self) -> RunDir:
        """The directory of the only run there is."""
        (path,) = (self.home / "runs").iterdir()
        return RunDir(path)

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        """Ask the database, past all of our own code."""
        with sqlite3.connect(self.home / "history.db") as connection:
            return connection.execute(statement).fetchall()

    def end(self) -> None:
        """End whatever is still there."""
        for process in self._started:
            if process.poll() is None:
                kill_tree(process.pid)
                process.wait()


def kill_tree(pid: int) -> int:
    """SIGKILL a process and every descendant, children of sessions of their own included; how many there were."""
    root = psutil.Process(pid)
    doomed = [root, *root.children(recursive=True)]
    for process in doomed:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(doomed, timeout=10)
    return len(doomed)


def wait_until(condition: Callable[[], Any], what: str, timeout: float = 150) -> Any:
    """Poll until ``condition`` gives something true; fail with ``what`` otherwise."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    pytest.fail(f"waited {timeout} s for: {what}")


def last_step(run: RunDir) -> int:
    """The last step in any metrics file of the run."""
    lines = [
        line
        for attempt in run.attempts()
        for restart in attempt.restarts()
        for line in read_models(restart.metrics, MetricsLine)
    ]
    return max((line.step for line in lines), default=0)


def wait_for_step(shop: Shop, step: int, process: "subprocess.Popen[str]") -> RunDir:
    """Wait until the only run of the shop has reached a step; its directory."""

    def reached() -> bool:
        if process.poll() is not None:
            stdout, stderr = process.communicate()
            pytest.fail(f"rlhf ended with {process.returncode} before step {step}\n{stdout}\n{stderr}")
        runs = list((shop.home / "runs").iterdir()) if (shop.home / "runs").is_dir() else []
        return bool(runs) and last_step(RunDir(runs[0])) >= step

    wait_until(reached, f"step {step}")
    return shop.only_run()


def curve(shop: Shop) -> dict[tuple[str, int], float]:
    """The effective metrics that must not depend on the machine: name and step to value, each once."""
    rows = shop.rows("SELECT key, step, value FROM run_curve")
    keys = [(key, step) for key, step, _ in rows]
    assert len(keys) == len(set(keys)), "a metric stands twice in the effective curve"
    return {(key, step): value for key, step, value in rows if not key.startswith(("time/", "speed/"))}
