"""Restarts with their last step that counts, and goodput, lost time and recoveries that use it, written out in full.

Revision: 0018, after 0017. The views keep their columns and what they answer. Before, they found the steps that count by
comparing each restart with all later ones, and asked for each metric of a run whether the run reports step times.
"""

import runpy
from pathlib import Path

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

BEFORE = runpy.run_path(str(Path(__file__).with_name("0016_views_of_long_runs.py")))
FIRST, TELEMETRY, UNDRIVEN = BEFORE["FIRST"], BEFORE["TELEMETRY"], BEFORE["EXTERNAL"]["UNDRIVEN"]
"""The revision that created the views before, and those with the functions that both databases write differently."""

seconds, replace_views, ENDED = TELEMETRY["seconds"], TELEMETRY["replace_views"], TELEMETRY["ENDED"]
extreme, TIME_FUNCTIONS, during = FIRST["extreme"], FIRST["TIME_FUNCTIONS"], UNDRIVEN["during"]

LAST_VALID_STEPS = """
UPDATE restarts SET last_valid_step = (
    SELECT MIN(s.step) FROM (
        SELECT restarts.last_step AS step
        UNION ALL
        SELECT l.first_step - 1 FROM restarts l
         WHERE l.run_id = restarts.run_id AND (l.attempt, l.restart) > (restarts.attempt, restarts.restart)) s)
WHERE last_step IS NOT NULL"""

KEY = f"({FIRST['STEP_SECONDS']})"
IS_EXTERNAL = {
    "sqlite": "json_extract(n.spec, '$.trainer.kind') = 'command'",
    "postgresql": "n.spec -> 'trainer' ->> 'kind' = 'command'",
}
"""Condition for runs of trainers that report their steps as they like. Native trainers report each step."""

LATER = "(r.attempt, r.restart) > (i.attempt, i.restart)"
UP_TO = "(r.attempt, r.restart) <= (i.attempt, i.restart)"
THE_SAME = "(r.attempt, r.restart) = (i.attempt, i.restart)"
EARLIER_INCIDENT = "b.run_id = i.run_id AND (b.seen_at, b.incident_id) < (i.seen_at, i.incident_id)"
LATER_INCIDENT = "b.run_id = i.run_id AND (b.seen_at, b.incident_id) > (i.seen_at, i.incident_id)"

ALL, VALID = ("r.first_step", "r.last_step"), ("r.first_step", "r.last_valid_step")
REPEATED = ("CASE WHEN r.last_valid_step < r.first_step THEN r.first_step ELSE r.last_valid_step + 1 END", "r.last_step")
"""First and last step of three parts of a restart ``r``. Databases read all rows from the first to the last one, also
those of other restarts."""


def steps(key: str, part: tuple[str, str]) -> str:
    """Condition for the rows ``m`` of a metric in a part of a restart ``r``: a range of the primary key."""
    return f"""m.run_id = r.run_id AND m.key_id = {key} AND m.step BETWEEN {part[0]} AND {part[1]}
                AND m.attempt = r.attempt AND m.restart = r.restart"""


def first(column: str, key: str, part: tuple[str, str] = ALL) -> str:
    return f"(SELECT m.{column} FROM metrics m WHERE {steps(key, part)} ORDER BY m.step LIMIT 1)"


def last(column: str, key: str, part: tuple[str, str] = ALL, condition: str = "TRUE") -> str:
    return f"(SELECT m.{column} FROM metrics m WHERE {steps(key, part)} AND {condition} ORDER BY m.step DESC LIMIT 1)"


def restarts(of: str, condition: str) -> str:
    return f"FROM restarts r WHERE r.run_id = {of}.run_id AND {condition}"


def untimed(of: str, condition: str) -> str:
    """The restarts of a run that reports no step times, each with all metrics ``k``. Other runs have none."""
    return f"""FROM restarts r CROSS JOIN latest_metrics k
              WHERE r.run_id = {of}.run_id AND k.run_id = {of}.run_id AND {condition} AND NOT EXISTS (
                    SELECT 1 FROM latest_metrics x WHERE x.run_id = {of}.run_id AND x.key_id = {KEY})"""


