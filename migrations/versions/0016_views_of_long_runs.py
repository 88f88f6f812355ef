"""Goodput, lost time and recoveries of long runs: the same answers, with steps looked up by the primary key of ``metrics``.

Revision: 0016, after 0015. Only views change, and neither their columns nor what they answer. Before, each incident read
all steps of its run, and compared each with all restarts: ``rlhf show`` took minutes for an external trainer without
step times. Now, the range of steps of each restart (table ``restarts``) and the metrics that a run has
(``latest_metrics``) lead to the few rows that count. That relies on one start of the workers ending its steps in order.
"""

import runpy
from pathlib import Path

from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

BEFORE = runpy.run_path(str(Path(__file__).with_name("0015_views_of_incidents_at_scale.py")))
FIRST, TELEMETRY, EXTERNAL = BEFORE["FIRST"], BEFORE["TELEMETRY"], BEFORE["EXTERNAL"]
"""The revisions that created the views, and the functions that replace them."""

seconds, replace_views, during = TELEMETRY["seconds"], TELEMETRY["replace_views"], BEFORE["during"]
KEY, LATER = BEFORE["KEY"], BEFORE["LATER"].format("r")
UP_TO = "(r.attempt, r.restart) <= (i.attempt, i.restart)"
THE_SAME = "(r.attempt, r.restart) = (i.attempt, i.restart)"

UNTIMED = f"NOT EXISTS (SELECT 1 FROM latest_metrics x WHERE x.run_id = r.run_id AND x.key_id = {KEY})"
"""Condition for a run that reports no step times: all its metrics count."""

RESTARTS = """(
               SELECT run_id, attempt, restart, first_step, last_step, COALESCE(MIN(first_step) OVER (
                   ORDER BY attempt DESC, restart DESC ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 2147483648
               ) - 1 AS last_valid
               FROM restarts WHERE run_id = {0}.run_id) r"""
"""The restarts of a run, with the last step that no later one made again; of the last one, beyond all steps. PostgreSQL
can search an index up to a column, but not up to a subquery."""


def steps(key: str, begin: str = "r.first_step", end: str = "r.last_step") -> str:
    """The rows of a metric in a restart ``r``. Further bounds would be checked row by row."""
    return f"""m.run_id = r.run_id AND m.key_id = {key} AND m.attempt = r.attempt AND m.restart = r.restart
                  AND m.step BETWEEN {begin} AND {end}"""


def starts(condition: str, restarts: str = "restarts r", of: str = "i") -> str:
    """Restarts ``r`` of a run, each with the metrics ``k`` that date its steps."""
    return f"""{restarts} CROSS JOIN latest_metrics k
                WHERE r.run_id = {of}.run_id AND {condition} AND k.run_id = r.run_id AND (k.key_id = {KEY} OR {UNTIMED})"""


def first(column: str, begin: str = "r.first_step", end: str = "r.last_step") -> str:
    """A column of the first row of the metric ``k`` in the restart ``r``."""
    return f"(SELECT m.{column} FROM metrics m WHERE {steps('k.key_id', begin, end)} ORDER BY m.step LIMIT 1)"


def last(column: str, end: str = "r.last_step", condition: str = "TRUE") -> str:
    """A column of the last row of the metric ``k`` in the restart ``r``."""
    return f"""(SELECT m.{column} FROM metrics m WHERE {steps("k.key_id", end=end)} AND {condition}
                 ORDER BY m.step DESC LIMIT 1)"""


def timed(total: str, of: str, restarts: str = "TRUE", begin: str = "r.first_step", end: str = "r.last_step") -> str:
    """A total over the steps with a time in some restarts of a run."""
    return f"""(SELECT {total} FROM {RESTARTS.format(of)} CROSS JOIN metrics m
                WHERE {restarts} AND {steps(KEY, begin, end)})"""


def interval(dialect: str, of: str) -> str:
    """Mean number of steps from one step with a time to the next. Native trainers have times of all steps."""
    mean = timed("CAST(MAX(m.step) AS double precision) / NULLIF(COUNT(m.value), 0)", of, end="r.last_valid")
    return f"CASE WHEN {BEFORE['KIND_OF_TRAINER'][dialect]} = 'command' THEN COALESCE({mean}, 1) ELSE 1 END"


def span(dialect: str, of: str, restarts: str = "TRUE", end: str = "r.last_step") -> str:
    """Seconds from the first to the last metric of each restart, over some restarts of a run without step times."""
    length = seconds(dialect, f"MIN({first('time', end=end)})", f"MAX({last('time', end)})")
    return f"""(SELECT SUM(t.seconds) FROM (
                   SELECT {length} AS seconds FROM {starts(f"{restarts} AND {UNTIMED}", RESTARTS.format(of), of)}
                   GROUP BY r.attempt, r.restart) t)"""


