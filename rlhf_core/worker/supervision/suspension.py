"""Suspension of an agent with its job or node, after which the run may have moved on to another attempt."""

import contextlib
from collections.abc import Callable

from rlhf_core.worker.event_log import EventLog
from rlhf_core.worker.liveness.pause_clock import PauseClock
from rlhf_core.worker.supervision.exit_deadline import ExitDeadline


class SuspensionWatch:
    """Notices that this process was suspended, and ends it if the run has moved on. Used only by the supervising
    thread."""

    def __init__(
        self, clock: PauseClock, is_superseded: Callable[[], bool], events: EventLog, deadline: ExitDeadline
    ) -> None:
        """Args:
        is_superseded: True if the run has moved on to another attempt; raises ``OSError`` while that is unknown.
        """
        self._clock = clock
        self._is_superseded = is_superseded
        self._events = events
        self._deadline = deadline
        self._num_pauses = 0
        self._may_be_superseded = False

    def has_ended(self) -> bool:
        """True once after every suspension."""
        if self._clock.num_pauses == self._num_pauses:
            return False
        self._num_pauses = self._clock.num_pauses
        self._may_be_superseded = True
        self._events.print_line(
            f"this agent was suspended for {self._clock.pause_s:.0f} s; silence is measured from now on"
        )
        return True

    def leave_if_superseded(self) -> None:
        """Kill this process and its descendants if the run moved on during a suspension."""
        if self._may_be_superseded:
            with contextlib.suppress(OSError):  # the file system may not respond yet: looked up again
                if self._is_superseded():
                    self._deadline.leave_now()
                self._may_be_superseded = False
