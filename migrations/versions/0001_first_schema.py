"""The first schema: runs, their parts, their metrics, and four views.

Revision: 0001, the first.
"""

from collections.abc import Callable

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TIME = sa.DateTime(timezone=True)
JSON = sa.JSON().with_variant(JSONB(), "postgresql")


# ----------------------------------------------------------------------------------------------------------------------
# Views. The databases differ in two things: the seconds between two times, and a time some seconds before another one.

SqlFunction = Callable[[str, str], str]

TIME_FUNCTIONS: dict[str, tuple[SqlFunction, SqlFunction]] = {
    "sqlite": (
        lambda start, end: f"((julianday({end}) - julianday({start})) * 86400.0)",
        # In the form in which times are stored, so that they can be compared as text.
        lambda time, seconds: f"strftime('%Y-%m-%d %H:%M:%f000', {time}, printf('-%.6f seconds', COALESCE({seconds}, 0)))",
    ),
    "postgresql": (
        lambda start, end: f"CAST(EXTRACT(EPOCH FROM ({end} - {start})) AS double precision)",
        lambda time, seconds: f"({time} - COALESCE({seconds}, 0) * INTERVAL '1 second')",
    ),
}


def extreme(function: str, *times: str) -> str:
    """The earliest (``MIN``) or latest (``MAX``) of several times, ignoring nulls."""
    return f"(SELECT {function}(t) FROM ({' UNION ALL '.join(f'SELECT {time} AS t' for time in times)}) times)"


LATER_RESTART = "(r.attempt > m.attempt OR (r.attempt = m.attempt AND r.restart > m.restart))"
SUPERSEDED = f"""EXISTS (
    SELECT 1 FROM restarts r WHERE r.run_id = m.run_id AND r.first_step <= m.step AND {LATER_RESTART}
)"""
"""A restart goes back to before its first step. Everything that earlier restarts recorded from that step on was made
with weights that no longer exist, even if the new restart has not come that far yet."""

STEP_SECONDS = "SELECT key_id FROM metric_keys WHERE name = 'time/step_s'"

RUN_CURVE = f"""
CREATE VIEW run_curve AS
SELECT m.run_id, k.name AS key, m.step, m.attempt, m.restart, m.value, m.non_finite, m.time
FROM metrics m JOIN metric_keys k ON k.key_id = m.key_id
WHERE NOT {SUPERSEDED}
"""


