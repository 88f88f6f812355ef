"""Runs that are disturbed: their site, the command that drives them, and their visible state."""

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import psutil
from sites import Site

from rlhf_core.files.appended import read_models
from rlhf_core.launch.journal import read_record
from rlhf_core.run_dir.attempt import RestartDir
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.reports import AgentEvent, MetricsLine
from rlhf_core.schemas.resources import JOB_VARIABLE
from rlhf_core.worker.in_rank.rlhf_rank_file import PATH_VARIABLE

Found = TypeVar("Found")

HERE = Path(__file__).parent
CHECKPOINT_EVERY = 5
PROGRAMS = ("saboteur.py", "saboteur.json")

TORCHRUN = (
    "torchrun", "--nnodes", "{num_nodes}", "--node-rank", "{node_rank}", "--nproc-per-node", "{ranks_per_node}",
    "--master-addr", "{master_addr}", "--master-port", "{master_port}",
)  # fmt: skip
"""The first words of a launch line."""

SABOTAGED: Mapping[str, Any] = {
    "name": "disturbed",
    "data.generator": "saboteur:digits",
    "loops.warm_start.num_steps": 5,
    "loops.main.num_steps": 20,
    "trainer.micro_batch_size": 8,
    "trainer.log_samples_every": 0,
    "loops.main.algorithm.measure_kl": None,
    "reward.functions": ["saboteur:reward"],
    "reward.timeout_s": 0,  # the faults are those of a rank
    "evaluate.scorer": "saboteur:score",
    "evaluate.every_num_steps": CHECKPOINT_EVERY,
    "checkpoint.every_num_steps": CHECKPOINT_EVERY,
    "resources.ranks_per_node": None,
    **{f"supervise.{name}_s": 5 for name in ("floor", "rollout_floor", "reward_floor", "weight_sync_floor")},
    "supervise.checkpoint_floor_s": 8,
    "supervise.evaluate_floor_s": 5,
    "supervise.setup_floor_s": 60,
    "preflight.min_relative_speed": 0,  # the nodes share the cores of one machine, with other work on it
    "code.paths": PROGRAMS,
}
"""Changes of settings for a run that the saboteur disturbs from inside."""


class Stuck(Exception):
    """An expected event did not occur within a generous time."""


@dataclass
class DisturbedSite(Site):
    """A site with at most one run."""

    process: "subprocess.Popen[str] | None" = None
    """The ``rlhf run`` or ``rlhf resume`` process that drives the run."""

    @property
    def struck(self) -> Path:
        """Folder in which the saboteur records its faults."""
        return self.home / "struck"

    def prepare(self, faults: list[dict[str, Any]], pace_s: float) -> str:
        """Write config and saboteur; return the config file."""
        self.struck.mkdir()
        shutil.copy2(HERE / "saboteur.py", self.home)
        plan = {"struck": str(self.struck), "pace_s": pace_s, "faults": faults}
        (self.home / "saboteur.json").write_text(json.dumps(plan))
        return self.config(SABOTAGED)

    def prepare_script(self, faults: list[dict[str, Any]], pace_s: float) -> str:
        """Write a script for torchrun in place of the native trainer; return the config file."""
        self.struck.mkdir()
        plan = {"struck": str(self.struck), "pace_s": pace_s, "faults": faults}
        (self.home / "saboteur.json").write_text(json.dumps(plan))
        line = [*TORCHRUN, str(HERE / "wrapped_script.py"), str(self.home / "saboteur.json")]
        trainer = {
            "kind": "command",
            "environment": sys.prefix,
            "num_steps": 20,
            "argv": [*line, "{output_dir}", "{num_steps}", "{checkpoint_every}"],
            "checkpoint_complete": ["model.pt"],
            "resume_argv": ["--resume", "{checkpoint}"],
            "stdout_patterns": [r"step (?P<step>\d+) loss (?P<loss>[\d.]+)"],
        }
        supervise = {name: value for name, value in SABOTAGED.items() if name.startswith("supervise.")}
        settings: dict[str, Any] = {"name": "disturbed", **{f"trainer.{name}": one for name, one in trainer.items()}}
        settings |= {"checkpoint.every_num_steps": CHECKPOINT_EVERY, **supervise, "supervise.backoff_s": 0}
        path = self.home / "script.toml"
        path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()))
        return str(path)

    def drive(self, *arguments: str) -> None:
        """Start the ``rlhf`` command that drives the run; its output goes to ``rlhf.log``."""
        self.process = self.spawn(self.command(*arguments), log=self.home / "rlhf.log")

    @property
    def run(self) -> RunDir | None:
        """The run, once its directory exists."""
        return next(iter(self.runs()), None)

    @property
    def ended(self) -> bool:
        """True once the command that drives the run has ended."""
        return self.process is None or self.process.poll() is not None

    def wait_for(self, question: Callable[[], Found | None], what: str, timeout_s: float) -> Found:
        """Poll until ``question`` answers.

        Raises:
            Stuck: it did not answer in time, or the run ended first.
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
            time.sleep(0.1)  # the question may read all that the run has written

    def close(self) -> None:
        """End the command if it is still running, then the job of a run that has not ended."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        if self.run is not None and not read_record(self.run).ended:
            self.rlhf("cancel", self.run.run_id, code=None)
        super().close()


