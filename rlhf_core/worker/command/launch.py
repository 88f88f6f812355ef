"""The launch line of another program: its arguments, environment and folders, filled from the place in the job."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rlhf_core.errors import BadInput
from rlhf_core.presets import drivers_folder
from rlhf_core.schemas.base import Int32, Label, Schema
from rlhf_core.schemas.command_trainer import CommandTrainer, fill
from rlhf_core.schemas.launch_values import values_of_spec
from rlhf_core.training.types import WorkerContext
from rlhf_core.worker.command.in_rank.rlhf_rank_file import PATH_VARIABLE
from rlhf_core.worker.groups.gpus import VISIBLE_VARIABLE
from rlhf_core.worker.liveness.collectives import BUFFER_SIZE, BUFFER_VARIABLE

IN_RANK = Path(__file__).parent / "in_rank"
"""Folder that is put on PYTHONPATH of the program."""

_OF_ELASTIC = ("TORCHELASTIC_", "GROUP_", "ROLE_", "PET_")
_OF_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OF_WORKER = ("RLHF_SLOTS",)
"""Variables of the worker that its program must not see: it would take the worker's slot for its own."""


class LaunchOrder(Schema):
    """Agreement of one start of the program (``launch.json`` in the folder of the restart); written by rank 0."""

    address: Label
    """Address of the first node."""
    port: Int32
    """Port on it that was free."""
    checkpoint: Label = ""
    """Name of the checkpoint to go on from; empty from the beginning."""


@dataclass(frozen=True)
class LaunchPlace:
    """The place of a launch: which node and rank, with which agreement."""

    context: WorkerContext
    trainer: CommandTrainer
    order: LaunchOrder

    @property
    def ranks_per_node(self) -> int:
        """Ranks on every node."""
        return next(plan for plan in self.context.placement.groups if plan.role is self.context.role).workers_per_node

    @property
    def node_rank(self) -> int:
        """Index of this node among those of the trainer, from 0."""
        return self.context.rank // self.ranks_per_node

    @property
    def output_dir(self) -> Path:
        """Folder of the program's own files."""
        return Path(fill(self.trainer.output_dir, self.values))

    @property
    def working_dir(self) -> Path:
        """Folder that the program is started in."""
        return Path(fill(self.trainer.working_dir, self.values) or self.context.run_dir.root)

    @cached_property
    def values(self) -> dict[str, str]:
        """Values of the placeholders, as they are at the launch: the checkpoint may be gone later."""
        context, spec = self.context, self.context.spec
        code = context.run_dir.code / "snapshot"
        found: dict[str, object] = {
            "num_nodes": context.num_ranks // self.ranks_per_node,
            "node_rank": self.node_rank,
            "ranks_per_node": self.ranks_per_node,
            "num_ranks": context.num_ranks,
            "rank": context.rank,
            "local_rank": context.local_rank,
            "gpus": os.environ.get(VISIBLE_VARIABLE, ""),
            "master_addr": self.order.address,
            "master_port": self.order.port,
            "run_id": context.run_dir.run_id,
            "run_dir": context.run_dir.root,
            "attempt": context.attempt,
            "restart": context.restart,
            "checkpoint": resume_folder(context, self.trainer, self.order.checkpoint) or "",
            "checkpoint_step": int(self.order.checkpoint.rpartition("-")[2]) if self.order.checkpoint else 0,
            "code": code,
            "drivers": drivers_folder(),
        }
        values = {**values_of_spec(spec), **{name: str(value) for name, value in found.items()}}
        return {**values, "output_dir": fill(self.trainer.output_dir, values)}

    def arguments(self) -> list[str]:
        """The launch line, with what makes it go on from a checkpoint."""
        values = self.values
        resumes = self.order.checkpoint and self.trainer.resume == "argument"
        line = [*self.trainer.argv, *(self.trainer.resume_argv if resumes else ())]
        filled = [fill(item, values) for item in line]
        if not self.trainer.setup:
            return filled
        lines = [fill(line, values) for line in self.trainer.setup]
        return ["bash", "-c", "\n".join(["set -e", *lines, 'exec "$@"']), "setup", *filled]

    def environment(self, status: str, base: Mapping[str, str], folder: Path | None, logs: Path) -> dict[str, str]:
        """The variables of the program.

        Args:
            status: Path of the status files of the ranks on this node, without the local rank.
            base: Variables of the worker.
            folder: Its Python environment; None for that of the job.
            logs: Folder for the output of each rank, where a launcher of torch's separates it.
        """
        per_node = self.trainer.launch == "per_node"
        left_out = (*_OF_RANK, *_OF_WORKER) if per_node else _OF_WORKER
        found = {
            name: value
            for name, value in base.items()
            if name not in left_out and not (per_node and name.startswith(_OF_ELASTIC))
        }
        found |= {
            "NNODES": self.values["num_nodes"],
            "NODE_RANK": self.values["node_rank"],
            "NPROC_PER_NODE": self.values["ranks_per_node"],
            "PYTHONUNBUFFERED": "1",
            PATH_VARIABLE: status,
            "RLHF_RECORD_COLLECTIVES": str(int(self.trainer.record_collectives)),
        }
        found.setdefault(BUFFER_VARIABLE, BUFFER_SIZE)
        if per_node:
            found |= {
                "MASTER_ADDR": self.order.address,
                "MASTER_PORT": str(self.order.port),
                # torchrun and what is made of it write the output of each rank to a file of its own.
                "PET_REDIRECTS": "3",
                "PET_LOG_DIR": str(logs),
            }
        if folder is not None:
            found["VIRTUAL_ENV"] = str(folder)
            found.pop("PYTHONHOME", None)
        found |= {name: fill(value, self.values) for name, value in self.trainer.variables.items()}
        if folder is not None:
            # Also before a PATH of the trainer's own: preflight has found the program in this order.
            found["PATH"] = os.pathsep.join([str(folder / "bin"), found.get("PATH", os.defpath)])
        paths = [str(IN_RANK), found.get("PYTHONPATH", "")]
        return found | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def shown(self) -> str:
        """The launch line as a shell would take it, for logs."""
        return shlex.join(self.arguments())


def resume_folder(context: WorkerContext, trainer: CommandTrainer, checkpoint: str) -> Path | None:
    """Folder of the program's own checkpoint inside a published one; None without one.

    Raises:
        BadInput: the published checkpoint has no folder of its own.
    """
    if not checkpoint:
        return None
    root = context.run_dir.checkpoints_dir / checkpoint
    if trainer.resume == "in_place":
        return root
    inner = root / own_name(root)
    if not inner.exists():
        raise BadInput(f"found no {trainer.checkpoint_name} in {root}; it was published by another trainer")
    return inner


def own_name(published: Path) -> str:
    """Path, inside a published checkpoint, of the folder that the program wrote (``published.txt`` holds it)."""
    return (published / OWN_NAME).read_text(encoding="utf-8").strip()


OWN_NAME = "published.txt"
"""File of a published checkpoint with the path of the program's own folder, as it was below its output folder."""
