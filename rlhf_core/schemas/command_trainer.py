"""External trainers: ms-swift, TRL, OpenRLHF, or any script started by torchrun.

The launch line and the properties of the program are settings. Supervision, evidence, retries and history are the same
as for the native trainer; :class:`ProgressSource` lists the ways to observe a program's progress.
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from rlhf_core.schemas.attempts import RunState
from rlhf_core.schemas.base import Label, Positive, Schema
from rlhf_core.schemas.slurm_values import Lines, OneLine, VariableName

STEPS_HINT = (
    "steps are read, with their metrics, from TensorBoard files in the output folder, from rlhf_core.callback, or from "
    "lines of output that match trainer.stdout_patterns (docs/trainers.md#progress)"
)
"""Advice for a trainer that completed without reporting any step."""

STEP_FIELD = "{step}"
"""Placeholder for the step number in names of checkpoints."""

PLACEHOLDERS = {
    "num_nodes": "number of nodes of the attempt",
    "node_rank": "index of this node, from 0",
    "ranks_per_node": "number of ranks on each node",
    "num_ranks": "number of ranks on all nodes together",
    "rank": "rank, from 0; with launch = per_node, that of the first rank on the node",
    "local_rank": "index of the rank on its node, from 0; always 0 with launch = per_node",
    "gpus": "GPUs of this node, in the form of CUDA_VISIBLE_DEVICES; empty without GPUs",
    "gpus_per_node": "number of GPUs on each node",
    "use_cpu": "true if resources.gpus_per_node is 0, otherwise false",
    "master_addr": "address of the first node",
    "master_port": "a port on the first node that was free when the ranks started",
    "num_steps": "trainer.num_steps",
    "checkpoint_every": "checkpoint.every_num_steps",
    "keep_last": "checkpoint.keep_last",
    "seed": "seed",
    "run_id": "id of the run",
    "run_dir": "the run directory",
    "output_dir": "folder for the trainer's own files: trainer.output_dir with its placeholders filled in",
    "attempt": "number of the attempt, from 1",
    "restart": "number of the restart in place, from 0",
    "checkpoint": "folder of the checkpoint to resume from; empty for a start from scratch",
    "checkpoint_step": "step of that checkpoint; 0 for a start from scratch",
    "model": "model.path",
    "train": "data.train",
    "eval": "data.eval",
    "drivers": "folder of the scripts that come with rlhf-flows (trl_train.py, ray_node.sh)",
    "code": "folder with the copies of your own code (code.paths)",
}
"""Placeholders of the launch line and of variables, with their meanings."""

_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


class ProgressSource(StrEnum):
    """Source of the progress of a program without heartbeats."""

    CALLBACK = "callback"
    """`rlhf_core.callback` in a transformers trainer."""
    TRAINER_LOG = "trainer_log"
    """`logging.jsonl` or `trainer_log.jsonl` in the output folder, and `trainer_state.json` of checkpoints."""
    TENSORBOARD = "tensorboard"
    """TensorBoard event files in the output folder."""
    STDOUT = "stdout"
    """Lines of the ranks' output that match `trainer.stdout_patterns`."""
    CHECKPOINTS = "checkpoints"
    """Appearance of checkpoints."""
    COLLECTIVES = "collectives"
    """Number of collectives that each rank has entered, from torch's flight recorder."""
    ACTIVITY = "activity"
    """Processor time, reading and writing, and GPU use of the ranks."""
    STACKS = "stacks"
    """Python stacks of the ranks, sampled with py-spy."""


class SourceSight(Schema):
    """Hangs that a source of progress detects, and those that it misses."""

    sees: str
    blind: str
    is_strong: bool
    """True if it shows progress. The others only show activity, as in a busy loop: they count only until a strong
    source reports, and before the first step while the rank is outside collectives."""


