"""Measurements of the nodes of an attempt before training, and the attempt that a finding is about.

Revision: 0003, after 0002. Existing findings are those of preflight: attempt 0.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("checks", sa.Column("attempt", sa.Integer(), nullable=False, server_default=sa.text("0")))
    op.create_table(
        "node_speeds",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("matmul_tflops", sa.Double(), nullable=False),
        sa.Column("core_share", sa.Double(), nullable=False),
        sa.Column("bandwidth_gb_s", sa.Double(), nullable=False),
        sa.Column("latency_ms", sa.Double(), nullable=False),
        sa.Column("measured_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name="fk_node_speeds_run_id_runs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "attempt", "node", name="pk_node_speeds"),
    )
    op.create_index("ix_node_speeds_node_measured_at", "node_speeds", ["node", "measured_at"])
