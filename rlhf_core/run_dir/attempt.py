"""Folders of one attempt, and of one start of its workers."""

import re
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.files.lookups import paths_in

_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class RestartDir:
    """``attempts/<n>/restarts/<r>/``: files of one start of the workers."""

    root: Path
    attempt: int
    restart: int

    @property
    def metrics(self) -> Path:
        """Reduced metrics, one line per step; trainer rank 0 appends."""
        return self.root / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """Sampled completions for inspection; trainer rank 0 appends."""
        return self.root / "samples.jsonl"

    @property
    def weight_syncs(self) -> Path:
        """Ledger of the weights that rollout engines received; trainer rank 0 appends."""
        return self.root / "weight-syncs.jsonl"

    @property
    def launch_order(self) -> Path:
        """Agreed parameters of one start of an external trainer's launch line; the worker of rank 0 writes it."""
        return self.root / "launch.json"

    @property
    def warnings(self) -> Path:
        """Findings that do not end training, one per line; the trainer of rank 0 appends."""
        return self.warnings_of(0)

    def warnings_of(self, rank: int) -> Path:
        """Warnings of one trainer rank, which appends; those of ranks other than 0 concern that rank alone."""
        return self.root / (f"warnings-{rank}.jsonl" if rank else "warnings.jsonl")

    def all_warnings(self) -> list[Path]:
        """Warning files of all ranks that have any."""
        return paths_in(self.root, "warnings*.jsonl")

    @property
    def artifacts(self) -> Path:
        """Further files of an external trainer that are kept with this start."""
        return self.root / "artifacts"

    @property
    def rank_output(self) -> Path:
        """Output of the ranks of an external trainer, one folder per node, if its launcher is one of torch's."""
        return self.root / "ranks"

    @property
    def checkpoints_aside(self) -> Path:
        """Checkpoints that an external trainer had made after the one from which this start resumes."""
        return self.root / "aside"

    @property
    def agents(self) -> Path:
        """Folder of the agents' status files."""
        return self.root / "agents"

    def agent_status(self, node: str) -> Path:
        """Published status of the agent of ``node``, which replaces it."""
        return self.agents / f"{node}.json"

    def agent_statuses(self) -> list[Path]:
        """Published status files of all agents."""
        return paths_in(self.agents, "*.json")

    def events(self, node: str) -> Path:
        """Events of the agent of ``node``, which appends."""
        return self.root / f"events-{node}.jsonl"

    def event_files(self) -> list[Path]:
        """Files of all events, of agents and of workers."""
        return paths_in(self.root, "events-*.jsonl")

    def worker_events(self, role: str, node: str, local_rank: int) -> Path:
        """Messages of a worker to the user, for instance about a deleted file; that worker appends."""
        return self.root / f"events-{node}-{role}-{local_rank}.jsonl"

    def telemetry(self, node: str) -> Path:
        """Figures of ``node`` over time; its agent appends."""
        return self.root / f"telemetry-{node}.jsonl"

    def telemetry_files(self) -> list[Path]:
        """Figures of all nodes."""
        return paths_in(self.root, "telemetry-*.jsonl")

    @property
    def evidence_dir(self) -> Path:
        """Evidence of incidents; each agent writes its own files."""
        return self.root / "incident"

    @property
    def incidents_dir(self) -> Path:
        """Folder of the incidents and of the decisions about them; agent 0 writes them."""
        return self.root / "incidents"

    def incident(self, number: int) -> Path:
        """One incident, by its number in the attempt."""
        return self.incidents_dir / f"{number}.json"

    def decision(self, number: int) -> Path:
        """The decision about an incident; written before it is carried out."""
        return self.incidents_dir / f"{number}.decision.json"

    def incident_files(self) -> list[Path]:
        """Files of all incidents, in order; those at the path of version 0.1 come first."""
        return self._numbered_files("incident", ".json")

    def decision_files(self) -> list[Path]:
        """Files of all decisions, in order; those at the path of version 0.1 come first."""
        return self._numbered_files("decision", ".decision.json")

    def _numbered_files(self, earlier: str, ending: str) -> list[Path]:
        names = (path.name.removesuffix(ending) for path in paths_in(self.incidents_dir, f"*{ending}"))
        numbers = sorted(int(name) for name in names if _NUMBER.fullmatch(name))
        numbered = (self.incidents_dir / f"{number}{ending}" for number in numbers)
        return [path for path in (self.evidence_dir / f"{earlier}.json", *numbered) if path.is_file()]

    @property
    def logs(self) -> Path:
        """Folder of the workers' output."""
        return self.root / "logs"

    def log(self, role: str, node: str, local_rank: int) -> Path:
        """Standard output and error of one worker; that worker opens it."""
        return self.logs / f"{role}-{node}-{local_rank}.log"

    def worker_outcome(self, role: str, node: str, local_rank: int) -> Path:
        """Outcome of one worker, written by that worker."""
        return self.root / "outcomes" / f"{role}-{node}-{local_rank}.json"


