"""The schema of version 0.2: one word for one meaning, numbered incidents, weight syncs, last steps that count.

Revision: 0019, after 0007, the schema of version 0.1; none between them was released. Every row is carried over. Existing
incidents have no number and no known role, and existing runs no weight syncs. All cached goodput is removed, because the
views now count times otherwise, and computed again at the end of the upgrade.

Columns and a table whose names were pictures or meant two things are renamed. ``rlhf_core.history.renamed`` has the same
names, for the advice that answers saved SQL with an old name. Both databases rename a column in the triggers and
references that use it, PostgreSQL also in the views, so nothing has to be recreated.
"""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0007"
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

LAST_VALID_STEPS = """
UPDATE restarts SET last_valid_step = (
    SELECT MIN(s.step) FROM (
        SELECT restarts.last_step AS step
        UNION ALL
        SELECT l.first_step - 1 FROM restarts l
         WHERE l.run_id = restarts.run_id AND (l.attempt, l.restart) > (restarts.attempt, restarts.restart)) s)
WHERE last_step IS NOT NULL"""


def upgrade() -> None:
    for table, before, after in COLUMNS:
        op.execute(f"ALTER TABLE {table} RENAME COLUMN {before} TO {after}")
    rename_table(*TABLE)
    rename_events(*EVENTS)
    rename_events(*PUBLISHED)
    op.add_column("incidents", sa.Column("number", sa.Integer(), nullable=False, server_default=sa.text("0")))
    op.add_column("incidents", sa.Column("role", sa.Text(), nullable=True))
    op.add_column("decisions", sa.Column("number", sa.Integer(), nullable=False, server_default=sa.text("0")))
    op.create_table(
        "weight_syncs",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("restart", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("transport", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=True),
        sa.Column("wire_s", sa.Double(), nullable=False),
        sa.Column("apply_s", sa.Double(), nullable=False),
        sa.Column("gb_per_s", sa.Double(), nullable=True),
        sa.Column("engines", sa.Integer(), nullable=False),
        sa.Column("acknowledged", sa.Integer(), nullable=False),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name="fk_weight_syncs_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "attempt", "restart", "number", name="pk_weight_syncs"),
    )
    op.add_column("restarts", sa.Column("last_valid_step", sa.Integer(), nullable=True))
    op.execute(LAST_VALID_STEPS)
    op.execute("DELETE FROM goodput_cache")


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
