"""The second net: agents that say nothing any more, although the scheduler says that their job runs.

Silence of files is weak evidence: a shared file system may show them late, or stall. So each agent is held against its
own last word, for far longer than both take. What agents say of each other they know from the network within seconds,
and that needs no such patience (``rlhf_core/worker/supervision/agent_loss.py``).
"""

from collections.abc import Mapping
from dataclasses import dataclass

SILENT_S = 120.0
"""Silence of an agent of a running job after which the job is ended from here. Far more than an agent needs to publish
(2 s) and than shared file systems take to show it."""
BLIND_S = 30.0
"""A pause between two looks after which silence is counted anew: the watchdog was not looking."""


@dataclass(frozen=True)
class Silence:
    """Agents that have said nothing for too long."""

    nodes: tuple[str, ...]
    seconds: float
    """Shortest silence."""
    of_all: bool
    """True if no agent of the attempt has said anything."""


class SilenceClock:
    """Counts how long each agent of an attempt has published nothing new."""

    def __init__(self, now: float) -> None:
        """Begin to count at ``now``, in monotonic seconds."""
        self._looked_at = now
        self._marks: dict[str, tuple[int, int]] = {}
        self._last_seen_at: dict[str, float] = {}

    def observe(self, now: float, marks: Mapping[str, tuple[int, int]], *, counts: bool) -> Silence | None:
        """Take note of what agents have published by now.

        Args:
            now: monotonic seconds.
            marks: what each agent published last, by node; agents that have not spoken yet are not in it.
            counts: whether silence means anything just now: the job runs, and the scheduler says so.

        Returns:
            The agents that have been silent for too long, if there are any.
        """
        counts = counts and now - self._looked_at <= BLIND_S
        for node, mark in marks.items():
            if not counts or self._marks.get(node) != mark:
                self._last_seen_at[node] = now
        self._marks, self._looked_at = dict(marks), now
        silent = tuple(
            sorted(node for node, last_seen_at in self._last_seen_at.items() if now - last_seen_at > SILENT_S)
        )
        if not silent:
            return None
        seconds = min(now - self._last_seen_at[node] for node in silent)
        return Silence(silent, seconds, of_all=len(silent) == len(self._last_seen_at))
