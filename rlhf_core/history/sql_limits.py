"""Limits for the SQL of a user: database time, and on SQLite the size of values."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MAX_VALUE_BYTES = 64 << 20
"""Largest text, blob or row that SQLite may create or return."""
MAX_STATEMENT_BYTES = 1 << 20
MAX_PATTERN_BYTES = 1000
"""Longest pattern of LIKE and GLOB, because their time grows with its length times that of the text."""
MAX_ANSWER_BYTES = 256 << 20
"""Largest result held in memory; a result printed row by row may be larger."""

_INSTRUCTIONS = 10_000
"""Instructions of SQLite's virtual machine between two readings of the clock: about a millisecond."""


class WorkClock:
    """Time that the database has worked on one statement, without the time of the result's reader.

    Args:
        limit_s: time limit, in seconds.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._used_s = 0.0
        self._since: float | None = None

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count the time within the block."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._used_s, self._since = self.used_s, None

    @property
    def is_working(self) -> bool:
        """True within :meth:`working`. May be read from any thread."""
        return self._since is not None

    @property
    def used_s(self) -> float:
        """Seconds so far."""
        since = self._since
        return self._used_s + (time.monotonic() - since if since is not None else 0.0)

    @property
    def left_s(self) -> float:
        """Seconds left; negative after the limit."""
        return self.limit_s - self.used_s


def limit_sqlite(connection: sqlite3.Connection, clock: WorkClock) -> None:
    """Make SQLite reject values that are too large, and stop after the time limit or an interrupt of the process: the
    next step then raises ``sqlite3.OperationalError`` ("interrupted")."""
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
    connection.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, MAX_STATEMENT_BYTES)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, MAX_PATTERN_BYTES)
    # Ctrl-C is raised in this function, the only Python code running meanwhile; the driver then also stops.
    connection.set_progress_handler(lambda: clock.left_s <= 0, _INSTRUCTIONS)


def size_of(value: Any) -> int:
    """Estimate the bytes of a value."""
    return len(value) if isinstance(value, str | bytes) else 8
