"""The controllers that drove a run (and so its Prefect flow runs), the state of its promotion, and its tags.

Revision: 0005, after 0004. For existing runs, none of these is known.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

TIME = sa.DateTime(timezone=True)
JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


def upgrade() -> None:
    op.add_column("runs", sa.Column("tags", JSON, nullable=False, server_default=sa.text("'[]'")))
    op.create_table(
        "controllers",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("controller", sa.Text(), nullable=False),
        sa.Column("flow_run_id", sa.Text(), nullable=False),
        sa.Column("flow_run_url", sa.Text(), nullable=False),
        sa.Column("started_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name="fk_controllers_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "position", name="pk_controllers"),
    )
    op.create_index("ix_controllers_flow_run_id", "controllers", ["flow_run_id"])
    op.create_table(
        "promotions",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("checkpoint_step", sa.Integer(), nullable=False),
        sa.Column("decided_by", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("asked_at", TIME, nullable=False),
        sa.Column("moved_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name="fk_promotions_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", name="pk_promotions"),
    )
