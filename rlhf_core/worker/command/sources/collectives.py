"""Progress measured by the number of collectives a rank has entered, from torch's flight recorder.

Detects a rank that stops entering collectives while others wait for it, and ranks that disagree about one. Misses loops
that enter collectives without training, and phases without collectives, such as a long rollout on one rank. Torch
counts the collectives of every backend if ``TORCH_FR_BUFFER_SIZE`` is set, which the launch does, and by process group:
those of all groups are progress.
"""

from rlhf_core.schemas.command_trainer import ProgressSource
from rlhf_core.worker.command.observation import Reading
from rlhf_core.worker.in_rank import rlhf_rank_file as words


class CollectivesSource:
    """Reads the counts of one rank."""

    kind = ProgressSource.COLLECTIVES

    def __init__(self, status: words.RankFile) -> None:
        self._status = status
        self._seen = 0

    def poll(self, now_s: float) -> Reading:
        """Poll once."""
        moves = self._status.get(words.MOVES)
        moved, self._seen = moves != self._seen, moves
        return Reading(moved=moved)
