"""Launch line of an external trainer: arguments, environment and folders, filled in from its place in the job."""

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from packaging.specifiers import SpecifierSet

from rlhf_core.errors import BadInput
from rlhf_core.machine.gpus import numbered_gpus
from rlhf_core.machine.interpreters import find_program, versions_beside
from rlhf_core.presets import drivers_folder
from rlhf_core.schemas.base import Int32, Label, Schema
from rlhf_core.schemas.command_trainer import CommandTrainer, fill
from rlhf_core.schemas.launch_values import after_setup, values_of_spec
from rlhf_core.shell.known_programs import BOUND_CONTAINERS
from rlhf_core.shell.launch_line import LaunchLine, read_launch_line
from rlhf_core.training.types import WorkerContext
from rlhf_core.worker import in_rank
from rlhf_core.worker.in_rank.rlhf_rank_file import PATH_VARIABLE
from rlhf_core.worker.liveness.collectives import BUFFER_SIZE, BUFFER_VARIABLE

IN_RANK = Path(in_rank.__file__).parent
"""Folder put on the program's PYTHONPATH."""
OWN_NAME = "published.txt"
"""File in a published checkpoint that holds the path of the program's own folder below its output folder."""

_OF_ELASTIC = ("TORCHELASTIC_", "PET_")
_OF_RANK = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE",
)  # fmt: skip
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=", re.ASCII)
_BINDS = tuple(f"{name.upper()}_BIND" for name in sorted(BOUND_CONTAINERS))
_WITH_LOG_DIR = {
    "accelerate": {"accelerate": SpecifierSet(">=0.31")},
    "trl": {"accelerate": SpecifierSet(">=0.31"), "trl": SpecifierSet(">=0.18")},
}
"""Launchers for which torch would put the output of the ranks into a temporary folder, unseen: they read PET_REDIRECTS,
but not PET_LOG_DIR (accelerate 1.15, ``_filter_args``). These versions take a folder as ``--log_dir``, which trl passes
on; older ones refuse the option. Without both variables, they print the output of their ranks."""
_OF_WORKER = ("RLHF_SLOTS",)
"""Worker variables that the program must not see: it would use the worker's slot as its own."""


class LaunchOrder(Schema):
    """Settings agreed for one start of the program (``launch.json`` in the restart's folder); written by rank 0."""

    address: Label
    """Address of the first node."""
    port: Int32
    """A free port on that node."""
    checkpoint: Label = ""
    """Name of the checkpoint to resume from; empty to start from the beginning."""
    node: Label = ""
    """Name of the first node."""


