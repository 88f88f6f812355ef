"""Numbers of incidents within their attempt, the decisions about them, and the role of the group they happened in.

Revision: 0008, after 0007. Existing incidents have no number; the role of their group is unknown.
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("incidents", sa.Column("number", sa.Integer(), nullable=False, server_default=sa.text("0")))
    op.add_column("incidents", sa.Column("role", sa.Text(), nullable=True))
    op.add_column("decisions", sa.Column("number", sa.Integer(), nullable=False, server_default=sa.text("0")))
