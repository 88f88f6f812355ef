"""Lost time and recoveries of many incidents: the same answers, with each moment looked up once per incident.

Revision: 0015, after 0014. Only views changed.
"""

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    pass
