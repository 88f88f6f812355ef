"""Agreement of all ranks on one start of an external trainer: its checkpoint, and the port on which its ranks meet."""

import contextlib
import functools
import os
import time

from rlhf_core.files.whole import read_model, write_model
from rlhf_core.run_dir.attempt import RestartDir
from rlhf_core.run_dir.checkpoint import CheckpointDir
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.command_trainer import CommandTrainer
from rlhf_core.schemas.reports import Phase
from rlhf_core.training.types import WorkerContext
from rlhf_core.worker.command import published
from rlhf_core.worker.command.launch import LaunchOrder, LaunchPlace
from rlhf_core.worker.nodes.membership import unused_port

POLL_INTERVAL_S = 0.1


def agree(context: WorkerContext, trainer: CommandTrainer) -> LaunchOrder:
    """Let rank 0 choose the port and checkpoint for all ranks."""
    path = context.restart_dir.launch_order
    if context.rank == 0:
        order = _choose(context, trainer)
        write_model(path, order)
        return order
    while True:
        with contextlib.suppress(OSError):  # a shared file system may fail for a moment
            found = read_model(path, LaunchOrder)
            if found is not None:
                return found
        context.reporter.beat(Phase.SETUP, 0)  # rank 0 may read a checkpoint for longer than the floor
        time.sleep(POLL_INTERVAL_S)  # if rank 0 fails, or the agent kills all workers, that is handled elsewhere


def read_checkpoint(run_dir: RunDir, restart_dir: RestartDir) -> CheckpointDir | None:
    """The checkpoint that a start of an external trainer was told to resume from; None without one.

    Raises:
        OSError: the file system does not respond.
    """
    order = read_model(restart_dir.launch_order, LaunchOrder)
    name = order.checkpoint if order is not None else ""
    return next((one for one in run_dir.saved_checkpoints() if one.root.name == name), None)


def _choose(context: WorkerContext, trainer: CommandTrainer) -> LaunchOrder:
    checkpoint = published.resume_point(context) if trainer.resume != "none" else None
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    name = checkpoint.root.name if checkpoint else ""
    order = LaunchOrder(address=address, port=unused_port(address), checkpoint=name, node=context.node)
    place = LaunchPlace(context, trainer, order)
    beat = functools.partial(context.reporter.beat, Phase.SETUP, checkpoint.step if checkpoint else 0)
    published.restore(checkpoint, trainer, place.output_dir, context.restart_dir.checkpoints_aside, beat)
    place.output_dir.mkdir(parents=True, exist_ok=True)
    place.working_dir.mkdir(parents=True, exist_ok=True)
    print(f"resuming from {name}" if name else "starting from the beginning", flush=True)
    return order
