"""Weight syncs without the share of the links' limit, which nothing ever measured: the column was always null.

Revision: 0017, after 0016.
"""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_column("weight_syncs", "share_of_limit")
