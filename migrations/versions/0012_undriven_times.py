"""Times in which nothing drove a run, which count neither for the run nor for its recoveries and lost time.

Revision: 0012, after 0011. The cached totals of runs that may have such times are removed, and computed again at the
end of the upgrade.
"""

from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

RESUMED = """
SELECT e.run_id
FROM events e JOIN events n
  ON n.run_id = e.run_id AND n.source = e.source AND n.kind = e.kind AND n.position > e.position
WHERE e.source = 'control.jsonl' AND (
    e.kind = 'controller_started' OR (e.kind = 'run_moved' AND e.state IN ('completed', 'failed', 'cancelled')))"""


def upgrade() -> None:
    op.execute(f"DELETE FROM goodput_cache WHERE run_id IN ({RESUMED})")
