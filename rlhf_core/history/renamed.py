"""Names that a migration changed, and the advice for SQL that still uses an old one.

A table whose column was renamed cannot keep the old name beside the new one, and a view cannot carry the name of its
table: so the answer to the old name is a message that gives the new one.
"""

import re
from dataclasses import dataclass

from rlhf_core.errors import BadInput


@dataclass(frozen=True)
class Renamed:
    """One name that a migration changed."""

    revision: str
    """Revision of the schema that has the new name first."""
    table: str
    """Table of the column, by its present name; for a table, its old name."""
    column: str
    """Old name of the column; empty for a table."""
    now: str
    """New name."""
    why: str
    """Reason for the change."""


RENAMED = (
    Renamed("0009", "checkpoints", "stage", "loop", "a stage is a step of the run; sft and grpo are training loops"),
    Renamed("0009", "checkpoints", "stage_finished", "loop_finished", "as above"),
    Renamed("0009", "leases", "owner", "holder", "`runs.owner` is a user, this is a controller"),
    Renamed("0009", "checks", "position", "check_index", "a position is a byte in a file, this is a number in a list"),
    Renamed("0009", "evaluation_samples", "position", "row_index", "as above"),
    Renamed("0009", "promotions", "asked_at", "requested_at", "requests have times of requests"),
    Renamed("0009", "promotions", "moved_at", "state_changed_at", "the state changes; the model does not move"),
    Renamed("0009", "kept_goodput", "", "goodput_cache", "it is a cache of `run_goodput`"),
)
"""Every name that changed since version 0.1."""

_OLD_EVENTS = re.compile(r"'keeper[_\\%][^']*'")
_NO_COLUMN = re.compile(r"""no such column: (?:\w+\.)?"?(\w+)|column (?:\w+\.)?"?(\w+)"? does not exist""")
_NO_TABLE = re.compile(r"""no such table: (?:main\.)?(\w+)|relation "(?:\w+\.)?(\w+)" does not exist""")


def advice(text: str, error: str) -> str:
    """Explain an unknown name in a statement by the migration that renamed it.

    Args:
        text: the statement.
        error: message of the database.

    Returns:
        A sentence with the new name; empty where no migration explains the error.
    """
    words = set(re.findall(r"\w+", text.lower()))
    if found := _NO_TABLE.search(error):
        table = (found[1] or found[2]).lower()
        fitting = [one for one in RENAMED if not one.column and one.table == table]
    elif found := _NO_COLUMN.search(error):
        column = (found[1] or found[2]).lower()
        fitting = [one for one in RENAMED if one.column == column and one.table in words]
    else:
        fitting = []
    return " ".join(
        f"{f'{one.table}.' if one.column else ''}{one.column or one.table} is called {one.now} since schema "
        f"{one.revision}: write {one.now} instead."
        for one in fitting
    )


def refuse_old_values(text: str) -> None:
    """Refuse a statement that looks for events by a kind that no event has any more: it would find nothing.

    Raises:
        BadInput: names the new kind.
    """
    found = _OLD_EVENTS.search(text)
    if found is not None and re.search(r"\bevents\b", text, re.IGNORECASE):
        now = found[0].replace("keeper", "reconcile", 1)
        raise BadInput(f"events of kind {found[0]} are called {now} since schema 0009: write {now} instead.")
