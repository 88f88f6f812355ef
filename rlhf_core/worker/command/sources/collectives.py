"""Progress as the number of collectives that a rank has entered, by torch's flight recorder.

Sees a rank that enters no more collectives while others wait for it, and ranks that disagree about one. Blind to a loop
that goes on to enter collectives without training, and to phases without any, such as a long rollout on one rank. Torch
counts the collectives of every backend, with ``TORCH_FR_BUFFER_SIZE`` set, which the launch does.
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

    @property
    def counts(self) -> tuple[int, int]:
        """Collectives that were entered, and left."""
        return self._status.get(words.ENTERED), self._status.get(words.LEFT)

    def poll(self, now_s: float) -> Reading:
        """Look once."""
        counts = self.counts
        moved, self._seen = counts != self._seen, counts
        return Reading(moved=moved)
