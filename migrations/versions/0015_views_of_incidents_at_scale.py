"""Lost time and recoveries of many incidents: the same answers, with each moment looked up once per incident.

Revision: 0015, after 0014. Only views change, and neither their columns nor what they answer. Before, databases
repeated the subquery of a moment wherever the moment occurred in an expression, and ``downtime_s`` of one incident read
the steps of its run more than twenty times.
"""

import runpy
from pathlib import Path

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

EXTERNAL = runpy.run_path(str(Path(__file__).with_name("0014_times_of_external_trainers.py")))
FIRST, TELEMETRY, UNDRIVEN = EXTERNAL["FIRST"], EXTERNAL["TELEMETRY"], EXTERNAL["UNDRIVEN"]
"""The revisions that created the views, and the functions that replace them."""

seconds, replace_views = TELEMETRY["seconds"], TELEMETRY["replace_views"]
ENDED, SUPERSEDED = TELEMETRY["ENDED"], FIRST["SUPERSEDED"]

KEY = f"({FIRST['STEP_SECONDS']})"
TIMED = f"m.key_id = {KEY}"
UNTIMED = f"NOT EXISTS (SELECT 1 FROM metrics x WHERE x.run_id = i.run_id AND x.key_id = {KEY})"
"""Condition for all metrics of a run that reports no step times."""

LATER = "({0}.attempt, {0}.restart) > (i.attempt, i.restart)"
UP_TO = "(m.attempt, m.restart) <= (i.attempt, i.restart)"
EARLIER_INCIDENT = "(b.seen_at < i.seen_at OR (b.seen_at = i.seen_at AND b.incident_id < i.incident_id))"
LATER_INCIDENT = "(b.seen_at > i.seen_at OR (b.seen_at = i.seen_at AND b.incident_id > i.incident_id))"
OF_RESTART = "m.run_id = i.run_id AND m.attempt = i.attempt AND m.restart = i.restart"
REWOUND = f"(SELECT MIN(r.first_step) FROM restarts r WHERE r.run_id = i.run_id AND {LATER.format('r')})"
"""The step from which on the steps of the restart of an incident were made again."""

KIND_OF_TRAINER = {
    "sqlite": "json_extract(n.spec, '$.trainer.kind')",
    "postgresql": "n.spec -> 'trainer' ->> 'kind'",
}


def interval(dialect: str) -> str:
    """Mean number of steps from one step with a time to the next. Native trainers have times of all steps."""
    return f"""CASE WHEN {KIND_OF_TRAINER[dialect]} = 'command' THEN
               COALESCE((SELECT CAST(MAX(m.step) AS double precision) / NULLIF(COUNT(m.value), 0) FROM metrics m
                          WHERE m.run_id = i.run_id AND {TIMED} AND NOT {SUPERSEDED}), 1) ELSE 1 END"""


def timed_or_all(question: str) -> str:
    """A moment among the steps with a time; among all metrics, for a run that reports no step times."""
    return f"COALESCE({question.format(steps=TIMED)}, {question.format(steps=UNTIMED)})"


def during(since: str, until: str) -> str:
    return UNDRIVEN["during"]("i", since, until)


def span(dialect: str, where: str) -> str:
    length = seconds(dialect, "MIN(m.time)", "MAX(m.time)")
    return f"(SELECT {length} FROM metrics m WHERE {where})"