def among_restarts(found: str, condition: str) -> str:
    """An aggregate over some restarts of the run of an incident, by step times or, without those, by all metrics."""
    return f"""COALESCE(
            (SELECT {found.format(key=KEY)} {restarts("i", condition)}),
            (SELECT {found.format(key="k.key_id")} {untimed("i", condition)}))"""


def interval(dialect: str, of: str) -> str:
    """Mean number of steps from one step with a time to the next."""
    return f"""CASE WHEN {IS_EXTERNAL[dialect]} THEN COALESCE((
                SELECT CAST(MAX(m.step) AS double precision) / NULLIF(COUNT(m.value), 0)
                FROM restarts r JOIN metrics m ON {steps(KEY, VALID)} WHERE r.run_id = {of}.run_id), 1) ELSE 1 END"""


def timed_s(dialect: str, of: str, part: tuple[str, str], condition: str = "TRUE") -> str:
    """Seconds of the steps in a part of some restarts of a run; null without step times in it."""
    return f"""(SELECT SUM(m.value) FROM restarts r JOIN metrics m ON {steps(KEY, part)}
              WHERE r.run_id = {of}.run_id AND {condition}) * ({interval(dialect, of)})"""


def untimed_s(dialect: str, of: str, part: tuple[str, str], condition: str = "TRUE") -> str:
    """Seconds from the first to the last metric of some restarts of a run; null for a run with step times."""
    begin, end = first("time", "k.key_id", part), last("time", "k.key_id", part)
    return f"""(SELECT SUM(t.seconds) FROM (
             SELECT {seconds(dialect, f"MIN({begin})", f"MAX({end})")} AS seconds
             {untimed(of, condition)}
             GROUP BY r.attempt, r.restart) t)"""


def computed(dialect: str, columns: str, source: str, name: str, moments: str) -> str:
    """Columns of a source with this alias, and what follows from moments that are computed once per row. PostgreSQL would
    compute and plan a moment wherever it occurs; a subquery in the outermost FROM that it cannot merge would also keep
    it from restricting the view to one run. SQLite, which has no ``LATERAL``, repeats some of them."""
    if dialect == "sqlite":
        return f"SELECT {columns} FROM (SELECT {name}.*, {moments} FROM {source}) {name}"
    return f"SELECT {columns} FROM {source} CROSS JOIN LATERAL (SELECT {moments} OFFSET 0) moments"


def run_goodput(dialect: str) -> str:
    def spent(part: tuple[str, str]) -> str:
        return f"COALESCE({timed_s(dialect, 'n', part)}, {untimed_s(dialect, 'n', part)}, 0)"

    ended = "COALESCE(n.ended_at, n.progress_at)"
    queued = seconds(dialect, "a.submitted_at", "COALESCE(a.started_at, a.ended_at, n.progress_at)")
    columns = """n.run_id, n.name, n.state, wall_s, queue_s, productive_s, made_s - productive_s AS repeated_s, lost_s,
       productive_s / NULLIF(wall_s - queue_s, 0) AS ettr"""
    moments = f"""
           {seconds(dialect, "n.created_at", ended)}
               - COALESCE((SELECT SUM(u.seconds) FROM undriven_times u WHERE u.run_id = n.run_id), 0) AS wall_s,
           COALESCE((SELECT SUM({queued}) FROM attempts a
                      WHERE a.run_id = n.run_id AND a.submitted_at IS NOT NULL), 0) AS queue_s,
           {spent(VALID)} AS productive_s,
           {spent(ALL)} AS made_s,
           COALESCE((SELECT SUM(l.lost_s) FROM incident_lost_time l WHERE l.run_id = n.run_id), 0) AS lost_s"""
    return computed(dialect, columns, "runs n", "n", moments)