@dataclass(frozen=True)
class AttemptDir:
    """``attempts/<n>/``: one submission to the scheduler."""

    root: Path
    number: int

    @property
    def placement(self) -> Path:
        """Nodes and their roles; written before submission."""
        return self.root / "placement.json"

    @property
    def submission(self) -> Path:
        """Response of the scheduler to the submission."""
        return self.root / "submission.json"

    @property
    def scheduler_dir(self) -> Path:
        """The scheduler's own files: script, output of the agents."""
        return self.root / "scheduler"

    @property
    def claim(self) -> Path:
        """Claim of the agent 0 that owns this attempt; created once: a second agent 0 exits."""
        return self.root / "claim"

    @property
    def key(self) -> Path:
        """Key of the messages between agents; the first agent creates it. Only the owner of the run may read it."""
        return self.root / "key"

    @property
    def engines(self) -> Path:
        """Folder of the addresses of rollout engines."""
        return self.root / "engines"

    def engine(self, rank: int) -> Path:
        """Address of one rollout engine; that engine replaces it at every start."""
        return self.engines / f"{rank}.json"

    @property
    def engine_key(self) -> Path:
        """Token that rollout engines require; created at its first use. Only its owner may read it."""
        return self.engines / "key"

    @property
    def weights(self) -> Path:
        """Folder of the weights for rollout engines, if they are transferred through files."""
        return self.engines / "weights"

    @property
    def commands(self) -> Path:
        """Folder of commands from the control plane to agent 0."""
        return self.root / "commands"

    @property
    def probe(self) -> Path:
        """Folder of the facts about the nodes, and of agent 0's report on them."""
        return self.root / "probe"

    def node_facts(self, node: str) -> Path:
        """Facts about a node; its agent writes them. Only the owner of the run may read it."""
        return self.probe / f"{node}.json"

    @property
    def probe_key(self) -> Path:
        """Key of the hashes in the facts; the first agent creates it. Only the owner of the run may read it."""
        return self.probe / "key"

    @property
    def probe_report(self) -> Path:
        """Findings about the nodes; agent 0 writes it once."""
        return self.root / "probe-report.json"

    @property
    def outcome(self) -> Path:
        """Outcome of the attempt; written once by agent 0, as its last file."""
        return self.root / "outcome.json"

    @property
    def reserve(self) -> Path:
        """A few blocks held back, so that agent 0 can still write its outcome on a full disk; agent 0 frees them."""
        return self.root / "reserve"

    def restart(self, number: int) -> RestartDir:
        """The folder of one restart."""
        return RestartDir(self.root / "restarts" / str(number), self.number, number)

    @property
    def groups_dir(self) -> Path:
        """Folder of the worker groups other than the one whose restarts are counted."""
        return self.root / "groups"

    def group_dir(self, role: str, generation: int) -> Path:
        """Folder of one start of such a group's workers."""
        return self.groups_dir / role / str(generation)

    def group(self, role: str, generation: int) -> RestartDir:
        """Files of one start of such a group's workers: the same as those of a restart."""
        return RestartDir(self.group_dir(role, generation), self.number, generation)

    def groups(self) -> list[RestartDir]:
        """Starts of such groups' workers, by role and generation."""
        folders = paths_in(self.groups_dir)
        return [self.group(folder.name, number) for folder in folders for number in numbered_folders(folder)]

    def restarts(self) -> list[RestartDir]:
        """Restarts that have begun, in order."""
        return [self.restart(number) for number in numbered_folders(self.root / "restarts")]


def numbered_folders(folder: Path) -> list[int]:
    """Entries of a folder whose names are numbers, in order; empty if there is no such folder."""
    return sorted(int(path.name) for path in paths_in(folder) if _NUMBER.fullmatch(path.name))
