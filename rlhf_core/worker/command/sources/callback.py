"""Progress reported by the rank itself, through ``rlhf_core.callback``.

Detects every hang of a rank inside the trainer's loop, with its phase. Misses hangs before the loop begins, and cannot
see code that the trainer runs outside its callbacks: a reward function that takes minutes looks like a hang unless it
calls ``SupervisionCallback.beat``.
"""

from rlhf_core.schemas.command_trainer import ProgressSource
from rlhf_core.schemas.reports import Phase
from rlhf_core.worker.command.observation import Reading
from rlhf_core.worker.in_rank import rlhf_rank_file as words

_PHASES = tuple(Phase)


class CallbackSource:
    """Reads one rank's beats."""

    kind = ProgressSource.CALLBACK

    def __init__(self, status: words.RankFile) -> None:
        self._status = status
        self._beats = 0

    def poll(self, now_s: float) -> Reading:
        """Poll once."""
        beats = self._status.get(words.BEATS)
        if beats == self._beats:
            return Reading()
        self._beats = beats
        number = self._status.get(words.PHASE)
        phase = _PHASES[number] if 0 <= number < len(_PHASES) else Phase.TRAIN
        return Reading(moved=True, step=self._status.get(words.STEP), phase=phase)