def incident_lost_time(dialect: str) -> str:
    """``LIMIT 1`` keeps both databases from merging a subquery into the next one, which would repeat its moments."""
    last_step = among_restarts(f"MAX({last('time', '{key}', condition='m.time <= i.seen_at')})", UP_TO)
    begin = TIME_FUNCTIONS[dialect][1]("t.time", f"t.value * ({interval(dialect, 'i')})")
    repeated = f"""COALESCE(
            {timed_s(dialect, "i", REPEATED, THE_SAME)},
            {untimed_s(dialect, "i", ALL, THE_SAME)} - COALESCE({untimed_s(dialect, "i", VALID, THE_SAME)}, 0),
            0)"""
    columns = "i.run_id, i.incident_id, i.failure_kind, downtime_s, repeated_s, downtime_s + repeated_s AS lost_s"
    moments = f"""(
        WITH earlier AS (
            SELECT {last_step} AS last_step_at,
                   (SELECT MAX(b.seen_at) FROM interruptions b WHERE {EARLIER_INCIDENT}) AS incident_before,
                   (SELECT a.planned_at FROM attempts a
                     WHERE a.run_id = i.run_id AND a.number = i.attempt) AS planned_at
            LIMIT 1
        ),
        ends AS (
            SELECT COALESCE(
                (SELECT {begin} FROM (
                     SELECT * FROM (
                         SELECT {first("time", KEY)} AS time, {first("value", KEY)} AS value
                         {restarts("i", LATER)}) f
                     WHERE f.time IS NOT NULL ORDER BY f.time LIMIT 1) t),
                (SELECT MIN({first("time", "k.key_id")}) {untimed("i", LATER)})) AS time
            UNION ALL
            SELECT b.seen_at FROM interruptions b WHERE {LATER_INCIDENT}
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
                        ELSE COALESCE({extreme("MAX", "last_step_at", "planned_at")}, i.seen_at) END AS since,
                   (SELECT MIN(time) FROM ends) AS until
            FROM earlier LIMIT 1
        )
        SELECT CASE WHEN until > since THEN {seconds(dialect, "since", "until")} - {during("i", "since", "until")}
                    ELSE 0 END
        FROM framed) AS downtime_s,
        CASE WHEN EXISTS (SELECT 1 FROM interruptions b
                           WHERE {EARLIER_INCIDENT} AND b.attempt = i.attempt AND b.restart = i.restart)
             THEN 0 ELSE {repeated} END AS repeated_s"""
    return computed(dialect, columns, "interruptions i JOIN runs n ON n.run_id = i.run_id", "i", moments)


def run_recoveries(dialect: str) -> str:
    first_step_at = among_restarts(f"MIN({first('time', '{key}')})", LATER)
    reached = among_restarts(f"MAX({last('step', '{key}')})", UP_TO)
    next_step = "CASE WHEN h.step < r.first_step THEN r.first_step ELSE h.step + 1 END"
    new = among_restarts(f"MIN({first('time', '{key}', (next_step, 'r.last_step'))})", LATER)
    new_step_at = f"(SELECT {new} FROM (SELECT COALESCE({reached}, 0) AS step LIMIT 1) h)"

    def until(moment: str) -> str:
        return f"""(SELECT {seconds(dialect, "i.seen_at", "reached_at")} - {during("i", "i.seen_at", "reached_at")}
        FROM (SELECT {moment} AS reached_at LIMIT 1) reached)"""

    columns = f"""i.run_id, i.incident_id, i.attempt, i.restart, i.failure_kind, i.detected_after_s, i.seen_at,
       first_step_at, {until("first_step_at")} AS recovery_s,
       new_step_at, {until("new_step_at")} AS caught_up_s"""
    moments = f"{first_step_at} AS first_step_at, {new_step_at} AS new_step_at"
    return computed(dialect, columns, "interruptions i", "i", moments)


def upgrade() -> None:
    dialect = op.get_context().dialect.name
    op.add_column("restarts", sa.Column("last_valid_step", sa.Integer(), nullable=True))
    op.execute(LAST_VALID_STEPS)
    views = {
        "incident_lost_time": incident_lost_time(dialect),
        "run_recoveries": run_recoveries(dialect),
        "run_goodput": run_goodput(dialect),
    }
    replace_views(dialect, views)


def downgrade() -> None:
    dialect = op.get_context().dialect.name
    views = {
        "incident_lost_time": BEFORE["lost_time"](dialect),
        "run_recoveries": BEFORE["recoveries"](dialect),
        "run_goodput": BEFORE["goodput"](dialect),
    }
    replace_views(dialect, views)
    op.drop_column("restarts", "last_valid_step")