SIGHTS: dict[ProgressSource, SourceSight] = {
    ProgressSource.CALLBACK: SourceSight(
        sees="every hang of a rank, with its phase, since each rank reports every step and substep itself",
        blind="a hang before the trainer's loop starts, and code that the trainer runs outside its callbacks",
        is_strong=True,
    ),
    ProgressSource.TRAINER_LOG: SourceSight(
        sees="a job that no longer makes steps",
        blind="the responsible rank; anything shorter than the time between two lines (logging_steps), or "
        "than that between two checkpoints without a log",
        is_strong=True,
    ),
    ProgressSource.TENSORBOARD: SourceSight(
        sees="a job that no longer makes steps",
        blind="the responsible rank; anything shorter than the time between two logged steps, or than the 120 s "
        "between two flushes of its writer if the trainer's environment has TensorFlow",
        is_strong=True,
    ),
    ProgressSource.STDOUT: SourceSight(
        sees="a job that no longer prints progress",
        blind="the responsible rank; output that the program keeps in a buffer",
        is_strong=True,
    ),
    ProgressSource.CHECKPOINTS: SourceSight(
        sees="a job that no longer saves checkpoints",
        blind="the responsible rank; anything shorter than the time between two checkpoints",
        is_strong=True,
    ),
    ProgressSource.COLLECTIVES: SourceSight(
        sees="a rank that no longer enters collectives, and ranks that disagree about one, with the responsible rank",
        blind="a loop that enters collectives without training; phases without any, such as a long rollout",
        is_strong=True,
    ),
    ProgressSource.ACTIVITY: SourceSight(
        sees="ranks that are stopped, or that wait without using CPU, disk or GPU",
        blind="an endless loop, and a rank that spins in a collective (NCCL does)",
        is_strong=False,
    ),
    ProgressSource.STACKS: SourceSight(
        sees="ranks whose Python stacks do not change at all",
        blind="an endless loop of more than one line, and a service thread that wakes up; any change counts as "
        "progress",
        is_strong=False,
    ),
}
"""Hangs that each source detects and misses; printed by `rlhf check`."""

Signal = Literal["", "SIGUSR1", "SIGUSR2", "SIGTERM", "SIGINT", "SIGHUP"]
Pattern = Annotated[str, StringConstraints(min_length=1, max_length=1_000)]


_SOURCES_OF_STEPS = frozenset((ProgressSource.CALLBACK, ProgressSource.TRAINER_LOG, ProgressSource.TENSORBOARD))


