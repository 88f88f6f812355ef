"""Contexts of workers that follow another program, without an agent. Helpers, not fixtures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent_runs import make_spec
from made_reports import stored_spec

from rlhf_core.files.whole import write_model
from rlhf_core.run_dir.run import RunDir, new_run_id
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.command_trainer import CommandTrainer
from rlhf_core.schemas.resources import GroupPlan, Placement, in_order
from rlhf_core.training.types import NullReporter, WorkerContext

MINIMAL: Mapping[str, Any] = {"kind": "command", "argv": ["program", "{output_dir}"], "num_steps": 40}


def context_of(
    folder: Path, *, rank: int = 0, num_nodes: int = 1, restart: int = 0, resume: str = "", **trainer: Any
) -> WorkerContext:
    """The context of one worker, with two ranks on every node."""
    run_dir = RunDir.of(folder, new_run_id("toy"))
    spec = make_spec(trainer={**MINIMAL, **trainer}, checkpoint={"every_num_steps": 10, "keep_last": 2})
    phases = in_order(GroupPlan.on_all_nodes(Role.TRAINER, 2, num_nodes))
    placement = Placement(attempt=1, num_nodes=num_nodes, phases=phases, resume_checkpoint=resume)
    write_model(run_dir.attempt(1).placement, placement)
    return WorkerContext(
        run_dir=run_dir,
        attempt=1,
        restart=restart,
        stored=stored_spec(run_dir.run_id, spec),
        placement=placement,
        role=Role.TRAINER,
        rank=rank,
        local_rank=rank % 2,
        num_ranks=2 * num_nodes,
        node=f"node{rank // 2}",
        reporter=NullReporter(),
    )


def trainer_of(context: WorkerContext) -> CommandTrainer:
    trainer = context.spec.trainer
    assert isinstance(trainer, CommandTrainer)
    return trainer
