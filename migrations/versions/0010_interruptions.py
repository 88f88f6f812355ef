"""Time lost and recoveries by interruption: incidents that the run survived cost it no time and need no recovery.

Revision: 0010, after 0009. The views keep their columns; answers about runs of version 0.1 stay the same, because each
of their incidents ended all workers.
"""

import runpy
from pathlib import Path

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

TELEMETRY = runpy.run_path(str(Path(__file__).with_name("0006_telemetry_and_totals.py")))
"""The revision that last created the views."""

replace_views = TELEMETRY["replace_views"]

CHANGED = ("incident_lost_time", "run_recoveries")

INTERRUPTIONS = """
CREATE VIEW interruptions AS
SELECT i.run_id, i.incident_id, i.attempt, i.restart, i.failure_kind, i.detected_after_s, i.seen_at
FROM incidents i
WHERE NOT EXISTS (
    SELECT 1 FROM decisions d
     WHERE d.run_id = i.run_id AND d.decision_id = i.incident_id AND d.action IN ('continue', 'restart_workers'))"""


def views_of_incidents(dialect: str) -> dict[str, str]:
    made = TELEMETRY["lost_time_views"](dialect) | TELEMETRY["views"](dialect)
    return {name: made[name] for name in CHANGED}


def upgrade() -> None:
    dialect = op.get_context().dialect.name
    op.execute(INTERRUPTIONS)
    questions = views_of_incidents(dialect)
    replace_views(dialect, {name: sql.replace("FROM incidents ", "FROM interruptions ") for name, sql in questions.items()})


def downgrade() -> None:
    dialect = op.get_context().dialect.name
    replace_views(dialect, views_of_incidents(dialect))
    op.execute("DROP VIEW interruptions")
