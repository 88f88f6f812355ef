"""Telemetry of the nodes over time, tags to search by, and cached goodput of ended runs.

Revision: 0006, after 0005. The tags of existing runs are carried over, and their goodput is cached at the end of the
upgrade; their telemetry was never stored.

``metrics`` loses its foreign keys: checking them was half of the cost of every row on PostgreSQL. The transaction that
writes a row has claimed the row of its run and has written the names; no name is ever removed; and a trigger removes
the metrics of a removed run. SQLite can drop foreign keys only by recreating the table.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

TIME = sa.DateTime(timezone=True)
JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")

TAGS = {
    "sqlite": "SELECT DISTINCT n.run_id, t.value FROM runs n, json_each(n.tags) t",
    "postgresql": "SELECT DISTINCT n.run_id, t.value FROM runs n, jsonb_array_elements_text(n.tags) t(value)",
}


FOLLOW = {
    "sqlite": [
        "CREATE TRIGGER metrics_follow_runs AFTER DELETE ON runs "
        "BEGIN DELETE FROM metrics WHERE run_id = OLD.run_id; END"
    ],
    "postgresql": [
        "CREATE FUNCTION metrics_follow_runs() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN DELETE FROM metrics WHERE run_id = OLD.run_id; RETURN NULL; END $$",
        "CREATE TRIGGER metrics_follow_runs AFTER DELETE ON runs "
        "FOR EACH ROW EXECUTE FUNCTION metrics_follow_runs()",
    ],
}


def upgrade() -> None:
    dialect = op.get_context().dialect.name
    op.create_index("ix_runs_owner_created_at", "runs", ["owner", "created_at"])
    op.create_table(
        "run_tags",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("tag", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name="fk_run_tags_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "tag", name="pk_run_tags"),
    )
    op.create_index("ix_run_tags_tag", "run_tags", ["tag"])
    op.create_table(
        "node_telemetry",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("restart", sa.Integer(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("time", TIME, nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("figures", JSON, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name="fk_node_telemetry_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "attempt", "restart", "node", "position", name="pk_node_telemetry"),
    )
    op.create_index("ix_node_telemetry_node_time", "node_telemetry", ["node", "time"])
    op.create_table(
        "kept_goodput",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("ingest_stamp", sa.BigInteger(), nullable=False),
        sa.Column("wall_s", sa.Double(), nullable=False),
        sa.Column("queue_s", sa.Double(), nullable=False),
        sa.Column("productive_s", sa.Double(), nullable=False),
        sa.Column("repeated_s", sa.Double(), nullable=False),
        sa.Column("lost_s", sa.Double(), nullable=False),
        sa.Column("ettr", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name="fk_kept_goodput_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", name="pk_kept_goodput"),
    )
    if dialect == "sqlite":
        make_metrics_again()
    else:
        for name in ("fk_metrics_key_id", "fk_metrics_run_id"):
            op.drop_constraint(name, "metrics", type_="foreignkey")
    for statement in FOLLOW[dialect]:
        op.execute(statement)
    op.execute(f"INSERT INTO run_tags (run_id, tag) {TAGS[dialect]}")


def make_metrics_again() -> None:
    """Recreate the table without references."""
    op.execute("ALTER TABLE metrics RENAME TO old_metrics")
    op.execute(
        "CREATE TABLE metrics (run_id TEXT NOT NULL, key_id INTEGER NOT NULL, step INTEGER NOT NULL, "
        "attempt INTEGER NOT NULL, restart INTEGER NOT NULL, value DOUBLE, non_finite TEXT, time DATETIME NOT NULL, "
        "CONSTRAINT ck_metrics_value_or_non_finite CHECK ((value IS NULL) <> (non_finite IS NULL)), "
        "CONSTRAINT pk_metrics PRIMARY KEY (run_id, key_id, step, attempt, restart)) WITHOUT ROWID"
    )
    columns = "run_id, key_id, step, attempt, restart, value, non_finite, time"
    op.execute(f"INSERT INTO metrics ({columns}) SELECT {columns} FROM old_metrics ORDER BY 1, 2, 3, 4, 5")
    op.execute("DROP TABLE old_metrics")
