"""Names changed by a migration, and the advice for SQL that still uses an old one.

A table cannot keep the old name of a renamed column beside the new one, and a view cannot have the name of its table,
so a query with the old name gets an error with the new one.
"""

import re
from dataclasses import dataclass

from rlhf_core.errors import BadInput


@dataclass(frozen=True)
class Renamed:
    """A name of version 0.1, changed by revision 0019 of the schema."""

    table: str
    """Table of the column, by its current name; for a table, its old name."""
    column: str
    """Old name of the column; empty for a table."""
    now: str
    """New name."""
    why: str
    """Reason for the change."""


RENAMED = (
    Renamed("checkpoints", "stage", "loop", "a stage is a step of the run; sft and grpo are training loops"),
    Renamed("checkpoints", "stage_finished", "loop_finished", "as above"),
    Renamed("leases", "owner", "holder", "`runs.owner` is a user, this is a controller"),
    Renamed("checks", "position", "check_index", "a position is a byte in a file, this is a number in a list"),
    Renamed("evaluation_samples", "position", "row_index", "as above"),
    Renamed("promotions", "asked_at", "requested_at", "requests have times of requests"),
    Renamed("promotions", "moved_at", "state_changed_at", "the state changes; the model does not move"),
    Renamed("kept_goodput", "", "goodput_cache", "it is a cache of `run_goodput`"),
)
"""Every name changed since version 0.1."""

_OLD_EVENTS = re.compile(r"'keeper[_\\%][^']*'")
NO_COLUMN = re.compile(r"""no such column: (?:\w+\.)?"?(\w+)|column (?:\w+\.)?"?([^"]+?)"? does not exist""")
NO_TABLE = re.compile(r"""no such table: (?:main\.)?(\w+)|relation "(?:\w+\.)?([^"]+)" does not exist""")
"""Messages of both databases about a missing column or table, with its name."""


def advice(text: str, error: str) -> str:
    """Explain an unknown name in a statement by the migration that renamed it.

    Args:
        text: the statement.
        error: message of the database.

    Returns:
        A sentence with the new name; empty if no migration explains the error.
    """
    words = set(re.findall(r"\w+", text.lower()))
    if found := NO_TABLE.search(error):
        table = (found[1] or found[2]).lower()
        fitting = [one for one in RENAMED if not one.column and one.table == table]
    elif found := NO_COLUMN.search(error):
        column = (found[1] or found[2]).lower()
        fitting = [one for one in RENAMED if one.column == column and one.table in words]
    else:
        fitting = []
    return " ".join(
        f"{f'{one.table}.' if one.column else ''}{one.column or one.table} is called {one.now} since schema 0019: "
        f"write {one.now} instead."
        for one in fitting
    )


def refuse_old_values(text: str) -> None:
    """Reject a statement that searches for an old kind of event, which would find nothing.

    Raises:
        BadInput: with the new kind.
    """
    found = _OLD_EVENTS.search(text)
    if found is not None and re.search(r"\bevents\b", text, re.IGNORECASE):
        now = found[0].replace("keeper", "reconcile", 1).replace("_tell", "_publish")
        raise BadInput(f"events of kind {found[0]} are called {now} since schema 0019: write {now} instead.")