class CommandTrainer(Schema):
    """An external trainer, started with its own launch line in its own environment."""

    kind: Literal["command"] = "command"
    """`command`: a program of your own, such as ms-swift, TRL or a script for torchrun."""
    argv: Annotated[tuple[str, ...], Field(min_length=1)]
    """Launch line, with one item per argument; placeholders such as `{num_nodes}`, `{node_rank}` and `{master_addr}`
    are filled in (docs/trainers.md lists them)."""
    num_steps: Positive
    """Optimizer steps after which the training is complete. Pass the same number to the trainer, for instance with
    `--max_steps {num_steps}`; if it ends earlier, it has failed."""
    framework: Literal["script", "transformers", "swift", "trl", "openrlhf"] = "script"
    """Family of the program, which determines where to find its progress, metrics and checkpoints, and how to read its
    arguments. `transformers` is any program built on `transformers.Trainer`."""
    algorithm: Label = "other"
    """Name of the algorithm, for instance `grpo` or `cpo`; stored with the run and used in comparisons."""
    launch: Literal["per_node", "per_rank"] = "per_node"
    """Way to start the ranks. `per_node`: the line runs once on every node and starts the ranks itself (torchrun,
    accelerate, deepspeed, swift). `per_rank`: it runs once for every rank, with RANK, LOCAL_RANK and WORLD_SIZE set."""
    environment: OneLine = ""
    """Python environment that it runs in: a name from `rlhf env create`, or the folder of a virtual environment; empty
    uses the programs on the PATH of the job."""
    variables: dict[VariableName, Lines] = {}
    """Environment variables of the program; placeholders are filled in."""
    setup: tuple[Lines, ...] = ()
    """Shell lines to run before it, in the same shell, for instance `module load cuda`."""
    working_dir: OneLine = ""
    """Folder to start it in; empty for the one where `rlhf run` was called."""
    output_dir: OneLine = "{run_dir}/trainer/output"
    """Folder of its files, including its checkpoints and logs; a relative one is in `trainer.working_dir`."""
    checkpoint_name: OneLine = "checkpoint-{step}"
    """Path of a checkpoint in the output folder, with `{step}` for the number; `*` stands for any name."""
    checkpoint_complete: tuple[OneLine, ...] = ("trainer_state.json",)
    """Patterns of the files that a complete checkpoint has; name the ones that the program writes last. One that begins
    with `../` is a file beside the checkpoint that names the newest, such as `../latest` of DeepSpeed."""
    resume: Literal["argument", "in_place", "none"] = "argument"
    """Way to resume. `argument`: `trainer.resume_argv` is added to the launch line. `in_place`: the checkpoint is put
    back into the output folder and later ones are moved out, so that the program finds it. `none`: it starts from
    scratch."""
    resume_argv: tuple[str, ...] = ("--resume_from_checkpoint", "{checkpoint}")
    """Arguments added to the launch line to resume from a checkpoint."""
    save_signal: Signal = ""
    """Signal on which it saves a checkpoint and continues, sent to every rank; empty if there is none."""
    artifacts: tuple[OneLine, ...] = ()
    """Patterns of more files in the output folder to keep with every attempt."""
    progress: tuple[ProgressSource, ...] = ()
    """Sources of progress; empty uses those of the framework."""
    stdout_patterns: tuple[Pattern, ...] = ()
    """Regular expressions for lines of output that show progress; groups `(?P<step>...)` and `(?P<name>...)` give the
    step and metrics."""
    metrics: dict[str, str] = {}
    """Names for its metrics in this project, for instance `"train/reward" = "reward/mean"`, in addition to those of the
    framework. An empty name drops a metric."""
    record_collectives: bool = True
    """Read the collectives of each rank from torch's flight recorder, through a module that Python loads when it starts
    (`sitecustomize`, found by PYTHONPATH); the program itself is not changed."""

    @property
    def sources(self) -> tuple[ProgressSource, ...]:
        """Sources of progress; by default those of the framework."""
        if self.progress:
            return self.progress
        written = {
            "script": (ProgressSource.TENSORBOARD,),
            # Without their own log, trainer_state.json shows steps only when a checkpoint is saved.
            "transformers": (ProgressSource.TENSORBOARD, ProgressSource.TRAINER_LOG),
            "swift": (ProgressSource.TRAINER_LOG, ProgressSource.TENSORBOARD),
            "trl": (ProgressSource.TENSORBOARD, ProgressSource.TRAINER_LOG),
            "openrlhf": (ProgressSource.TENSORBOARD,),
        }[self.framework]
        found = [ProgressSource.CALLBACK, *written]
        found += [ProgressSource.STDOUT] if self.stdout_patterns else []
        found += [ProgressSource.CHECKPOINTS]
        found += [ProgressSource.COLLECTIVES] if self.record_collectives else []
        return (*found, ProgressSource.ACTIVITY, ProgressSource.STACKS)

    @property
    def reports_steps(self) -> bool:
        """True if the settings tell where its steps are read. The default sources are only looked for."""
        by_pattern = any("step" in re.compile(pattern).groupindex for pattern in self.stdout_patterns)
        return by_pattern or bool(_SOURCES_OF_STEPS & {*self.progress})

    @model_validator(mode="after")
    def _check_placeholders(self) -> Self:
        texts = [*self.argv, *self.resume_argv, *self.variables.values(), self.working_dir, self.output_dir]
        # Other words in braces are kept, because launch lines may contain JSON and templates.
        if self.resume == "argument" and not any("{checkpoint" in text for text in self.resume_argv):
            raise ValueError(
                f"found trainer.resume_argv = {list(self.resume_argv)}, expected {{checkpoint}} in it; or give "
                'trainer.resume = "in_place" or "none"'
            )
        if STEP_FIELD not in self.checkpoint_name:
            raise ValueError(f"found trainer.checkpoint_name = {self.checkpoint_name!r}, expected {STEP_FIELD} in it")
        if self.launch == "per_node" and any("{local_rank}" in text for text in texts):
            raise ValueError('found {local_rank} and trainer.launch = "per_node", expected launch = "per_rank" with it')
        for pattern in self.stdout_patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"found trainer.stdout_patterns with {pattern!r}: {error}") from None
        if ProgressSource.STDOUT in self.progress and not self.stdout_patterns:
            raise ValueError("found the source stdout in trainer.progress; give trainer.stdout_patterns as well")
        return self


def named_placeholders(text: str) -> list[str]:
    """Words in braces in a text that look like placeholders, known or not."""
    return _PLACEHOLDER.findall(text)


def fill(text: str, values: Mapping[str, str]) -> str:
    """Fill the placeholders of a text; other words in braces are kept."""
    return _PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), text)


def steps_hint(kind: str, state: str, last_step: int | None) -> str:
    """Advice if an external trainer completed without reporting any step; otherwise empty.

    Args:
        kind: Kind of the trainer.
        state: State of its run.
    """
    return STEPS_HINT if kind == "command" and state == RunState.COMPLETED and not last_step else ""
