"""Sources of progress of a program that does not beat, one file each."""

from rlhf_core.schemas.command_trainer import ProgressSource
from rlhf_core.worker.command.in_rank.rlhf_rank_file import RankFile
from rlhf_core.worker.command.observation import Source, Watched
from rlhf_core.worker.command.sources.activity import Activity
from rlhf_core.worker.command.sources.callback import CallbackSource
from rlhf_core.worker.command.sources.checkpoints import Checkpoints
from rlhf_core.worker.command.sources.collectives import CollectivesSource
from rlhf_core.worker.command.sources.stacks import Stacks
from rlhf_core.worker.command.sources.stdout import Stdout
from rlhf_core.worker.command.sources.tensorboard import TensorBoard
from rlhf_core.worker.command.sources.trainer_log import TrainerLog


def make_sources(watched: Watched, status: RankFile) -> list[Source]:
    """The sources that a trainer has, in its order.

    Args:
        watched: The program, from the view of one of its ranks.
        status: Status of that rank.
    """
    return [_make(kind, watched, status) for kind in watched.trainer.sources]


def _make(kind: ProgressSource, watched: Watched, status: RankFile) -> Source:
    match kind:
        case ProgressSource.CALLBACK:
            return CallbackSource(status)
        case ProgressSource.TRAINER_LOG:
            return TrainerLog(watched)
        case ProgressSource.TENSORBOARD:
            return TensorBoard(watched)
        case ProgressSource.STDOUT:
            return Stdout(watched)
        case ProgressSource.CHECKPOINTS:
            return Checkpoints(watched)
        case ProgressSource.COLLECTIVES:
            return CollectivesSource(status)
        case ProgressSource.ACTIVITY:
            return Activity(watched)
        case ProgressSource.STACKS:
            return Stacks(watched)
