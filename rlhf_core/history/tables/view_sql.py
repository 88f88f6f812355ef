"""SQL of the views, in full.

A view has no rows of its own, so migration scripts do not mention views: after the scripts, ``migrations/env.py``
replaces all views of a database by these.
"""

from rlhf_core.history.tables.dialects import DIALECTS, Dialect

ENDED = "('completed', 'failed', 'cancelled')"
"""States in which a run has ended."""


# ---------------------------------------------------------------------------------------------------------------------
# Steps. The range of steps of each restart (``restarts``) and the metrics that a run has (``latest_metrics``) lead to
# the few rows of ``metrics`` that count. That relies on one start of the workers ending its steps in order.

KEY = "(SELECT key_id FROM metric_keys WHERE name = 'time/step_s')"

SUPERSEDED = """EXISTS (
    SELECT 1 FROM restarts r WHERE r.run_id = m.run_id AND r.first_step <= m.step
       AND (r.attempt > m.attempt OR (r.attempt = m.attempt AND r.restart > m.restart)))"""
"""A restart goes back to before its first step. What earlier restarts recorded from that step on belongs to weights
that no longer exist, even if the new restart has not come that far yet."""

LATER = "(r.attempt, r.restart) > (i.attempt, i.restart)"
UP_TO = "(r.attempt, r.restart) <= (i.attempt, i.restart)"
THE_SAME = "(r.attempt, r.restart) = (i.attempt, i.restart)"
"""Restarts ``r`` after, up to and of an incident ``i``."""

ALL, VALID = ("r.first_step", "r.last_step"), ("r.first_step", "r.last_valid_step")
REPEATED = (
    "CASE WHEN r.last_valid_step < r.first_step THEN r.first_step ELSE r.last_valid_step + 1 END",
    "r.last_step",
)
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


def interval(db: Dialect, of: str) -> str:
    """Mean number of steps from one step with a time to the next."""
    return f"""CASE WHEN {db.is_external} THEN COALESCE((
                SELECT CAST(MAX(m.step) AS double precision) / NULLIF(COUNT(m.value), 0)
                FROM restarts r JOIN metrics m ON {steps(KEY, VALID)} WHERE r.run_id = {of}.run_id), 1) ELSE 1 END"""


def timed_s(db: Dialect, of: str, part: tuple[str, str], condition: str = "TRUE") -> str:
    """Seconds of the steps in a part of some restarts of a run; null without step times in it."""
    return f"""(SELECT SUM(m.value) FROM restarts r JOIN metrics m ON {steps(KEY, part)}
              WHERE r.run_id = {of}.run_id AND {condition}) * ({interval(db, of)})"""


def untimed_s(db: Dialect, of: str, part: tuple[str, str], condition: str = "TRUE") -> str:
    """Seconds from the first to the last metric of some restarts of a run; null for a run with step times."""
    begin, end = first("time", "k.key_id", part), last("time", "k.key_id", part)
    return f"""(SELECT SUM(t.seconds) FROM (
             SELECT {db.seconds(f"MIN({begin})", f"MAX({end})")} AS seconds
             {untimed(of, condition)}
             GROUP BY r.attempt, r.restart) t)"""


# ---------------------------------------------------------------------------------------------------------------------
# Metrics and nodes

RUN_CURVE = f"""
SELECT m.run_id, k.name AS key, m.step, m.attempt, m.restart, m.value, m.non_finite, m.time
FROM metrics m JOIN metric_keys k ON k.key_id = m.key_id
WHERE NOT {SUPERSEDED}"""

RUN_STEP_TIME = f"""
SELECT run_id, key, num_steps, total_s, mean_s,
       total_s / NULLIF(MAX(CASE WHEN key = 'time/step_s' THEN total_s END) OVER (PARTITION BY run_id), 0) AS share
FROM (
    SELECT m.run_id, k.name AS key, COUNT(*) AS num_steps, SUM(m.value) AS total_s, AVG(m.value) AS mean_s
    FROM metrics m JOIN metric_keys k ON k.key_id = m.key_id
    WHERE k.name LIKE 'time/%' AND m.value IS NOT NULL AND NOT {SUPERSEDED}
    GROUP BY m.run_id, k.name) t"""


def node_figures(db: Dialect) -> str:
    return f"""
SELECT t.run_id, t.attempt, t.restart, t.node, t.time, t.seconds, f.key, {db.figure} AS value
FROM node_telemetry t, {db.figures} f"""


