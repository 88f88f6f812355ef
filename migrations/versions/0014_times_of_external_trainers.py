"""Goodput, lost time and recoveries of external trainers, which may log only some steps, or no step times.

Revision: 0014, after 0013. Rows stay as they are; the cached totals of runs of external trainers are computed again.
"""

import runpy
from pathlib import Path

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

UNDRIVEN = runpy.run_path(str(Path(__file__).with_name("0012_undriven_times.py")))
TELEMETRY = UNDRIVEN["TELEMETRY"]
FIRST = TELEMETRY["FIRST"]
"""The revisions that created the views, and the functions that replace them."""

replaced, replace_views, GOODPUT = UNDRIVEN["replaced"], TELEMETRY["replace_views"], TELEMETRY["GOODPUT"]

STEP_SECONDS, SUPERSEDED = FIRST["STEP_SECONDS"], FIRST["SUPERSEDED"]
TIMED = f"m.key_id IN ({STEP_SECONDS})"
EXTERNAL = {
    "sqlite": "json_extract(w.spec, '$.trainer.kind') = 'command'",
    "postgresql": "w.spec -> 'trainer' ->> 'kind' = 'command'",
}
"""Condition for runs of trainers that report their steps as they like. Native trainers report each step."""


def untimed(of: str) -> str:
    """Condition for all metrics of a run that reports no step times."""
    return f"NOT EXISTS (SELECT 1 FROM metrics x WHERE x.run_id = {of}.run_id AND x.key_id IN ({STEP_SECONDS}))"


def interval(dialect: str, of: str) -> str:
    """Mean number of steps from one step with a time to the next. Native trainers have times of all steps."""
    return f"""(CASE WHEN EXISTS (SELECT 1 FROM runs w WHERE w.run_id = {of}.run_id AND {EXTERNAL[dialect]}) THEN
               COALESCE((SELECT CAST(MAX(m.step) AS double precision) / NULLIF(COUNT(m.value), 0) FROM metrics m
                          WHERE m.run_id = {of}.run_id AND {TIMED} AND NOT {SUPERSEDED}), 1) ELSE 1 END)"""


def span(dialect: str, where: str) -> str:
    """Seconds from the first to the last metric of each restart, over all restarts."""
    length = TELEMETRY["seconds"](dialect, "MIN(m.time)", "MAX(m.time)")
    return f"""(SELECT SUM(s.seconds) FROM (
                   SELECT {length} AS seconds FROM metrics m WHERE {where} GROUP BY m.attempt, m.restart) s)"""


def changed_views(dialect: str) -> dict[str, str]:
    before = UNDRIVEN["changed_views"](dialect)
    return {
        "run_goodput": goodput(dialect, before["run_goodput"]),
        "incident_lost_time": lost_time(dialect, before["incident_lost_time"]),
        "run_recoveries": recoveries(before["run_recoveries"]),
    }


def goodput(dialect: str, view: str) -> str:
    for rest in (f" AND NOT {SUPERSEDED}", ""):
        timed = f"""(SELECT SUM(m.value) FROM metrics m
                      WHERE m.run_id = n.run_id AND {TIMED}{rest})"""
        whole = span(dialect, f"m.run_id = n.run_id AND {untimed('n')}{rest}")
        view = replaced(view, timed, f"{timed} * {interval(dialect, 'n')}, {whole}")
    return view


def lost_time(dialect: str, view: str) -> str:
    of_restart = "m.attempt = o.attempt AND m.restart = o.restart"
    repeated = f"""(SELECT SUM(m.value) FROM metrics m
             WHERE m.run_id = o.run_id AND {TIMED} AND o.nth = 1
               AND {of_restart} AND {SUPERSEDED})"""
    steps = f"m.run_id = o.run_id AND {untimed('o')} AND o.nth = 1 AND {of_restart}"
    all_steps, valid_steps = span(dialect, steps), span(dialect, f"{steps} AND NOT {SUPERSEDED}")
    measured = f"COALESCE({repeated} * {interval(dialect, 'o')}, {all_steps} - COALESCE({valid_steps}, 0))"
    view = replaced(view, repeated, measured)
    last = f"""(SELECT MAX(m.time) FROM metrics m
             WHERE m.run_id = o.run_id AND {TIMED} AND m.time <= o.seen_at
               AND (m.attempt < o.attempt OR (m.attempt = o.attempt AND m.restart <= o.restart)))"""
    view = replaced(view, last, f"COALESCE({last}, {last.replace(TIMED, untimed('o'))})")
    begin, end = view.index("(SELECT MIN(", view.index("AS last_step_at")), view.index(" AS next_step_at")
    steps = view[view.index("FROM metrics m", begin) : end - 1]
    before = FIRST["TIME_FUNCTIONS"][dialect][1]("t.time", f"t.value * {interval(dialect, 'o')}")
    timed = f"(SELECT {before} FROM (SELECT m.time, m.value {steps} ORDER BY m.time LIMIT 1) t)"
    return f"{view[:begin]}COALESCE({timed}, (SELECT MIN(m.time) {steps.replace(TIMED, untimed('o'))})){view[end:]}"


def recoveries(view: str) -> str:
    steps, later = TELEMETRY["STEPS"], TELEMETRY["LATER"]
    first = f"(SELECT MIN(m.time) FROM metrics m WHERE {steps} AND {later})"
    begin, end = view.index("(SELECT MIN(", view.index("AS first_step_at")), view.index(" AS new_step_at")
    for found in (first, view[begin:end]):
        view = replaced(view, found, f"COALESCE({found}, {found.replace(TIMED, untimed('i'))})")
    return view


def renew_goodput(dialect: str) -> None:
    """Compute the cached totals of runs of external trainers again."""
    op.execute(f"DELETE FROM goodput_cache WHERE run_id IN (SELECT w.run_id FROM runs w WHERE {EXTERNAL[dialect]})")
    op.execute(
        f"INSERT INTO goodput_cache (run_id, ingest_stamp, {GOODPUT}) SELECT w.run_id, w.ingest_stamp, {GOODPUT} "
        f"FROM runs w JOIN run_goodput g ON g.run_id = w.run_id WHERE w.state IN {TELEMETRY['ENDED']} "
        f"AND {EXTERNAL[dialect]}"
    )


def upgrade() -> None:
    dialect = op.get_context().dialect.name
    replace_views(dialect, changed_views(dialect))
    renew_goodput(dialect)


def downgrade() -> None:
    dialect = op.get_context().dialect.name
    replace_views(dialect, UNDRIVEN["changed_views"](dialect))
    renew_goodput(dialect)
