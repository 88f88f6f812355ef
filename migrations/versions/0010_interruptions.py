"""Time lost and recoveries by interruption: incidents that the run survived cost it no time and need no recovery.

Revision: 0010, after 0009. Only views changed.
"""

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    pass
