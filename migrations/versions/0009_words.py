"""One word for one meaning: columns and a table whose names were pictures or meant two things.

Revision: 0009, after 0008. Every row is carried over. ``rlhf_core.history.renamed`` has the same names, for the advice
that answers saved SQL with an old name.

Both databases rename a column in the triggers and references that use it, PostgreSQL also in the views, so nothing has
to be recreated.
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

COLUMNS = (
    ("checkpoints", "stage", "loop"),
    ("checkpoints", "stage_finished", "loop_finished"),
    ("leases", "owner", "holder"),
    ("checks", "position", "check_index"),
    ("evaluation_samples", "position", "row_index"),
    ("promotions", "asked_at", "requested_at"),
    ("promotions", "moved_at", "state_changed_at"),
)
TABLE, CONSTRAINTS = ("kept_goodput", "goodput_cache"), ("pk_{}", "fk_{}_run_id")
EVENTS = ("keeper_", "reconcile_")
"""Prefixes of the kinds of events that the site daemon writes."""
PUBLISHED = ("reconcile_tell", "reconcile_publish")


def upgrade() -> None:
    for table, before, after in COLUMNS:
        op.execute(f"ALTER TABLE {table} RENAME COLUMN {before} TO {after}")
    rename_table(*TABLE)
    rename_events(*EVENTS)
    rename_events(*PUBLISHED)


def rename_table(before: str, after: str) -> None:
    op.rename_table(before, after)
    if op.get_context().dialect.name == "postgresql":  # SQLite cannot rename constraints, and nothing needs that
        for name in CONSTRAINTS:
            op.execute(f"ALTER TABLE {after} RENAME CONSTRAINT {name.format(before)} TO {name.format(after)}")


def rename_events(before: str, after: str) -> None:
    events = sa.table("events", sa.column("kind", sa.Text()))
    op.execute(
        events.update()
        .where(events.c.kind.startswith(before, autoescape=True))
        .values(kind=sa.literal(after) + sa.func.substr(events.c.kind, len(before) + 1))
    )
