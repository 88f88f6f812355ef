"""Incidents found by both the agents and the controller: views count them once.

Revision: 0013, after 0012. The rows stay as they are. Cached totals of runs with such incidents are dropped: the view
computes them until the run is written again.
"""

import runpy
from pathlib import Path

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

BEFORE = runpy.run_path(str(Path(__file__).with_name("0010_interruptions.py")))
TELEMETRY = BEFORE["TELEMETRY"]
FIRST = TELEMETRY["FIRST"]
"""The revisions that created the views, and the function that replaces them."""

DUPLICATES = """
CREATE VIEW duplicate_incidents AS
SELECT i.run_id, i.incident_id
FROM incidents i
WHERE i.found_by = 'agent'
  AND EXISTS (
    SELECT 1 FROM incidents c
     WHERE c.run_id = i.run_id AND c.attempt = i.attempt AND c.restart = i.restart AND c.found_by = 'controller')
  AND NOT EXISTS (
    SELECT 1 FROM decisions d
     WHERE d.run_id = i.run_id AND d.decision_id = i.incident_id AND d.action IN ('continue', 'restart_workers'))"""

IS_DUPLICATE = "SELECT 1 FROM duplicate_incidents u WHERE u.run_id = {0}.run_id AND u.incident_id = {0}.incident_id"


def views_before() -> dict[str, str]:
    views = (BEFORE["INTERRUPTIONS"], FIRST["NODE_HEALTH"])
    return {name: view.split(" AS\n", 1)[1] for name, view in zip(("interruptions", "node_health"), views, strict=True)}


def views_after() -> dict[str, str]:
    before = views_before()
    return {
        "interruptions": f"{before['interruptions']} AND NOT EXISTS ({IS_DUPLICATE.format('i')})",
        "node_health": before["node_health"].replace(
            "s.node = n.node", f"s.node = n.node AND NOT EXISTS ({IS_DUPLICATE.format('s')})"
        ),
    }


def upgrade() -> None:
    op.execute(DUPLICATES)
    TELEMETRY["replace_views"](op.get_context().dialect.name, views_after())
    op.execute("DELETE FROM goodput_cache WHERE run_id IN (SELECT run_id FROM duplicate_incidents)")


def downgrade() -> None:
    TELEMETRY["replace_views"](op.get_context().dialect.name, views_before())
    op.execute("DROP VIEW duplicate_incidents")
