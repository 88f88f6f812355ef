"""One agent's share of an attempt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.run_dir.attempt import AttemptDir
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.failures import FailureKind
from rlhf_core.schemas.resources import GroupPlan, Placement
from rlhf_core.schemas.run import RunSpec
from rlhf_core.worker.nodes.membership import Nodes


@dataclass(frozen=True)
class Job:
    """The part of an attempt that this agent runs."""

    run_dir: RunDir
    attempt: int
    nodes: Nodes
    spec: RunSpec
    placement: Placement
    targets: Mapping[Role, str]
    """Functions that replace the native training code, by role."""
    import_paths: Sequence[Path]
    """Folders to import these functions from."""

    @property
    def attempt_dir(self) -> AttemptDir:
        """Folder of the attempt."""
        return self.run_dir.attempt(self.attempt)

    def position(self, plan: GroupPlan) -> int:
        """Position of this node among the group's nodes; -1 if it is not one of them."""
        return plan.nodes.index(self.nodes.index) if self.nodes.index in plan.nodes else -1

    def has(self, plan: GroupPlan) -> bool:
        """True if the group has workers on this node."""
        return self.nodes.index in plan.nodes

    def worker_command(
        self, plan: GroupPlan, restart: int, generation: int | None, store: Path | None, damaged: Sequence[str]
    ) -> tuple[str, ...]:
        """Interpreter arguments that start a worker.

        Args:
            plan: Its group.
            restart: Current restart of the attempt.
            generation: Start number of a group whose files are kept apart from those of the restart; otherwise None.
            store: File through which the ranks rendezvous; None if they do so elsewhere, or not at all.
            damaged: Checkpoints that must not be used.
        """
        command = ["-u", "-P", "-m", "rlhf_core.worker", "role", plan.role.value]
        command += ["--run-dir", str(self.run_dir.root), "--attempt", str(self.attempt)]
        command += ["--restart", str(restart), "--node", self.nodes.name]
        command += ["--generation", str(generation)] if generation is not None else []
        command += ["--store", str(store)] if store is not None else []
        command += ["--target", self.targets[plan.role]] if plan.role in self.targets else []
        for path in self.import_paths:
            command += ["--path", str(path.absolute())]
        for name in damaged:
            command += ["--damaged", name]
        return tuple(command)


class AttemptAborted(Exception):
    """Aborts the attempt because of a failure before the workers could be started."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
