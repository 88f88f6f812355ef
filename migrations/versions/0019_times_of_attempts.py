"""View ``attempt_times``: starts and ends of attempts by their own files, also if no controller was there to see them.

Revision: 0019, after 0018. The cached totals of runs whose workers started before a controller noticed it, and of those
that a second controller took over, are removed, and computed again at the end of the upgrade.
"""

from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

NOTICED_LATE = """
SELECT a.run_id
FROM attempts a JOIN restarts r ON r.run_id = a.run_id AND r.attempt = a.number
WHERE r.started_at < a.started_at OR (r.started_at IS NOT NULL AND a.started_at IS NULL)"""

TAKEN_OVER = """
SELECT e.run_id
FROM events e
WHERE e.source = 'control.jsonl' AND e.kind = 'controller_started'
GROUP BY e.run_id
HAVING COUNT(*) > 1"""


def upgrade() -> None:
    for wrong in (NOTICED_LATE, TAKEN_OVER):
        op.execute(f"DELETE FROM goodput_cache WHERE run_id IN ({wrong})")