@dataclass(frozen=True)
class LaunchPlace:
    """Node, rank and agreed settings of a launch."""

    context: WorkerContext
    trainer: CommandTrainer
    order: LaunchOrder

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on each node."""
        return next(plan for plan in self.context.placement.groups if plan.role is self.context.role).workers_per_node

    @property
    def output_dir(self) -> Path:
        """Folder for the program's own files."""
        return Path(self.values["output_dir"])

    @property
    def working_dir(self) -> Path:
        """Working directory of the program."""
        return self._working_dir(self.values)

    @property
    def rank_output(self) -> Path:
        """Folder for the output of this node's ranks, if a torch launcher separates it."""
        return self.context.restart_dir.rank_output / self.context.node

    def _working_dir(self, values: dict[str, str]) -> Path:
        return Path(fill(self.trainer.working_dir, values) or self.context.run_dir.root)

    @cached_property
    def values(self) -> dict[str, str]:
        """Values of the placeholders at launch time: the checkpoint may be gone later."""
        context, spec = self.context, self.context.spec
        code = context.run_dir.code / "snapshot"
        found: dict[str, object] = {
            "num_nodes": context.num_ranks // self.ranks_per_node,
            "node_rank": context.rank // self.ranks_per_node,
            "ranks_per_node": self.ranks_per_node,
            "num_ranks": context.num_ranks,
            "rank": context.rank,
            "local_rank": context.local_rank,
            "gpus": numbered_gpus(),
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
        # A relative one is meant as the program takes it; this process is in another folder.
        return {**values, "output_dir": str(self._working_dir(values) / fill(self.trainer.output_dir, values))}

    def arguments(self) -> list[str]:
        """The launch line, including the arguments that resume from a checkpoint."""
        values = self.values
        resumes = self.order.checkpoint and self.trainer.resume == "argument"
        line = [*self._line(), *(self.trainer.resume_argv if resumes else ())]
        filled = [fill(item, values) for item in line]
        if _ASSIGNMENT.match(filled[0]):  # as a shell reads it
            filled.insert(0, "env")
        return after_setup(self.trainer.setup, values, self.trainer.environment, filled)

    def _line(self) -> tuple[str, ...]:
        """The launch line; with the folder for the output of the ranks, for launchers that take it from there only."""
        line, logs = self._parsed, f"--log_dir={self.rank_output}"
        given = line.arguments if line.launcher == "trl" else line.launcher_options
        if not self._takes_log_dir or "log_dir" in given:
            return line.argv
        if line.launcher == "trl":
            return (*line.argv, logs)
        place = next(item.stop for item in line.items if item.role == "launcher")
        return (*line.argv[:place], logs, *line.argv[place:])

    @cached_property
    def _takes_log_dir(self) -> bool:
        """True for a launcher that is known to take the folder for the output of its ranks from ``--log_dir``."""
        needed = _WITH_LOG_DIR.get(self._parsed.launcher)
        if needed is None or (program := self._program_here()) is None:
            return False
        return all(
            bool(found := versions_beside(program, name)) and all(map(accepted.contains, found))
            for name, accepted in needed.items()
        )

    def _program_here(self) -> Path | None:
        """The program that the line begins with; None if only the line itself determines which one that is."""
        if self._parsed.wrappers:
            return None
        given = self.trainer.variables.get("PATH")
        search = fill(given, self.values) if given else os.environ.get("PATH", os.defpath)
        # Shell lines may change PATH, but programs of the environment precede it.
        return find_program(self._parsed.command, self.trainer.environment, "" if self.trainer.setup else search)

    @cached_property
    def _parsed(self) -> LaunchLine:
        return read_launch_line(self.trainer.argv)

    def program(self, search: str | None) -> str | None:
        """Path of the program that the launch line starts; None if there is none.

        Args:
            search: Value of PATH.
        """
        first = self.arguments()[0]
        # One with a slash is relative to the folder that it starts in, and this process is in another.
        return shutil.which(str(self.working_dir / first) if "/" in first else first, path=search)

    def environment(self, status: str, base: Mapping[str, str], folder: Path | None) -> dict[str, str]:
        """The program's environment variables.

        Args:
            status: Path of the status files of this node's ranks, without the local rank.
            base: Environment of the worker.
            folder: The program's Python environment; None for the job's.
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
            # An actor of Ray sets its LOCAL_RANK itself, so that a helper that it starts would pass for the rank.
            PATH_VARIABLE: "" if self._parsed.is_of_ray else status,
            "RLHF_RECORD_COLLECTIVES": str(int(self.trainer.record_collectives)),
        }
        found.setdefault(BUFFER_VARIABLE, BUFFER_SIZE)
        if not per_node and "SLURM_JOB_ID" in base:
            found |= self._as_task_of_slurm()
        if per_node:
            found |= {
                "MASTER_ADDR": self.order.address,
                "MASTER_PORT": str(self.order.port),
            }
        if per_node and (self._takes_log_dir or self._parsed.launcher not in _WITH_LOG_DIR):
            # torchrun and launchers built on it write the output of each rank to a separate file.
            found |= {"PET_REDIRECTS": "3", "PET_LOG_DIR": str(self.rank_output)}
        if folder is not None:
            found["VIRTUAL_ENV"] = str(folder)
            found.pop("PYTHONHOME", None)
        found |= {name: fill(value, self.values) for name, value in self.trainer.variables.items()}
        if folder is not None:
            # Before even the trainer's own PATH: preflight looked the program up in this order.
            found["PATH"] = os.pathsep.join([str(folder / "bin"), found.get("PATH", os.defpath)])
        paths = [str(IN_RANK), found.get("PYTHONPATH", "")]
        return found | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | self._bound_folders(found)

    def _bound_folders(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Variables by which Apptainer shows the program the folders of the run, which its image lacks."""
        if not any(one.name in BOUND_CONTAINERS for one in self._parsed.wrappers):
            return {}
        folders = [self.context.run_dir.root, drivers_folder(), IN_RANK]
        # Of two that differ, Apptainer reads only its own, also under the name of singularity.
        given = [folder for name in _BINDS for folder in variables.get(name, "").split(",") if folder]
        return dict.fromkeys(_BINDS, ",".join(dict.fromkeys([*given, *map(str, folders)])))

    def _as_task_of_slurm(self) -> dict[str, str]:
        """Variables of a rank that srun had started itself: those inherited are of the agent, one task per node."""
        context, num_nodes = self.context, self.values["num_nodes"]
        ranks, tasks = str(self.ranks_per_node), str(context.num_ranks)
        on_nodes = ranks if num_nodes == "1" else f"{ranks}(x{num_nodes})"
        return {
            "SLURM_PROCID": str(context.rank),
            "SLURM_LOCALID": str(context.local_rank),
            **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), tasks),
            **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), on_nodes),
            "SLURM_NTASKS_PER_NODE": ranks,
        }


def resume_folder(context: WorkerContext, trainer: CommandTrainer, checkpoint: str) -> Path | None:
    """Folder of the program's own checkpoint inside a published one; None if there is no checkpoint.

    Raises:
        BadInput: the published checkpoint does not contain such a folder.
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
    """Path, inside a published checkpoint, of the folder that the program wrote; read from ``published.txt``."""
    return (published / OWN_NAME).read_text(encoding="utf-8").strip()