def changed(sql: str, before: str, after: str, new: str) -> str:
    """The SQL with another text between two texts, of which the first occurs once."""
    head, rest = sql.split(before)
    return f"{head}{before}{new}{rest[rest.index(after) :]}"


def goodput(dialect: str) -> str:
    """``last_valid`` restricts a total to the steps that no later restart made again."""
    view = EXTERNAL["changed_views"](dialect)["run_goodput"]
    for before, after, end in (
        (" AS queue_s,\n", "\n               AS productive_s", "r.last_valid"),
        (" AS productive_s,\n", " AS made_s", "r.last_step"),
    ):
        total = timed("SUM(m.value)", "n", end=end)
        measured = f"COALESCE({total} * {interval(dialect, 'n')}, {span(dialect, 'n', end=end)}, 0)"
        view = changed(view, before, after, f"           {measured}")
    return view


def lost_time(dialect: str) -> str:
    last_step = f"(SELECT MAX({last('time', condition='m.time <= i.seen_at')}) FROM {starts(UP_TO)})"
    begin = FIRST["TIME_FUNCTIONS"][dialect][1]("t.time", f"t.value * ({interval(dialect, 'i')})")
    first_later = f"""(SELECT CASE WHEN t.key_id = {KEY} THEN {begin} ELSE t.time END FROM (
                   SELECT * FROM (
                       SELECT k.key_id, {first("time")} AS time, {first("value")} AS value FROM {starts(LATER)}) f
                   WHERE f.time IS NOT NULL ORDER BY f.time LIMIT 1) t)"""
    repeated = timed("SUM(m.value)", "i", THE_SAME, begin="r.last_valid + 1")
    valid = span(dialect, "i", THE_SAME, "r.last_valid")
    view = BEFORE["lost_time"](dialect)
    for before, after, new in (
        ("WITH earlier AS (\n            SELECT ", " AS last_step_at", last_step),
        ("ends AS (\n            SELECT ", " AS time\n", first_later),
        (
            " THEN 0\n             ELSE ",
            " END AS repeated_s",
            f"""COALESCE(
                {repeated} * {interval(dialect, "i")},
                {span(dialect, "i", THE_SAME)} - COALESCE({valid}, 0), 0)""",
        ),
    ):
        view = changed(view, before, after, new)
    return view


def recoveries(dialect: str) -> str:
    later = f"(SELECT MIN({first('time')}) FROM {starts(LATER)})"
    next_step = "CASE WHEN h.step < r.first_step THEN r.first_step ELSE h.step + 1 END"
    new = f"""(
               SELECT MIN({first("time", next_step)})
               FROM (SELECT COALESCE(MAX({last("step")}), 0) AS step FROM {starts(UP_TO)}) h CROSS JOIN {starts(LATER)})"""

    def until(moment: str) -> str:
        passed = seconds(dialect, "i.seen_at", "reached_at")
        return f"""(
               SELECT {passed} - {during("i.seen_at", "reached_at")}
               FROM (SELECT {moment} AS reached_at LIMIT 1) reached)"""

    return f"""
SELECT i.run_id, i.incident_id, i.attempt, i.restart, i.failure_kind, i.detected_after_s, i.seen_at,
       {later} AS first_step_at, {until(later)} AS recovery_s,
       {new} AS new_step_at, {until(new)} AS caught_up_s
FROM interruptions i"""


def undriven_times(dialect: str) -> str:
    """A restart that began later has no step before the event."""
    before = f"""SELECT MAX({last("time", condition="m.time < e.time")}) FROM restarts r CROSS JOIN latest_metrics k
                      WHERE r.run_id = e.run_id AND k.run_id = e.run_id AND COALESCE(r.started_at < e.time, TRUE)"""
    return changed(
        BEFORE["undriven_times"](dialect),
        "UNION ALL\n               SELECT ",
        ") s) END AS began_at",
        f"""COALESCE(
                   ({before} AND k.key_id = {KEY}),
                   ({before}))""",
    )


def upgrade() -> None:
    dialect = op.get_context().dialect.name
    views = {
        "undriven_times": undriven_times(dialect),
        "incident_lost_time": lost_time(dialect),
        "run_recoveries": recoveries(dialect),
        "run_goodput": goodput(dialect),
    }
    replace_views(dialect, views)


def downgrade() -> None:
    dialect = op.get_context().dialect.name
    views = {
        "undriven_times": BEFORE["undriven_times"](dialect),
        "incident_lost_time": BEFORE["lost_time"](dialect),
        "run_recoveries": BEFORE["recoveries"](dialect),
        "run_goodput": EXTERNAL["changed_views"](dialect)["run_goodput"],
    }
    replace_views(dialect, views)
