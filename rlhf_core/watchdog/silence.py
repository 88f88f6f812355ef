"""Detection of agents that have gone silent although the scheduler reports their job as running: the fallback.

Silent files are weak evidence, because a shared file system may show them late, or stall. So each agent is compared
with its own last update, over a much longer time than such delays take. Agents detect each other's loss over the
network within seconds, without waiting that long (``rlhf_core/worker/supervision/agent_loss.py``).
"""

from collections.abc import Mapping
from dataclasses import dataclass

SILENT_S = 120.0
"""Silence of an agent of a running job after which the controller ends the job. Far longer than an agent's publishing
interval (2 s) and the delay of shared file systems."""
UNSTARTED_S = 3600.0
"""Time, beyond ``supervise.join_s``, after which a running job without a single agent is given up. Long, because images
are pulled and ``slurm.setup`` may copy data before an agent starts."""
BLIND_S = 30.0
"""Gap between two polls after which silence is counted from zero: the watchdog itself was not running."""


@dataclass(frozen=True)
class Silence:
    """Agents that have been silent for too long."""

    nodes: tuple[str, ...]
    """Empty if no agent of the attempt has started."""
    seconds: float
    """Silence of the most recently active of them, in seconds."""
    of_all: bool
    """True if no agent of the attempt has published anything in that time."""


class SilenceClock:
    """Tracks how long each agent of an attempt has published nothing new."""

    def __init__(self, now: float, join_s: float) -> None:
        """Start counting at ``now``, in monotonic seconds; ``join_s`` is the setting of that name."""
        self._start_s = join_s + UNSTARTED_S
        self._observed_at = self._unstarted_since = now
        self._marks: dict[str, tuple[int, int]] = {}
        self._last_seen_at: dict[str, float] = {}

    def observe(
        self, now: float, marks: Mapping[str, tuple[int, int]], *, counts: bool, started: bool
    ) -> Silence | None:
        """Update with the agents' latest statuses.

        Args:
            now: monotonic seconds.
            marks: latest status of each agent, by node, without agents that have not published yet.
            counts: True if silence is meaningful now: the scheduler reports the job as running.
            started: True if an agent has left any trace.

        Returns:
            The agents that have been silent for too long, if any.
        """
        counts = counts and now - self._observed_at <= BLIND_S
        if started or not counts:
            self._unstarted_since = now
        for node, mark in marks.items():
            if not counts or self._marks.get(node) != mark:
                self._last_seen_at[node] = now
        self._marks, self._observed_at = dict(marks), now
        silent = tuple(
            sorted(node for node, last_seen_at in self._last_seen_at.items() if now - last_seen_at > SILENT_S)
        )
        if not silent:
            waited_s = now - self._unstarted_since
            return Silence((), waited_s, of_all=True) if waited_s > self._start_s else None
        seconds = min(now - self._last_seen_at[node] for node in silent)
        return Silence(silent, seconds, of_all=len(silent) == len(self._last_seen_at))
