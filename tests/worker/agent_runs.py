"""Hand-made run directories, with agents started on them as a scheduler would start them. Helpers, not fixtures."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forked_agents import ForkedAgent
from made_reports import stored_spec

from rlhf_core.files.appended import read_models
from rlhf_core.files.whole import read_model, write_model
from rlhf_core.run_dir.attempt import AttemptDir, RestartDir
from rlhf_core.run_dir.run import RunDir, new_run_id
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.failures import Decision, Incident
from rlhf_core.schemas.reports import AgentCommand, AgentEvent, AgentStatus, AttemptOutcome
from rlhf_core.schemas.resources import GroupPlan, Placement
from rlhf_core.schemas.run import RunSpec
from rlhf_core.worker.liveness.heartbeat import slots_folder

REPOSITORY = Path(__file__).parents[2]
TARGETS = Path(__file__).parent / "targets"
TIMEOUT_S = 180.0


def make_spec(**sections: Any) -> RunSpec:
    """A small spec; ``sections`` replace whole tables. ``supervise.floor_s`` applies to every phase."""
    tables: dict[str, Any] = {
        "name": "toy",
        "model": {"config": {"model_type": "qwen3"}, "tokenizer": "char"},
        "data": {"generator": "tasks:digits"},
        "train": {"num_steps": 20},
        "supervise": {"floor_s": 60.0, "setup_floor_s": 60.0},
    }
    if "trainer" in sections:
        del tables["model"], tables["data"], tables["train"]
    tables |= sections
    floor_s = tables["supervise"].get("floor_s", 60.0)
    floors = {f"{phase}_floor_s": floor_s for phase in ("rollout", "reward", "weight_sync", "checkpoint", "evaluate")}
    return RunSpec.model_validate(tables | {"supervise": floors | tables["supervise"]})


@dataclass
class AgentRun:
    """One attempt of a toy run and its agents."""

    run_dir: RunDir
    attempt: int = 1
    change: str = ""
    """Code that its agents execute first."""
    roles: str = "fake_roles"
    """Module with the functions ``train`` and ``evaluate`` that stand in for the roles."""
    agents: list["subprocess.Popen[bytes] | ForkedAgent"] = field(default_factory=list)

    @property
    def dir(self) -> AttemptDir:
        return self.run_dir.attempt(self.attempt)

    def restart(self, number: int) -> RestartDir:
        return self.dir.restart(number)

    def script(self, *lines: dict[str, Any]) -> None:
        """Write the script of the fake roles, see ``targets/fake_roles.py``."""
        (self.run_dir.root / "script.json").write_text(json.dumps(lines), encoding="utf-8")

    def start(
        self, index: int = 0, num_nodes: int = 1, *, native: bool = False, **variables: str
    ) -> "subprocess.Popen[bytes] | ForkedAgent":
        """Start the agent of one node; with several nodes, each agent starts as if Slurm had started it on its own.

        Args:
            native: With the real training code, not with what stands in for the roles here.
        """
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        if num_nodes > 1:
            environment |= {
                "RLHF_NODES": ",".join(f"node{one}=127.0.0.1" for one in range(1, num_nodes + 1)),
                "SLURM_NODEID": str(index),
                "SLURMD_NODENAME": f"node{index + 1}",
            }
        environment |= variables
        command = ["agent", "--run-dir", str(self.run_dir.root), "--attempt", str(self.attempt), "--path", str(TARGETS)]
        if not native:
            command += ["--target", f"trainer={self.roles}:train", "--target", f"evaluator={self.roles}:evaluate"]
            command += ["--target", f"rollout={self.roles}:serve"]
        agent = self._begin(command, environment, self._output(len(self.agents)))
        self.agents.append(agent)
        return agent

    def _begin(
        self, command: list[str], environment: dict[str, str], file: Path
    ) -> "subprocess.Popen[bytes] | ForkedAgent":
        """Start an agent, in a new interpreter only if its path differs, because imports take long."""
        if environment["PYTHONPATH"] == str(REPOSITORY):
            return ForkedAgent(command, environment, self.run_dir.root, file, self.change)
        with file.open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "rlhf_core.worker", *command],
                env=environment,
                cwd=self.run_dir.root,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def start_all(self, num_nodes: int) -> None:
        """Start the agents of all nodes."""
        for index in range(num_nodes):
            self.start(index, num_nodes)

    def finish_all(self) -> list[int]:
        """Wait for all agents and return their exit codes."""
        return [agent.wait(timeout=TIMEOUT_S) for agent in self.agents]

    def printed(self, index: int) -> str:
        """Output of an agent."""
        return self._output(index).read_text(encoding="utf-8")

    def _output(self, index: int) -> Path:
        return self.run_dir.root / f"agent-{index}.out"

    def finish(self) -> tuple[int, str]:
        """Wait for the newest agent and return its exit code and output."""
        code = self.agents[-1].wait(timeout=TIMEOUT_S)
        return code, self._output(len(self.agents) - 1).read_text(encoding="utf-8")

    def run_through(self, *, native: bool = False, **variables: Any) -> tuple[int, str]:
        """Start the agent of the only node and wait for it."""
        self.start(native=native, **variables)
        return self.finish()

    def order(self, kind: str) -> None:
        command = AgentCommand.model_validate({"kind": kind, "reason": "the test asked", "time": utc_now()})
        write_model(self.dir.commands / "0.json", command)

    def outcome(self) -> AttemptOutcome:
        return AttemptOutcome.model_validate_json(self.dir.outcome.read_bytes())

    def incident(self, restart: int) -> Incident:
        """The only incident of a restart."""
        (path,) = self.restart(restart).incident_files()
        return Incident.model_validate_json(path.read_bytes())

    def decision(self, restart: int) -> Decision:
        """The decision about the only incident of a restart."""
        (path,) = self.restart(restart).decision_files()
        return Decision.model_validate_json(path.read_bytes())

    def events(self, restart: int, kind: str | None = None) -> list[AgentEvent]:
        paths = sorted(self.restart(restart).root.glob("events-*.jsonl"))
        events = [event for path in paths for event in read_models(path, AgentEvent)]
        return [event for event in events if kind in (None, event.kind)]

    def status(self, restart: int) -> AgentStatus | None:
        paths = sorted(self.restart(restart).agents.glob("*.json"))
        return read_model(paths[0], AgentStatus) if paths else None

    def pids(self, restart: int) -> dict[int, int]:
        """Process ids by rank; empty until the workers have started. Excludes groups beside the trainers."""
        found = {}
        for event in self._starts(restart):
            ranks, pids = event.data["ranks"], event.data["pids"]
            assert isinstance(ranks, dict)
            assert isinstance(pids, dict)
            found |= {int(str(rank)): int(str(pids[index])) for index, rank in ranks.items()}
        return found

    def nodes(self, restart: int) -> dict[int, str]:
        """Nodes by rank."""
        found = {}
        for event in self._starts(restart):
            ranks = event.data["ranks"]
            assert isinstance(ranks, dict)
            found |= {int(str(rank)): event.node for rank in ranks.values()}
        return found

    def _starts(self, restart: int) -> list[AgentEvent]:
        return [event for event in self.events(restart, "workers_started") if "generation" not in event.data]

    def beside(self) -> list[tuple[int, dict[int, int]]]:
        """Starts of the rollout workers, in order: generation, and process id by rank."""
        restarts = range(len(self.dir.restarts()))
        events = [event for one in restarts for event in self.events(one, "workers_started")]
        found = []
        for event in sorted(events, key=lambda event: event.time):
            if "generation" in event.data:
                ranks, pids = event.data["ranks"], event.data["pids"]
                assert isinstance(ranks, dict)
                assert isinstance(pids, dict)
                by_rank = {int(str(rank)): int(str(pids[local])) for local, rank in ranks.items()}
                found.append((int(str(event.data["generation"])), by_rank))
        return found

    def reached(self, restart: int, step: int) -> bool:
        """True if the metrics of that restart contain a step."""
        path = self.restart(restart).metrics
        return path.exists() and len(path.read_bytes().splitlines()) >= step


MakeRun = Callable[..., AgentRun]


@contextlib.contextmanager
def toy_runs(folder: Path) -> Iterator[MakeRun]:
    """Make toy runs with two trainer ranks per node; remaining processes are killed at the end."""
    runs: list[AgentRun] = []

    def make(*, evaluator: bool = False, num_nodes: int = 1, rollouts: int = 0, **sections: Any) -> AgentRun:
        run_dir = RunDir.of(folder, new_run_id("toy"))
        write_model(run_dir.spec, stored_spec(run_dir.run_id, make_spec(**sections)))
        trainers = GroupPlan.on_all_nodes(Role.TRAINER, 2, num_nodes)
        phases = [(trainers,)]
        if rollouts:
            beside = GroupPlan.on_all_nodes(Role.ROLLOUT, rollouts, num_nodes).model_copy(update={"restart": "alone"})
            phases = [(trainers, beside)]
        if evaluator:
            phases.append((GroupPlan.on_all_nodes(Role.EVALUATOR, 2, num_nodes), *phases[0][1:]))
        write_model(run_dir.attempt(1).placement, Placement(attempt=1, num_nodes=num_nodes, phases=tuple(phases)))
        runs.append(AgentRun(run_dir))
        return runs[-1]

    yield make
    for run in runs:
        for agent in run.agents:
            if agent.poll() is None:
                agent.send_signal(signal.SIGKILL)
            agent.wait()
        # A killed agent leaves its slot files behind; the next agent of the run would remove them.
        for path in slots_folder().glob(f"rlhf-{run.run_dir.run_id}-*"):
            path.unlink()
