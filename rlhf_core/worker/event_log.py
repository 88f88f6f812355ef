"""The agent's events: lines in ``events-<node>.jsonl`` for the history, and on standard output for people."""

import contextlib
import threading
from collections.abc import Mapping

from pydantic import JsonValue

from rlhf_core.files.appended import LineWriter
from rlhf_core.run_dir.attempt import RestartDir
from rlhf_core.schemas.attempts import Role
from rlhf_core.schemas.base import utc_now
from rlhf_core.schemas.reports import AgentEvent


class EventLog:
    """Writes the events of one agent; shared by both its threads.

    A full disk must not end training: an event that cannot be written is only printed, and the file is reopened for the
    next one, which terminates a torn line.
    """

    def __init__(self, node: str, restart_dir: RestartDir) -> None:
        self._node = node
        self._restart_dir = restart_dir
        self._writer: LineWriter | None = None
        self._lock = threading.Lock()
        self._losses: list[str] = []

    def move_to(self, restart_dir: RestartDir) -> None:
        """Assign all further events to another restart."""
        with self._lock:
            self._close()
            self._restart_dir = restart_dir

    def add(self, kind: str, message: str, role: Role | None = None, **data: JsonValue) -> None:
        """Record and print one event."""
        event = self._event(kind, message, role, data)
        self.print_line(f"restart {self._restart_dir.restart}: {message}")
        with self._lock:
            try:
                if self._writer is None:
                    self._writer = LineWriter(self._restart_dir.events(self._node), self._losses.append)
                self._writer.write(event)
                while self._losses:
                    self._writer.write(self._event("file", self._losses.pop()))
            except OSError as error:
                self.print_line(f"failed to write the event: {error}")
                self._close()

    def _event(
        self, kind: str, message: str, role: Role | None = None, data: Mapping[str, JsonValue] | None = None
    ) -> AgentEvent:
        values = {"kind": kind, "message": message, "role": role, "data": data or {}}
        return AgentEvent.model_validate({"time": utc_now(), "node": self._node, **values})

    def print_line(self, text: str) -> None:
        """Print one line to standard output, which the scheduler keeps."""
        with contextlib.suppress(OSError, ValueError):
            print(f"{utc_now():%Y-%m-%d %H:%M:%S} {text}", flush=True)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()
            self._writer = None