def run_lost_time(seconds: SqlFunction, before: SqlFunction) -> str:
    """Time lost per kind of failure. Times counted for different incidents never overlap.

    ``downtime_s``: from the last step finished before the incident to the start of the first step of a later restart,
    including the wait for a new attempt; or to the next incident, or to the end of the run, whichever came first. If no
    step was finished since the previous incident, it starts at this incident: the time up to there belongs to the
    previous one. ``repeated_s``: ``time/step_s`` of those steps of its restart that were repeated later.
    """
    return f"""
CREATE VIEW run_lost_time AS
WITH ordered AS (
    SELECT i.run_id, i.incident_id, i.attempt, i.restart, i.failure_kind, i.seen_at,
           LAG(i.seen_at) OVER (PARTITION BY i.run_id ORDER BY i.seen_at, i.incident_id) AS incident_before,
           LEAD(i.seen_at) OVER (PARTITION BY i.run_id ORDER BY i.seen_at, i.incident_id) AS incident_after,
           ROW_NUMBER() OVER (PARTITION BY i.run_id, i.attempt, i.restart ORDER BY i.seen_at, i.incident_id) AS nth
    FROM incidents i
),
seen AS (
    SELECT o.*,
           (SELECT COALESCE(n.ended_at, n.progress_at) FROM runs n WHERE n.run_id = o.run_id) AS run_end,
           (SELECT MIN(e.time) FROM events e
             WHERE e.run_id = o.run_id AND e.source = 'control.jsonl' AND e.kind = 'run_moved'
               AND e.state IN ('completed', 'failed', 'cancelled') AND e.time >= o.seen_at) AS next_end,
           (SELECT a.planned_at FROM attempts a WHERE a.run_id = o.run_id AND a.number = o.attempt) AS planned_at,
           (SELECT MAX(m.time) FROM metrics m
             WHERE m.run_id = o.run_id AND m.key_id IN ({STEP_SECONDS}) AND m.time <= o.seen_at
               AND (m.attempt < o.attempt OR (m.attempt = o.attempt AND m.restart <= o.restart))) AS last_step_at,
           (SELECT MIN({before("m.time", "m.value")}) FROM metrics m
             WHERE m.run_id = o.run_id AND m.key_id IN ({STEP_SECONDS})
               AND (m.attempt > o.attempt OR (m.attempt = o.attempt AND m.restart > o.restart))) AS next_step_at,
           (SELECT SUM(m.value) FROM metrics m
             WHERE m.run_id = o.run_id AND m.key_id IN ({STEP_SECONDS}) AND o.nth = 1
               AND m.attempt = o.attempt AND m.restart = o.restart AND {SUPERSEDED}) AS repeated_s
    FROM ordered o
),
framed AS (
    SELECT s.run_id, s.failure_kind, COALESCE(s.repeated_s, 0) AS repeated_s,
           CASE WHEN s.incident_before IS NOT NULL AND (s.last_step_at IS NULL OR s.last_step_at < s.incident_before)
                THEN s.seen_at ELSE COALESCE({extreme("MAX", "s.last_step_at", "s.planned_at")}, s.seen_at) END AS since,
           {extreme("MIN", "s.next_step_at", "s.incident_after", "s.next_end", "s.run_end")} AS until
    FROM seen s
),
measured AS (
    SELECT run_id, failure_kind, repeated_s,
           CASE WHEN until > since THEN {seconds("since", "until")} ELSE 0 END AS downtime_s
    FROM framed
)
SELECT run_id, failure_kind, COUNT(*) AS num_incidents, SUM(downtime_s) AS downtime_s, SUM(repeated_s) AS repeated_s,
       SUM(downtime_s) + SUM(repeated_s) AS lost_s
FROM measured
GROUP BY run_id, failure_kind
"""


def run_goodput(seconds: SqlFunction, _before: SqlFunction) -> str:
    """Breakdown of the time of a run.

    ``wall_s``: from the request to the end (while it runs: to the newest sign of life), without the time between an end
    and a resume. ``queue_s``: from submission to start, over all attempts. ``productive_s``: ``time/step_s`` of the
    steps that count. ``repeated_s``: the same for steps that were repeated. ``ettr``: productive_s / (wall_s -
    queue_s); preflight, setup, back-off and evaluation lower it too.
    """
    return f"""
CREATE VIEW run_goodput AS
SELECT run_id, name, state, wall_s, queue_s, productive_s, made_s - productive_s AS repeated_s, lost_s,
       productive_s / NULLIF(wall_s - queue_s, 0) AS ettr
FROM (
    SELECT n.run_id, n.name, n.state,
           {seconds("n.created_at", "COALESCE(n.ended_at, n.progress_at)")} - COALESCE((
               SELECT SUM({seconds("e.time", "e.next_at")})
               FROM (SELECT time, state, LEAD(time) OVER (ORDER BY position) AS next_at
                     FROM events WHERE run_id = n.run_id AND source = 'control.jsonl' AND kind = 'run_moved') e
               WHERE e.state IN ('completed', 'failed', 'cancelled') AND e.next_at IS NOT NULL), 0) AS wall_s,
           COALESCE((
               SELECT SUM({seconds("a.submitted_at", "COALESCE(a.started_at, a.ended_at, n.progress_at)")})
               FROM attempts a WHERE a.run_id = n.run_id AND a.submitted_at IS NOT NULL), 0) AS queue_s,
           COALESCE((SELECT SUM(m.value) FROM metrics m
                      WHERE m.run_id = n.run_id AND m.key_id IN ({STEP_SECONDS}) AND NOT {SUPERSEDED}), 0)
               AS productive_s,
           COALESCE((SELECT SUM(m.value) FROM metrics m
                      WHERE m.run_id = n.run_id AND m.key_id IN ({STEP_SECONDS})), 0) AS made_s,
           COALESCE((SELECT SUM(l.lost_s) FROM run_lost_time l WHERE l.run_id = n.run_id), 0) AS lost_s
    FROM runs n
) t
"""


