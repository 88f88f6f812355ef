"""Times in which nothing drove a run, which count neither for the run nor for its recoveries and lost time.

Revision: 0012, after 0011. Rows stay as they are; the cached totals of runs with such times are computed again.
"""

import runpy
from pathlib import Path

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

INTERRUPTIONS = runpy.run_path(str(Path(__file__).with_name("0010_interruptions.py")))
TELEMETRY = INTERRUPTIONS["TELEMETRY"]
"""The revisions that last created the views."""

seconds, replace_views = TELEMETRY["seconds"], TELEMETRY["replace_views"]
ENDED, GOODPUT = TELEMETRY["ENDED"], TELEMETRY["GOODPUT"]

JOURNAL = "{0}.run_id = e.run_id AND {0}.source = 'control.jsonl' AND {0}.kind = '{1}'"
MOVED = JOURNAL.format("n", "run_moved")
STARTED = JOURNAL.format("n", "controller_started")
STEPS = "m.run_id = e.run_id AND m.time < e.time"


def undriven_times(dialect: str) -> str:
    """From the end of a run to its resume; and, for a run whose controller died, from the last sign of life to the next
    controller. Signs of life are the events of controllers and agents and the steps, or all metrics of a trainer that
    does not report step times. Time in which a job waits in a queue is never included: that is ``queue_s``.

    Not a UNION, because SQLite cannot restrict one to a single run."""
    return f"""
SELECT run_id, began_at, ended_at, {seconds(dialect, "began_at", "ended_at")} AS seconds
FROM (
    SELECT e.run_id,
           CASE e.kind WHEN 'run_moved' THEN e.time ELSE (SELECT MAX(s.time) FROM (
               SELECT MAX(n.time) AS time FROM events n
                WHERE n.run_id = e.run_id AND n.time < e.time AND n.kind NOT LIKE 'reconcile%'
               UNION ALL
               SELECT COALESCE(
                   (SELECT MAX(m.time) FROM metrics m
                     WHERE {STEPS} AND m.key_id IN (SELECT key_id FROM metric_keys WHERE name = 'time/step_s')),
                   (SELECT MAX(m.time) FROM metrics m WHERE {STEPS}))) s) END AS began_at,
           CASE e.kind WHEN 'run_moved' THEN (
               SELECT n.time FROM events n WHERE {MOVED} AND n.position > e.position ORDER BY n.position LIMIT 1)
               ELSE e.time END AS ended_at
    FROM events e
    WHERE e.source = 'control.jsonl' AND (
        (e.kind = 'run_moved' AND e.state IN {ENDED})
        OR (e.kind = 'controller_started'
            AND EXISTS (SELECT 1 FROM events n WHERE {STARTED} AND n.position < e.position)
            AND COALESCE((SELECT n.state FROM events n WHERE {MOVED} AND n.position < e.position
                           ORDER BY n.position DESC LIMIT 1), '') NOT IN {ENDED}
            AND NOT EXISTS (SELECT 1 FROM attempts a WHERE a.run_id = e.run_id AND a.submitted_at < e.time
                               AND COALESCE(a.started_at, a.ended_at, e.time) >= e.time)))) t
WHERE ended_at IS NOT NULL AND began_at IS NOT NULL"""


def during(of: str, since: str, until: str) -> str:
    """Seconds of the undriven times of a run between two moments. No undriven time extends beyond such a moment."""
    return f"""COALESCE((
               SELECT SUM(u.seconds) FROM undriven_times u
                WHERE u.run_id = {of}.run_id AND u.began_at >= {since} AND u.ended_at <= {until}), 0)"""


def changed_views(dialect: str) -> dict[str, str]:
    """The views that count time, without the undriven times."""
    before = earlier_views(dialect)
    recoveries, lost, goodput = (before[name] for name in ("run_recoveries", "incident_lost_time", "run_goodput"))
    for moment in ("first_step_at", "new_step_at"):
        whole = seconds(dialect, "seen_at", moment)
        recoveries = replaced(recoveries, whole, f"{whole} - {during('t', 'seen_at', moment)}")
    whole = seconds(dialect, "since", "until")
    lost = replaced(lost, f"{whole} ELSE 0", f"{whole} - {during('framed', 'since', 'until')} ELSE 0")
    begin, end = goodput.index("COALESCE((\n               SELECT SUM("), goodput.index(" AS wall_s,\n           COALESCE")
    total = "COALESCE((SELECT SUM(u.seconds) FROM undriven_times u WHERE u.run_id = n.run_id), 0)"
    return {
        "run_recoveries": recoveries,
        "incident_lost_time": lost,
        "run_goodput": goodput[:begin] + total + goodput[end:],
    }


def earlier_views(dialect: str) -> dict[str, str]:
    views = INTERRUPTIONS["views_of_incidents"](dialect)
    views = {name: sql.replace("FROM incidents ", "FROM interruptions ") for name, sql in views.items()}
    return {**views, "run_goodput": TELEMETRY["lost_time_views"](dialect)["run_goodput"]}


def replaced(sql: str, before: str, after: str) -> str:
    if sql.count(before) != 1:
        raise ValueError(f"found {before!r} {sql.count(before)} times in a view, expected it once")
    return sql.replace(before, after)


def renew_goodput() -> None:
    """Compute the cached totals of runs with undriven times again."""
    undriven = "run_id IN (SELECT run_id FROM undriven_times)"
    op.execute(f"DELETE FROM goodput_cache WHERE {undriven}")
    op.execute(
        f"INSERT INTO goodput_cache (run_id, ingest_stamp, {GOODPUT}) SELECT n.run_id, n.ingest_stamp, {GOODPUT} "
        f"FROM runs n JOIN run_goodput g ON g.run_id = n.run_id WHERE n.state IN {ENDED} AND n.{undriven}"
    )


def upgrade() -> None:
    dialect = op.get_context().dialect.name
    op.execute(sa.text(f"CREATE VIEW undriven_times AS {undriven_times(dialect)}"))
    replace_views(dialect, changed_views(dialect))
    renew_goodput()


def downgrade() -> None:
    dialect = op.get_context().dialect.name
    replace_views(dialect, earlier_views(dialect))
    renew_goodput()
    op.execute("DROP VIEW undriven_times")