def node_imbalance(db: Dialect) -> str:
    return f"""
SELECT b.run_id, b.attempt, b.restart, b.message AS finding, b.time AS began_at,
       (SELECT MIN(e.time) FROM events e
         WHERE e.run_id = b.run_id AND e.source = b.source AND e.position > b.position
           AND e.kind = 'telemetry' AND e.message = 'no longer: ' || b.message) AS ended_at
FROM events b
WHERE b.kind = 'telemetry' AND {db.finding} = 'begins'"""


STRIKES = """FROM node_strikes s WHERE s.node = n.node AND NOT EXISTS (
         SELECT 1 FROM duplicate_incidents u WHERE u.run_id = s.run_id AND u.incident_id = s.incident_id)"""
NODE_HEALTH = f"""
SELECT n.node,
       (SELECT COUNT(*) FROM attempt_nodes a WHERE a.node = n.node) AS num_attempts,
       (SELECT COUNT(DISTINCT a.run_id) FROM attempt_nodes a WHERE a.node = n.node) AS num_runs,
       (SELECT COUNT(*) {STRIKES}) AS num_strikes,
       (SELECT MAX(s.struck_at) {STRIKES}) AS last_strike_at,
       (SELECT s.failure_kind {STRIKES}
         ORDER BY s.struck_at DESC, s.run_id, s.incident_id LIMIT 1) AS last_failure_kind
FROM (SELECT node FROM attempt_nodes UNION SELECT node FROM node_strikes) n"""


# ---------------------------------------------------------------------------------------------------------------------
# Attempts

ATTEMPT_TIMES = """
SELECT run_id, attempt, submitted_at, started_at,
       CASE WHEN ended_at < started_at THEN started_at ELSE ended_at END AS ended_at
FROM (
    SELECT run_id, attempt, submitted_at,
           CASE WHEN began_at < submitted_at THEN submitted_at ELSE began_at END AS started_at, ended_at
    FROM (
        SELECT a.run_id, a.number AS attempt, a.submitted_at,
               (SELECT MIN(s.time) FROM (
                   SELECT a.started_at AS time
                   UNION ALL
                   SELECT r.started_at FROM restarts r
                   WHERE r.run_id = a.run_id AND r.attempt = a.number) s) AS began_at,
               COALESCE(a.outcome_at, a.ended_at) AS ended_at
        FROM attempts a) seen) ordered"""
"""A local job starts before its submission is recorded, and nodes have other clocks: no job starts before that, or ends
before its start."""


# ---------------------------------------------------------------------------------------------------------------------
# Incidents

SURVIVED = """EXISTS (
    SELECT 1 FROM decisions d
     WHERE d.run_id = i.run_id AND d.decision_id = i.incident_id AND d.action IN ('continue', 'restart_workers'))"""

DUPLICATE_INCIDENTS = f"""
SELECT i.run_id, i.incident_id
FROM incidents i
WHERE i.found_by = 'agent'
  AND EXISTS (
    SELECT 1 FROM incidents c
     WHERE c.run_id = i.run_id AND c.attempt = i.attempt AND c.restart = i.restart AND c.found_by = 'controller')
  AND NOT {SURVIVED}"""

INTERRUPTIONS = f"""
SELECT i.run_id, i.incident_id, i.attempt, i.restart, i.failure_kind, i.detected_after_s, i.seen_at
FROM incidents i
WHERE NOT {SURVIVED}
  AND NOT EXISTS (
    SELECT 1 FROM duplicate_incidents u WHERE u.run_id = i.run_id AND u.incident_id = i.incident_id)"""

EARLIER_INCIDENT = "b.run_id = i.run_id AND (b.seen_at, b.incident_id) < (i.seen_at, i.incident_id)"
LATER_INCIDENT = "b.run_id = i.run_id AND (b.seen_at, b.incident_id) > (i.seen_at, i.incident_id)"