# ---------------------------------------------------------------------------------------------------------------------
# Visible state of a run


@dataclass(frozen=True)
class Worker:
    """One rank of the newest start of the trainer."""

    rank: int
    node: str
    pid: int


def events(run: RunDir) -> list[tuple[RestartDir, AgentEvent]]:
    """Events of all agents, ordered by time."""
    found = [
        (restart, event)
        for restart in run.restarts()
        for path in restart.event_files()
        for event in read_models(path, AgentEvent)
    ]
    return sorted(found, key=lambda pair: pair[1].time)


def steps(run: RunDir) -> list[tuple[RestartDir, MetricsLine]]:
    """All training steps, in the order in which they were made."""
    return [(restart, line) for restart in run.restarts() for line in read_models(restart.metrics, MetricsLine)]


def workers(run: RunDir) -> list[Worker]:
    """The trainer ranks of the newest start, as their agents announced them."""
    started = [(restart, event) for restart, event in _started(run) if "generation" not in event.data]
    newest = max(((one.attempt, one.restart) for one, _ in started), default=None)
    found = [
        worker
        for restart, event in started
        if (restart.attempt, restart.restart) == newest
        for worker in _announced(event)
    ]
    return sorted(found, key=lambda worker: worker.rank)


def engines(run: RunDir) -> list[Worker]:
    """The newest starts of the rollout engines, by their ranks in the group."""
    attempt = run.attempts()[-1].number
    of_groups = [event for one, event in _started(run) if one.attempt == attempt and "generation" in event.data]
    newest = {worker.rank: worker for event in of_groups for worker in _announced(event)}
    return [newest[rank] for rank in sorted(newest)]


def engine_parts(pid: int) -> list[int]:
    """Process ids of the parts of a split vLLM engine, in order."""
    named = {one.name(): one.pid for one in psutil.Process(pid).children() if one.name().startswith("VLLM::Worker")}
    return [named[name] for name in sorted(named)]


def _started(run: RunDir) -> list[tuple[RestartDir, AgentEvent]]:
    return [(restart, event) for restart, event in events(run) if event.kind == "workers_started"]


def _announced(event: AgentEvent) -> list[Worker]:
    ranks, pids = event.data["ranks"], event.data["pids"]
    assert isinstance(ranks, dict)
    assert isinstance(pids, dict)
    return [Worker(int(str(rank)), event.node, int(str(pids[local]))) for local, rank in ranks.items()]


def program_ranks(run_id: str) -> list[Worker]:
    """The ranks of an external program, which run below the workers: the first process of each."""
    found: dict[int, tuple[float, Worker]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            around = process.environ()
            if PATH_VARIABLE not in around or not around.get(JOB_VARIABLE, "").startswith(f"{run_id}/"):
                continue
            if not around.get("LOCAL_RANK", "").isdigit() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            rank = int(around["RANK"])
            one = (process.create_time(), Worker(rank, around.get("SLURMD_NODENAME", ""), process.pid))
            found[rank] = min(one, found.get(rank, one), key=lambda pair: pair[0])
    return sorted((worker for _, worker in found.values()), key=lambda worker: worker.rank)


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
    """A time since the epoch, in the form used in the files."""
    return datetime.fromtimestamp(seconds, tz=UTC)
