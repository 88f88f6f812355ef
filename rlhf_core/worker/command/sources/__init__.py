"""Sources of progress for programs that send no heartbeats, one file each."""

from collections.abc import Callable, Mapping

from rlhf_core.schemas.command_trainer import ProgressSource
from rlhf_core.worker.command.observation import Source, Watched
from rlhf_core.worker.command.sources.activity import Activity
from rlhf_core.worker.command.sources.callback import CallbackSource
from rlhf_core.worker.command.sources.checkpoints import Checkpoints
from rlhf_core.worker.command.sources.collectives import CollectivesSource
from rlhf_core.worker.command.sources.stacks import Stacks
from rlhf_core.worker.command.sources.stdout import Stdout
from rlhf_core.worker.command.sources.tensorboard import TensorBoard
from rlhf_core.worker.command.sources.trainer_log import TrainerLog
from rlhf_core.worker.in_rank.rlhf_rank_file import RankFile

_OF_STATUS: Mapping[ProgressSource, Callable[[RankFile], Source]] = {
    ProgressSource.CALLBACK: CallbackSource,
    ProgressSource.COLLECTIVES: CollectivesSource,
}
_OF_PROGRAM: Mapping[ProgressSource, Callable[[Watched], Source]] = {
    ProgressSource.TRAINER_LOG: TrainerLog,
    ProgressSource.TENSORBOARD: TensorBoard,
    ProgressSource.STDOUT: Stdout,
    ProgressSource.CHECKPOINTS: Checkpoints,
    ProgressSource.ACTIVITY: Activity,
    ProgressSource.STACKS: Stacks,
}


def make_sources(watched: Watched, status: RankFile) -> list[Source]:
    """Create a trainer's sources, in its order.

    Args:
        watched: The program, as seen by one of its ranks.
        status: Status of that rank.
    """
    return [
        _OF_STATUS[kind](status) if kind in _OF_STATUS else _OF_PROGRAM[kind](watched)
        for kind in watched.trainer.sources
    ]
