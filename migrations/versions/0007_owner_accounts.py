"""The operating system's user beside the name of who asked for a run.

Revision: 0007, after 0006. Of runs that are there it is not known, and stays empty.
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("owner_account", sa.Text(), nullable=False, server_default=sa.text("''")))


def downgrade() -> None:
    op.drop_column("runs", "owner_account")