def lost_time(dialect: str) -> str:
    """``LIMIT 1`` keeps both databases from merging a subquery into the next one, which would repeat its moments. Not
    in the outermost FROM: databases must be able to restrict the view to one run."""
    last_step = timed_or_all(f"""(
                   SELECT MAX(m.time) FROM metrics m
                    WHERE m.run_id = i.run_id AND {{steps}} AND m.time <= i.seen_at AND {UP_TO})""")
    later_steps = f"FROM metrics m WHERE m.run_id = i.run_id AND {{}} AND {LATER.format('m')}"
    begin = FIRST["TIME_FUNCTIONS"][dialect][1]("t.time", f"t.value * ({interval(dialect)})")
    all_steps = f"{OF_RESTART} AND {UNTIMED}"
    return f"""
SELECT run_id, incident_id, failure_kind, downtime_s, repeated_s, downtime_s + repeated_s AS lost_s
FROM (
    SELECT i.run_id, i.incident_id, i.failure_kind, (
        WITH earlier AS (
            SELECT {last_step} AS last_step_at,
                   (SELECT MAX(b.seen_at) FROM interruptions b
                     WHERE b.run_id = i.run_id AND {EARLIER_INCIDENT}) AS incident_before,
                   (SELECT a.planned_at FROM attempts a
                     WHERE a.run_id = i.run_id AND a.number = i.attempt) AS planned_at
            LIMIT 1
        ),
        ends AS (
            SELECT COALESCE(
                (SELECT {begin} FROM (SELECT m.time, m.value {later_steps.format(TIMED)} ORDER BY m.time LIMIT 1) t),
                (SELECT MIN(m.time) {later_steps.format(UNTIMED)})) AS time
            UNION ALL
            SELECT b.seen_at FROM interruptions b WHERE b.run_id = i.run_id AND {LATER_INCIDENT}
            UNION ALL
            SELECT e.time FROM events e
             WHERE e.run_id = i.run_id AND e.source = 'control.jsonl' AND e.kind = 'run_moved' AND e.state IN {ENDED}
               AND e.time >= i.seen_at
            UNION ALL
            SELECT COALESCE(n.ended_at, n.progress_at)
        ),
        framed AS (
            SELECT CASE WHEN incident_before IS NOT NULL AND (last_step_at IS NULL OR last_step_at < incident_before)
                        THEN i.seen_at
                        ELSE COALESCE({FIRST["extreme"]("MAX", "last_step_at", "planned_at")}, i.seen_at) END AS since,
                   (SELECT MIN(time) FROM ends) AS until
            FROM earlier LIMIT 1
        )
        SELECT CASE WHEN until > since THEN {seconds(dialect, "since", "until")} - {during("since", "until")}
                    ELSE 0 END
        FROM framed) AS downtime_s,
        CASE WHEN EXISTS (SELECT 1 FROM interruptions b WHERE b.run_id = i.run_id AND {EARLIER_INCIDENT}
                             AND b.attempt = i.attempt AND b.restart = i.restart) THEN 0
             ELSE COALESCE(
                (SELECT SUM(m.value) FROM metrics m WHERE {OF_RESTART} AND {TIMED} AND m.step >= {REWOUND})
                    * {interval(dialect)},
                {span(dialect, all_steps)}
                    - COALESCE({span(dialect, f"{all_steps} AND NOT {SUPERSEDED}")}, 0), 0) END AS repeated_s
    FROM interruptions i JOIN runs n ON n.run_id = i.run_id) t"""


def recoveries(dialect: str) -> str:
    first = timed_or_all(f"""(
               SELECT MIN(m.time) FROM metrics m
                WHERE m.run_id = i.run_id AND {{steps}} AND {LATER.format("m")})""")
    new = timed_or_all(f"""(
               SELECT MIN(m.time) FROM metrics m
                WHERE m.run_id = i.run_id AND {{steps}} AND {LATER.format("m")} AND m.step > COALESCE((
                   SELECT MAX(m.step) FROM metrics m
                    WHERE m.run_id = i.run_id AND {{steps}} AND {UP_TO}), 0))""")

    def until(moment: str) -> str:
        passed = seconds(dialect, "i.seen_at", "reached_at")
        return f"""(
               SELECT {passed} - {during("i.seen_at", "reached_at")}
               FROM (SELECT {moment} AS reached_at LIMIT 1) reached)"""

    return f"""
SELECT i.run_id, i.incident_id, i.attempt, i.restart, i.failure_kind, i.detected_after_s, i.seen_at,
       {first} AS first_step_at, {until(first)} AS recovery_s,
       {new} AS new_step_at, {until(new)} AS caught_up_s
FROM interruptions i"""


def undriven_times(dialect: str) -> str:
    """The same times. The added condition needs no subquery and holds for few events, so it is checked first. Without
    the kind of the other events, for which PostgreSQL would search all runs by an index."""
    journal = "WHERE e.source = 'control.jsonl' AND ("
    few = f"(e.kind = 'controller_started' OR e.state IN {ENDED})"
    made: str = UNDRIVEN["replaced"](UNDRIVEN["undriven_times"](dialect), journal, f"{journal[:-1]}{few} AND (")
    return made


def views_before(dialect: str) -> dict[str, str]:
    views = EXTERNAL["changed_views"](dialect)
    return {
        "undriven_times": UNDRIVEN["undriven_times"](dialect),
        **{name: views[name] for name in ("incident_lost_time", "run_recoveries")},
    }


def upgrade() -> None:
    dialect = op.get_context().dialect.name
    views = {
        "undriven_times": undriven_times(dialect),
        "incident_lost_time": lost_time(dialect),
        "run_recoveries": recoveries(dialect),
    }
    replace_views(dialect, views)


def downgrade() -> None:
    dialect = op.get_context().dialect.name
    replace_views(dialect, views_before(dialect))
