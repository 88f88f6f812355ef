"""Incidents found by both the agents and the controller: views count them once.

Revision: 0013, after 0012. The cached totals of runs with such incidents are removed, and computed again at the end of
the upgrade.
"""

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

FOUND_TWICE = """
SELECT i.run_id
FROM incidents i JOIN incidents c ON c.run_id = i.run_id AND c.attempt = i.attempt AND c.restart = i.restart
WHERE i.found_by = 'agent' AND c.found_by = 'controller'"""


def upgrade() -> None:
    op.execute(f"DELETE FROM goodput_cache WHERE run_id IN ({FOUND_TWICE})")