def undriven_times(db: Dialect) -> str:
    """From the end of a run to its resume; and, for a run whose controller died, from the last sign of life to the next
    controller. Signs of life are the events of controllers and agents and the steps, or all metrics of a trainer that
    does not report step times. Time in which a job waits in a queue is never included: that is ``queue_s``. Nor is time
    before a controller that finds workers alive: they drove the run.

    Not a UNION, because SQLite cannot restrict one to a single run. The first condition needs no subquery and holds for
    few events, so it is checked first; with the kind of the other events, PostgreSQL would search all runs by an index.
    A restart that began later has no step before the event."""
    moved = "n.run_id = e.run_id AND n.source = 'control.jsonl' AND n.kind = 'run_moved'"
    last_step = f"""SELECT MAX({last("time", "k.key_id", condition="m.time < e.time")})
                      FROM restarts r CROSS JOIN latest_metrics k
                      WHERE r.run_id = e.run_id AND k.run_id = e.run_id AND COALESCE(r.started_at < e.time, TRUE)"""
    return f"""
SELECT run_id, began_at, ended_at, {db.seconds("began_at", "ended_at")} AS seconds
FROM (
    SELECT e.run_id,
           CASE e.kind WHEN 'run_moved' THEN e.time ELSE (SELECT MAX(s.time) FROM (
               SELECT MAX(n.time) AS time FROM events n
                WHERE n.run_id = e.run_id AND n.time < e.time AND n.kind NOT LIKE 'reconcile%'
               UNION ALL
               SELECT COALESCE(
                   ({last_step} AND k.key_id = {KEY}),
                   ({last_step}))) s) END AS began_at,
           CASE e.kind WHEN 'run_moved' THEN (
               SELECT n.time FROM events n WHERE {moved} AND n.position > e.position ORDER BY n.position LIMIT 1)
               ELSE e.time END AS ended_at
    FROM events e
    WHERE e.source = 'control.jsonl' AND (e.kind = 'controller_started' OR e.state IN {ENDED}) AND (
        (e.kind = 'run_moved' AND e.state IN {ENDED})
        OR (e.kind = 'controller_started'
            AND EXISTS (SELECT 1 FROM events n
                         WHERE n.run_id = e.run_id AND n.source = 'control.jsonl' AND n.kind = 'controller_started'
                           AND n.position < e.position)
            AND COALESCE((SELECT n.state FROM events n WHERE {moved} AND n.position < e.position
                           ORDER BY n.position DESC LIMIT 1), '') NOT IN {ENDED}
            AND NOT EXISTS (SELECT 1 FROM attempt_times a WHERE a.run_id = e.run_id AND a.submitted_at < e.time
                               AND COALESCE(a.started_at, a.ended_at, e.time) >= e.time)
            AND NOT EXISTS (SELECT 1 FROM restarts r
                             WHERE r.run_id = e.run_id AND r.started_at < e.time AND r.ended_at >= e.time)))) t
WHERE ended_at IS NOT NULL AND began_at IS NOT NULL"""


def during(since: str, until: str) -> str:
    """Undriven seconds of the run of an incident between two moments. No undriven time extends beyond such a moment."""
    return f"""COALESCE((
               SELECT SUM(u.seconds) FROM undriven_times u
                WHERE u.run_id = i.run_id AND u.began_at >= {since} AND u.ended_at <= {until}), 0)"""


def incident_lost_time(db: Dialect) -> str:
    """If no step was finished since the previous interruption, the downtime starts at this one: the time before belongs
    to the previous one. ``LIMIT 1`` keeps both databases from merging a subquery into the next one, which would repeat
    its moments."""
    last_step = among_restarts(f"MAX({last('time', '{key}', condition='m.time <= i.seen_at')})", UP_TO)
    begin = db.earlier("t.time", f"t.value * ({interval(db, 'i')})")
    repeated = f"""COALESCE(
            {timed_s(db, "i", REPEATED, THE_SAME)},
            {untimed_s(db, "i", ALL, THE_SAME)} - COALESCE({untimed_s(db, "i", VALID, THE_SAME)}, 0),
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
                        ELSE COALESCE((SELECT MAX(t) FROM (
                            SELECT last_step_at AS t UNION ALL SELECT planned_at AS t) times), i.seen_at) END AS since,
                   (SELECT MIN(time) FROM ends) AS until
            FROM earlier LIMIT 1
        )
        SELECT CASE WHEN until > since THEN {db.seconds("since", "until")} - {during("since", "until")} ELSE 0 END
        FROM framed) AS downtime_s,
        CASE WHEN EXISTS (SELECT 1 FROM interruptions b
                           WHERE {EARLIER_INCIDENT} AND b.attempt = i.attempt AND b.restart = i.restart)
             THEN 0 ELSE {repeated} END AS repeated_s"""
    return db.computed(columns, "interruptions i JOIN runs n ON n.run_id = i.run_id", "i", moments)


