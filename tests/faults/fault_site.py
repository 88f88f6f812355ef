"""A place where runs are disturbed: a home of its own, the ``rlhf`` command, a scheduler, and what else can be taken
away from under a run."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from rlhf_core.run_dir import RestartDir, RunDir, read_models
from rlhf_core.schemas.reports import AgentEvent, MetricsLine

Found = TypeVar("Found")

HERE = Path(__file__).parent
CHECKPOINT_EVERY = 5
FLOOR_S = 5.0

CONFIG = """
name = "disturbed"
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
generator = "saboteur:digits"
generator_args = { num_digits = 3, num_train = 400, num_eval = 32 }
max_prompt_tokens = 8

[sft]
num_steps = 5
batch_size = 32
learning_rate = 3e-3

[train]
algorithm = "grpo"
num_steps = 20
learning_rate = 1e-4
micro_batch_size = 8
log_samples_every = 0

[grpo]
prompts_per_step = 8
samples_per_prompt = 4

[rollout]
max_new_tokens = 4

[reward]
functions = ["saboteur:reward"]

[evaluate]
scorer = "saboteur:score"
num_prompts = 32
every_num_steps = 5

[checkpoint]
every_num_steps = 5

[supervise]
backoff_s = 0
floor_s = 5
rollout_floor_s = 5
reward_floor_s = 5
weight_sync_floor_s = 5
checkpoint_floor_s = 8
evaluate_floor_s = 5
setup_floor_s = 60
"""


class Stuck(Exception):
    """Something that should have happened did not, within a generous time."""


@dataclass
class Site:
    """A home, and at most one run in it."""

    home: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    """Scheduler, database and so on."""
    process: "subprocess.Popen[bytes] | None" = None
    """The ``rlhf run`` or ``rlhf resume`` that drives the run."""

    def __post_init__(self) -> None:
        self.struck.mkdir(parents=True, exist_ok=True)

    @property
    def struck(self) -> Path:
        """Folder of what the saboteur has done."""
        return self.home / "struck"

    def prepare(self, faults: list[dict[str, Any]], pace_s: float) -> Path:
        """Lay out config and saboteur; the config file."""
        shutil.copy2(HERE / "saboteur.py", self.home)
        plan = {"struck": str(self.struck), "pace_s": pace_s, "faults": faults}
        (self.home / "saboteur.json").write_text(json.dumps(plan))
        config = self.home / "disturbed.toml"
        config.write_text(CONFIG + '\n[code]\npaths = ["saboteur.py", "saboteur.json"]\n')
        return config

    def start(self, *arguments: str) -> None:
        """Start ``rlhf`` in its own session; what it prints goes to ``rlhf.log``."""
        with (self.home / "rlhf.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rlhf_core.cli.main", *arguments],
                cwd=self.home,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def do(self, *arguments: str) -> None:
        """Run an ``rlhf`` command to its good end."""
        command = [sys.executable, "-m", "rlhf_core.cli.main", *arguments]
        subprocess.run(command, cwd=self.home, env=self._environment(), capture_output=True, timeout=120, check=True)

    def ask(self, *arguments: str) -> dict[str, Any]:
        """JSON that an ``rlhf`` command prints."""
        command = [sys.executable, "-m", "rlhf_core.cli.main", *arguments, "--json"]
        done = subprocess.run(
            command, cwd=self.home, env=self._environment(), capture_output=True, timeout=120, check=True
        )
        return dict(json.loads(done.stdout))

    def _environment(self) -> dict[str, str]:
        own = {"RLHF_HOME": str(self.home), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        return {**os.environ, **own, **self.environment}

    @property
    def run(self) -> RunDir | None:
        """The run, once it is there."""
        runs = Path(self.environment.get("RLHF_RUNS", self.home / "runs"))
        found = [path for path in runs.iterdir() if not path.name.startswith(".")] if runs.is_dir() else []
        return RunDir(found[0]) if found else None

    @property
    def ended(self) -> bool:
        """Whether the command that drives the run has ended."""
        return self.process is None or self.process.poll() is not None

    def wait_for(self, question: Callable[[], Found | None], what: str, timeout_s: float) -> Found:
        """Poll until ``question`` answers.

        Raises:
            Stuck: it did not in time, or the run ended before.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            ended = self.ended
            found = question()
            if found:
                return found
            if ended:
                raise Stuck(f"the run ended before {what}")
            if time.monotonic() > deadline:
                raise Stuck(f"waited {timeout_s:.0f} s for {what}")
            time.sleep(0.05)

    def close(self) -> None:
        """End the command if it is still there, then the run's job."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        run = self.run
        if run is not None:
            command = [sys.executable, "-m", "rlhf_core.cli.main", "cancel", run.run_id]
            subprocess.run(
                command, cwd=self.home, env=self._environment(), capture_output=True, timeout=120, check=False
            )


# ---------------------------------------------------------------------------------------------------------------------
# What a run shows of itself


@dataclass(frozen=True)
class Worker:
    """One rank of the newest start of the trainer."""

    rank: int
    node: str
    pid: int


def restarts(run: RunDir) -> Iterator[RestartDir]:
    """All starts of workers, oldest first."""
    for attempt in run.attempts():
        yield from attempt.restarts()


def events(run: RunDir) -> list[tuple[RestartDir, AgentEvent]]:
    """What all agents wrote down, by time."""
    found = [
        (restart, event)
        for restart in restarts(run)
        for path in sorted(restart.root.glob("events-*.jsonl"))
        for event in read_models(path, AgentEvent)
    ]
    return sorted(found, key=lambda pair: pair[1].time)


def steps(run: RunDir) -> list[tuple[RestartDir, MetricsLine]]:
    """Every training step that was made, in the order in which it was."""
    return [(restart, line) for restart in restarts(run) for line in read_models(restart.metrics, MetricsLine)]


def last_step(run: RunDir | None) -> int:
    """The highest step that was made."""
    return max((line.step for _, line in steps(run)), default=0) if run is not None else 0


def workers(run: RunDir) -> list[Worker]:
    """The ranks of the newest start, as their agents announced them."""
    started = [(restart, event) for restart, event in events(run) if event.kind == "workers_started"]
    newest = max(((one.attempt, one.restart) for one, _ in started), default=None)
    found = []
    for restart, event in started:
        if (restart.attempt, restart.restart) != newest:
            continue
        ranks, pids = event.data["ranks"], event.data["pids"]
        assert isinstance(ranks, dict)
        assert isinstance(pids, dict)
        found += [Worker(int(str(rank)), event.node, int(str(pids[local]))) for local, rank in ranks.items()]
    return sorted(found, key=lambda worker: worker.rank)


def agent_pids(run: RunDir) -> dict[str, int]:
    """Process ids of the agents of the newest attempt, by node."""
    attempt = run.attempts()[-1].number
    return {
        event.node: int(found[1])
        for restart, event in events(run)
        if event.kind == "agent_started" and restart.attempt == attempt
        if (found := re.search(r"pid (\d+)", event.message))
    }


def at(seconds: float) -> datetime:
    """A time since the epoch as the files have it."""
    return datetime.fromtimestamp(seconds, tz=UTC)
