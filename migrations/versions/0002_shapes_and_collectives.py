"""Facts that runs of the same shape share, and the collective of an incident.

Revision: 0002, after 0001. Existing rows get empty values: ``rlhf db rebuild`` fills them from the run directories.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

JSON = sa.JSON().with_variant(JSONB(), "postgresql")


def upgrade() -> None:
    op.add_column("runs", sa.Column("shape", sa.Text(), nullable=False, server_default=sa.text("''")))
    op.create_index("ix_runs_shape_created_at", "runs", ["shape", "created_at"])
    op.add_column("attempt_nodes", sa.Column("longest_gaps_s", JSON, nullable=False, server_default=sa.text("'{}'")))
    op.add_column("incidents", sa.Column("collective", sa.Text(), nullable=False, server_default=sa.text("''")))
    op.add_column("incidents", sa.Column("collective_sequence", sa.BigInteger(), nullable=True))