RUN_LOST_TIME = """
SELECT run_id, failure_kind, COUNT(*) AS num_incidents, SUM(downtime_s) AS downtime_s, SUM(repeated_s) AS repeated_s,
       SUM(lost_s) AS lost_s
FROM incident_lost_time
GROUP BY run_id, failure_kind"""


def run_recoveries(db: Dialect) -> str:
    first_step_at = among_restarts(f"MIN({first('time', '{key}')})", LATER)
    reached = among_restarts(f"MAX({last('step', '{key}')})", UP_TO)
    next_step = "CASE WHEN h.step < r.first_step THEN r.first_step ELSE h.step + 1 END"
    new = among_restarts(f"MIN({first('time', '{key}', (next_step, 'r.last_step'))})", LATER)
    new_step_at = f"(SELECT {new} FROM (SELECT COALESCE({reached}, 0) AS step LIMIT 1) h)"

    def until(moment: str) -> str:
        return f"""(SELECT {db.seconds("i.seen_at", "reached_at")} - {during("i.seen_at", "reached_at")}
        FROM (SELECT {moment} AS reached_at LIMIT 1) reached)"""

    columns = f"""i.run_id, i.incident_id, i.attempt, i.restart, i.failure_kind, i.detected_after_s, i.seen_at,
       first_step_at, {until("first_step_at")} AS recovery_s,
       new_step_at, {until("new_step_at")} AS caught_up_s"""
    moments = f"{first_step_at} AS first_step_at, {new_step_at} AS new_step_at"
    return db.computed(columns, "interruptions i", "i", moments)


# ---------------------------------------------------------------------------------------------------------------------
# Goodput

GOODPUT = "wall_s, queue_s, productive_s, repeated_s, lost_s, ettr"


def run_goodput(db: Dialect) -> str:
    def spent(part: tuple[str, str]) -> str:
        return f"COALESCE({timed_s(db, 'n', part)}, {untimed_s(db, 'n', part)}, 0)"

    queued = db.seconds("a.submitted_at", "COALESCE(a.started_at, a.ended_at, n.progress_at)")
    columns = """n.run_id, n.name, n.state, wall_s, queue_s, productive_s, made_s - productive_s AS repeated_s, lost_s,
       productive_s / NULLIF(wall_s - queue_s, 0) AS ettr"""
    moments = f"""
           {db.seconds("n.created_at", "COALESCE(n.ended_at, n.progress_at)")}
               - COALESCE((SELECT SUM(u.seconds) FROM undriven_times u WHERE u.run_id = n.run_id), 0) AS wall_s,
           COALESCE((SELECT SUM({queued}) FROM attempt_times a
                      WHERE a.run_id = n.run_id AND a.submitted_at IS NOT NULL), 0) AS queue_s,
           {spent(VALID)} AS productive_s,
           {spent(ALL)} AS made_s,
           COALESCE((SELECT SUM(l.lost_s) FROM incident_lost_time l WHERE l.run_id = n.run_id), 0) AS lost_s"""
    return db.computed(columns, "runs n", "n", moments)


IS_CACHED = "k.run_id = n.run_id AND k.ingest_stamp = n.ingest_stamp"
"""A row that does not belong to the newest batch does not count."""

ALL_GOODPUT = f"""
SELECT n.run_id, n.name, n.state, n.created_at, {GOODPUT}
FROM runs n JOIN goodput_cache k ON {IS_CACHED}
UNION ALL
SELECT n.run_id, n.name, n.state, n.created_at, {GOODPUT}
FROM runs n JOIN run_goodput g ON g.run_id = n.run_id
WHERE NOT EXISTS (SELECT 1 FROM goodput_cache k WHERE {IS_CACHED})"""


def view_sql(dialect: str) -> dict[str, str]:
    """Create the query of each view for a dialect of SQLAlchemy, in an order in which they can be created."""
    db = DIALECTS[dialect]
    return {
        "run_curve": RUN_CURVE,
        "run_step_time": RUN_STEP_TIME,
        "node_figures": node_figures(db),
        "node_imbalance": node_imbalance(db),
        "duplicate_incidents": DUPLICATE_INCIDENTS,
        "node_health": NODE_HEALTH,
        "attempt_times": ATTEMPT_TIMES,
        "interruptions": INTERRUPTIONS,
        "undriven_times": undriven_times(db),
        "incident_lost_time": incident_lost_time(db),
        "run_lost_time": RUN_LOST_TIME,
        "run_recoveries": run_recoveries(db),
        "run_goodput": run_goodput(db),
        "all_goodput": ALL_GOODPUT,
    }
