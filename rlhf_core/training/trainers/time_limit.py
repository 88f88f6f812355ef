"""The time left until the job ends by its time limit, compared with what the next step and its checkpoint take."""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping

from rlhf_core.schemas.resources import JOB_END_VARIABLE
from rlhf_core.text.formatting import duration as duration_text

ENDING_S = 30.0
"""Time in seconds that workers and agents have to exit after the last checkpoint."""
_NUM_STEPS = 10


class TimeLimit:
    """Decides at the end of each step whether the job has time for another one.

    The request of the scheduler, ``slurm.save_lead_s`` before the limit, is too late if a step takes longer: the job is
    killed in the middle of it, and all steps since the last checkpoint are lost.
    """

    def __init__(
        self, lead_s: float, environment: Mapping[str, str] = os.environ, clock: Callable[[], float] = time.time
    ) -> None:
        """Args:
        lead_s: time in seconds that a checkpoint is expected to take before one was measured.
        environment: of the job; without the variable of its end, there is no limit.
        clock: seconds since the epoch.
        """
        end = environment.get(JOB_END_VARIABLE, "")
        self._end_s = float(end) if end.isdecimal() else math.inf
        self._clock = clock
        # Like the request of the scheduler, not in the first half of the time, or a short job would never train.
        self._first_save_s = min(lead_s, max(self._end_s - clock(), 0.0) / 2)
        self._steps_s: deque[float] = deque(maxlen=_NUM_STEPS)
        self._evaluation_s = 0.0

    def add_step(self, seconds: float, evaluation_s: float) -> None:
        """Record the duration of a step that has just ended.

        Args:
            seconds: the whole step, without its checkpoint.
            evaluation_s: the part of it that was spent on an evaluation; 0 if none was due.
        """
        self._steps_s.append(seconds - evaluation_s)
        self._evaluation_s = evaluation_s or self._evaluation_s

    def shortage(self, save_s: float, *, with_evaluation: bool, saves_now: bool = False) -> str:
        """Describe the missing time if the next step and its checkpoint would not fit; empty if they would.

        The step is expected to take as long as the longest of the last ten.

        Args:
            save_s: duration of the last checkpoint in seconds; 0 if unknown.
            with_evaluation: the next step evaluates.
            saves_now: a checkpoint is due before the next step begins; counted once its duration is known.
        """
        now_s = save_s if saves_now else 0.0
        step_s = max(self._steps_s) + (self._evaluation_s if with_evaluation else 0.0)
        save_s = save_s or self._first_save_s
        left_s = self._end_s - self._clock()
        if left_s >= now_s + step_s + save_s + ENDING_S:
            return ""
        due = f"the checkpoint that is due ({duration_text(now_s)}), " if now_s else ""
        return (
            f"the time limit ends the job in {duration_text(max(0.0, left_s))}, too soon for {due}another step "
            f"({duration_text(step_s)}) and its checkpoint ({duration_text(save_s)})"
        )
