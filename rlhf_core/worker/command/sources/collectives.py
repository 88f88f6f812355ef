"""Progress measured by the number of collectives a rank has entered, from torch's flight recorder.

Detects a rank that stops entering collectives while others wait for it, and ranks that disagree about one. Misses loops
that enter collectives without training, and phases without collectives, such as a long rollout on one rank. Torch
counts the collectives of every backend if ``TORCH_FR_BUFFER_SIZE`` is set, NCCL's apart from the others'; the launch
sets it.
"""

from rlhf_core.schemas.command_trainer import ProgressSource
from rlhf_core.worker.command.in_rank import rlhf_rank_file as words
from rlhf_core.worker.command.observation import Reading


class CollectivesSource:
    """Reads the counts of one rank."""

    kind = ProgressSource.COLLECTIVES

    def __init__(self, status: words.RankFile) -> None:
        self._status = status
        self._seen = (0, 0)

    def poll(self, now_s: float) -> Reading:
        """Poll once."""
        counts = self._status.get(words.ENTERED), self._status.get(words.LEFT)
        moved, self._seen = counts != self._seen, counts
        return Reading(moved=moved)
