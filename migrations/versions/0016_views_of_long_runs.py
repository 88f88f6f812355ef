"""Goodput, lost time and recoveries of long runs: the same answers, with steps found by the primary key of ``metrics``.

Revision: 0016, after 0015. Only views changed.
"""

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    pass
