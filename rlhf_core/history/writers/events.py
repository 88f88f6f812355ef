"""Rows of events: of agents, of the site daemon, and of data that could not be stored."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from rlhf_core.history.batch import EventEntry, SetAside
from rlhf_core.history.tables.sqlalchemy_core import EVENTS
from rlhf_core.history.writers.upserts import Row, columns_of, insert_or_keep
from rlhf_core.schemas.reports import ReconcileNote

SET_ASIDE = "set_aside"
"""Kind of the event for part of a file of the run that could not be stored."""


def write_events(connection: Connection, run_id: str, entries: Sequence[EventEntry]) -> None:
    """Write the events of agents."""
    rows = [
        {
            "run_id": run_id,
            "source": entry.source,
            "position": entry.position,
            "attempt": entry.attempt,
            "restart": entry.restart,
            "state": None,
            **columns_of(EVENTS, entry.event),
        }
        for entry in entries
    ]
    insert_or_keep(connection, EVENTS, rows)


_RENAMED_NOTES = {"tell": "publish"}
"""Kinds of notes that earlier versions wrote, with their present names."""


def write_notes(connection: Connection, run_id: str, notes: Sequence[tuple[int, ReconcileNote]]) -> None:
    """Write the notes of the site daemon."""
    rows = [
        event_row(
            run_id,
            "housekeeping.jsonl",
            position,
            note.time,
            f"reconcile_{_RENAMED_NOTES.get(note.kind, note.kind)}",
            note.message,
            attempt=note.attempt,
            data=dict(note.data),
        )
        for position, note in notes
    ]
    insert_or_keep(connection, EVENTS, rows)


def write_set_aside(connection: Connection, run_id: str, found: Sequence[SetAside]) -> None:
    """Write an event for each part of a file that could not be stored."""
    rows = [event_row(run_id, one.source, one.position, one.found_at, SET_ASIDE, one.message) for one in found]
    insert_or_keep(connection, EVENTS, rows)


def event_row(run_id: str, source: str, position: int, time: datetime, kind: str, message: str, **more: Any) -> Row:
    """Build the row of an event; ``more`` are further columns of its kind."""
    key = {"run_id": run_id, "source": source, "position": position}
    nothing: Row = {"attempt": None, "restart": None, "node": "", "role": None, "state": None, "data": {}}
    return {**key, "time": time, "kind": kind, "message": message, **nothing, **more}
