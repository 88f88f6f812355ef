"""Syncs of weights into rollout engines: bytes, seconds, rate, and the engines that acknowledged.

Revision: 0011, after 0010. Existing runs have none.
"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
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
        sa.Column("share_of_limit", sa.Double(), nullable=True),
        sa.Column("engines", sa.Integer(), nullable=False),
        sa.Column("acknowledged", sa.Integer(), nullable=False),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name="fk_weight_syncs_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "attempt", "restart", "number", name="pk_weight_syncs"),
    )
