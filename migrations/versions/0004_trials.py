"""The run that a trial was made for.

Revision: 0004, after 0003. Existing runs are not trials.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("trial_of", sa.Text(), nullable=False, server_default=sa.text("''")))