NODE_HEALTH = """
CREATE VIEW node_health AS
SELECT n.node,
       (SELECT COUNT(*) FROM attempt_nodes a WHERE a.node = n.node) AS num_attempts,
       (SELECT COUNT(DISTINCT a.run_id) FROM attempt_nodes a WHERE a.node = n.node) AS num_runs,
       (SELECT COUNT(*) FROM node_strikes s WHERE s.node = n.node) AS num_strikes,
       (SELECT MAX(s.struck_at) FROM node_strikes s WHERE s.node = n.node) AS last_strike_at,
       (SELECT s.failure_kind FROM node_strikes s WHERE s.node = n.node
         ORDER BY s.struck_at DESC, s.run_id, s.incident_id LIMIT 1) AS last_failure_kind
FROM (SELECT node FROM attempt_nodes UNION SELECT node FROM node_strikes) n
"""


def _create_views() -> None:
    functions = TIME_FUNCTIONS[op.get_context().dialect.name]
    for view in (RUN_CURVE, run_lost_time(*functions), run_goodput(*functions), NODE_HEALTH):
        op.execute(sa.text(view.replace(":", "\\:")))  # a colon would be a parameter


# ----------------------------------------------------------------------------------------------------------------------
# Tables


def upgrade() -> None:
    op.create_table(
        "leases",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("run_id", name="pk_leases"),
    )
    op.create_table(
        "metric_keys",
        sa.Column("key_id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("key_id", name="pk_metric_keys"),
        sa.UniqueConstraint("name", name="uq_metric_keys_name"),
    )
    op.create_table(
        "runs",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("algorithm", sa.Text(), nullable=False),
        sa.Column("total_steps", sa.Integer(), nullable=False),
        sa.Column("config_source", sa.Text(), nullable=False),
        sa.Column("overrides", JSON, nullable=False),
        sa.Column("spec", JSON, nullable=False),
        sa.Column("package_version", sa.Text(), nullable=False),
        sa.Column("code_revision", sa.Text(), nullable=False),
        sa.Column("run_dir", sa.Text(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("started_at", TIME, nullable=True),
        sa.Column("ended_at", TIME, nullable=True),
        sa.Column("progress_at", TIME, nullable=False),
        sa.Column("journal_token", sa.BigInteger(), nullable=False),
        sa.Column("ingest_stamp", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", name="pk_runs"),
    )
    op.create_index("ix_runs_created_at", "runs", ["created_at"])
    op.create_index("ix_runs_name_created_at", "runs", ["name", "created_at"])
    op.create_index("ix_runs_state_created_at", "runs", ["state", "created_at"])
    op.create_table(
        "attempts",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("failure_kind", sa.Text(), nullable=True),
        sa.Column("scheduler", sa.Text(), nullable=False),
        sa.Column("scheduler_job_id", sa.Text(), nullable=True),
        sa.Column("submission", JSON, nullable=True),
        sa.Column("placement", JSON, nullable=True),
        sa.Column("num_nodes", sa.Integer(), nullable=False),
        sa.Column("resume_checkpoint", sa.Text(), nullable=False),
        sa.Column("resumed_from_step", sa.Integer(), nullable=False),
        sa.Column("planned_at", TIME, nullable=True),
        sa.Column("submitted_at", TIME, nullable=True),
        sa.Column("started_at", TIME, nullable=True),
        sa.Column("ended_at", TIME, nullable=True),
        sa.Column("outcome_state", sa.Text(), nullable=True),
        sa.Column("outcome_failure_kind", sa.Text(), nullable=True),
        sa.Column("outcome_message", sa.Text(), nullable=True),
        sa.Column("num_restarts", sa.Integer(), nullable=True),
        sa.Column("last_step", sa.Integer(), nullable=True),
        sa.Column("outcome_at", TIME, nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name="fk_attempts_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "number", name="pk_attempts"),
    )
    op.create_index("ix_attempts_failure_kind", "attempts", ["failure_kind"])
    op.create_index("ix_attempts_scheduler_job_id", "attempts", ["scheduler_job_id"])
    op.create_table(
        "checkpoints",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("stage", sa.Text(), nullable=False),
        sa.Column("stage_finished", sa.Boolean(), nullable=False),
        sa.Column("num_ranks", sa.Integer(), nullable=False),
        sa.Column("spec_hash", sa.Text(), nullable=False),
        sa.Column("num_files", sa.Integer(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("completed_at", TIME, nullable=False),
        sa.Column("removed_at", TIME, nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name="fk_checkpoints_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "step", name="pk_checkpoints"),
    )
    op.create_table(
        "checks",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("round", sa.BigInteger(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("check_id", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("found", sa.Text(), nullable=False),
        sa.Column("expected", sa.Text(), nullable=False),
        sa.Column("advice", sa.Text(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("made_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name="fk_checks_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "round", "position", name="pk_checks"),
    )
    op.create_table(
        "decisions",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("decision_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("restart", sa.Integer(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("decided_by", sa.Text(), nullable=False),
        sa.Column("decided_at", TIME, nullable=False),
        sa.Column("delay_s", sa.Double(), nullable=False),
        sa.Column("excluded_nodes", JSON, nullable=False),
        sa.Column("config_diff", JSON, nullable=False),
        sa.Column("resume_checkpoint", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name="fk_decisions_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "decision_id", name="pk_decisions"),
    )
    op.create_index("ix_decisions_decided_at", "decisions", ["decided_at"])
    op.create_table(
        "evaluations",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("when_made", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("metric", sa.Text(), nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("ci_low", sa.Double(), nullable=True),
        sa.Column("ci_high", sa.Double(), nullable=True),
        sa.Column("num_prompts", sa.Integer(), nullable=False),
        sa.Column("num_samples", sa.Integer(), nullable=False),
        sa.Column("checkpoint_step", sa.Integer(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("made_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name="fk_evaluations_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "when_made", "name", name="pk_evaluations"),
    )
    op.create_table(
        "events",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("time", TIME, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=True),
        sa.Column("restart", sa.Integer(), nullable=True),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=True),
        sa.Column("state", sa.Text(), nullable=True),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", JSON, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name="fk_events_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "source", "position", name="pk_events"),
    )
    op.create_index("ix_events_kind_time", "events", ["kind", "time"])
    op.create_index("ix_events_run_id_time", "events", ["run_id", "time"])
    op.create_table(
        "incidents",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("incident_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("restart", sa.Integer(), nullable=False),
        sa.Column("found_by", sa.Text(), nullable=False),
        sa.Column("failure_kind", sa.Text(), nullable=False),
        sa.Column("phase", sa.Text(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=True),
        sa.Column("suspect_ranks", JSON, nullable=False),
        sa.Column("suspect_nodes", JSON, nullable=False),
        sa.Column("detected_after_s", sa.Double(), nullable=True),
        sa.Column("seen_at", TIME, nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("evidence_dir", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name="fk_incidents_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "incident_id", name="pk_incidents"),
    )
    op.create_index("ix_incidents_failure_kind_seen_at", "incidents", ["failure_kind", "seen_at"])
    op.create_index("ix_incidents_fingerprint", "incidents", ["fingerprint"])
    op.create_table(
        "ingest_offsets",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name="fk_ingest_offsets_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "path", name="pk_ingest_offsets"),
    )
    op.create_table(
        "latest_metrics",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("restart", sa.Integer(), nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("non_finite", sa.Text(), nullable=True),
        sa.Column("time", TIME, nullable=False),
        sa.CheckConstraint("(value IS NULL) <> (non_finite IS NULL)", name=op.f("ck_latest_metrics_value_or_non_finite")),
        sa.ForeignKeyConstraint(["key_id"], ["metric_keys.key_id"], name="fk_latest_metrics_key_id"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name="fk_latest_metrics_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "key_id", name="pk_latest_metrics"),
    )
    op.create_table(
        "metrics",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("restart", sa.Integer(), nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("non_finite", sa.Text(), nullable=True),
        sa.Column("time", TIME, nullable=False),
        sa.CheckConstraint("(value IS NULL) <> (non_finite IS NULL)", name=op.f("ck_metrics_value_or_non_finite")),
        sa.ForeignKeyConstraint(["key_id"], ["metric_keys.key_id"], name="fk_metrics_key_id"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name="fk_metrics_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "key_id", "step", "attempt", "restart", name="pk_metrics"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "stages",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("stage_index", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("started_at", TIME, nullable=False),
        sa.Column("ended_at", TIME, nullable=True),
        sa.Column("seconds", sa.Double(), nullable=True),
        sa.Column("message", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name="fk_stages_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "stage_index", name="pk_stages"),
    )
    op.create_table(
        "weight_versions",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("num_files", sa.Integer(), nullable=False),
        sa.Column("checkpoint_step", sa.Integer(), nullable=False),
        sa.Column("made_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name="fk_weight_versions_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "version", name="pk_weight_versions"),
    )
    op.create_table(
        "attempt_nodes",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("node_index", sa.Integer(), nullable=False),
        sa.Column("restart", sa.Integer(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("ranks", JSON, nullable=False),
        sa.Column("telemetry", JSON, nullable=False),
        sa.ForeignKeyConstraint(["run_id", "attempt"], ["attempts.run_id", "attempts.number"], name="fk_attempt_nodes_run_id_attempt", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "attempt", "node", name="pk_attempt_nodes"),
    )
    op.create_index("ix_attempt_nodes_node", "attempt_nodes", ["node"])
    op.create_table(
        "evaluation_samples",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("when_made", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("prompt_uid", sa.Text(), nullable=False),
        sa.Column("sample_index", sa.Integer(), nullable=False),
        sa.Column("prompt", sa.Text(), nullable=False),
        sa.Column("completion", sa.Text(), nullable=False),
        sa.Column("answer", sa.Text(), nullable=False),
        sa.Column("score", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["run_id", "when_made", "name"], ["evaluations.run_id", "evaluations.when_made", "evaluations.name"], name="fk_evaluation_samples_run_id_when_made_name", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "when_made", "name", "position", name="pk_evaluation_samples"),
    )
    op.create_table(
        "node_strikes",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("incident_id", sa.Text(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("failure_kind", sa.Text(), nullable=False),
        sa.Column("struck_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(["run_id", "incident_id"], ["incidents.run_id", "incidents.incident_id"], name="fk_node_strikes_run_id_incident_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "incident_id", "node", name="pk_node_strikes"),
    )
    op.create_index("ix_node_strikes_node_struck_at", "node_strikes", ["node", "struck_at"])
    op.create_table(
        "restarts",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("restart", sa.Integer(), nullable=False),
        sa.Column("role", sa.Text(), nullable=True),
        sa.Column("started_at", TIME, nullable=True),
        sa.Column("ended_at", TIME, nullable=True),
        sa.Column("first_step", sa.Integer(), nullable=True),
        sa.Column("last_step", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["run_id", "attempt"], ["attempts.run_id", "attempts.number"], name="fk_restarts_run_id_attempt", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "attempt", "restart", name="pk_restarts"),
    )
    _create_views()


def downgrade() -> None:
    for view in ("node_health", "run_goodput", "run_lost_time", "run_curve"):
        op.execute(f"DROP VIEW {view}")
    for table in (
        "restarts",
        "node_strikes",
        "evaluation_samples",
        "attempt_nodes",
        "weight_versions",
        "stages",
        "metrics",
        "latest_metrics",
        "ingest_offsets",
        "incidents",
        "events",
        "evaluations",
        "decisions",
        "checks",
        "checkpoints",
        "attempts",
        "runs",
        "metric_keys",
        "leases",
    ):
        op.drop_table(table)
