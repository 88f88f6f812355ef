"""The operating system's user, next to the name of the user who requested a run.

Revision: 0007, after 0006. For existing runs it is unknown, and stays empty.
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("owner_account", sa.Text(), nullable=False, server_default=sa.text("''")))
