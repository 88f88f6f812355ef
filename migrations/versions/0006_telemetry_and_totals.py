"""Telemetry of the nodes over time, tags to search by, cached goodput of ended runs; and views of the findings, of the
breakdown of a step's time, and of the duration of recoveries.

Revision: 0006, after 0005. Tags and goodput of existing runs are carried over; their telemetry was never stored.

``metrics`` loses its foreign keys: checking them was half of the cost of every row on PostgreSQL. The transaction that
writes a row has claimed the row of its run and has written the names; no name is ever removed; and a trigger removes
the metrics of a removed run. SQLite can drop foreign keys only by recreating the table.
"""

import runpy
from pathlib import Path

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

TIME = sa.DateTime(timezone=True)
JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")

FIRST = runpy.run_path(str(Path(__file__).with_name("0001_first_schema.py")))
"""The first schema, whose views are recreated here."""

EARLIER = "b.run_id = i.run_id AND (b.seen_at < i.seen_at OR (b.seen_at = i.seen_at AND b.incident_id < i.incident_id))"
AFTER = "b.run_id = i.run_id AND (b.seen_at > i.seen_at OR (b.seen_at = i.seen_at AND b.incident_id > i.incident_id))"
ORDERED = f"""
WITH ordered AS (
    SELECT i.run_id, i.incident_id, i.attempt, i.restart, i.failure_kind, i.seen_at,
           (SELECT MAX(b.seen_at) FROM incidents b WHERE {EARLIER}) AS incident_before,
           (SELECT MIN(b.seen_at) FROM incidents b WHERE {AFTER}) AS incident_after,
           (SELECT COUNT(*) + 1 FROM incidents b
             WHERE {EARLIER} AND b.attempt = i.attempt AND b.restart = i.restart) AS nth
    FROM incidents i
),
seen AS ("""
"""Replacement for window functions, with which SQLite cannot restrict a query to one run: it read the incidents of all
runs to answer about one."""

ENDED = "('completed', 'failed', 'cancelled')"
GOODPUT = "wall_s, queue_s, productive_s, repeated_s, lost_s, ettr"

LATER = "(m.attempt > i.attempt OR (m.attempt = i.attempt AND m.restart > i.restart))"
STEPS = "m.run_id = i.run_id AND m.key_id IN (SELECT key_id FROM metric_keys WHERE name = 'time/step_s')"
SUPERSEDED = """EXISTS (
    SELECT 1 FROM restarts r WHERE r.run_id = m.run_id AND r.first_step <= m.step
       AND (r.attempt > m.attempt OR (r.attempt = m.attempt AND r.restart > m.restart)))"""

DIALECTS = {
    "sqlite": {
        "finding": "json_extract(b.data, '$.finding')",
        "figures": "json_each(t.figures)",
        "figure": "f.value",
        "tags": "SELECT DISTINCT n.run_id, t.value FROM runs n, json_each(n.tags) t",
    },
    "postgresql": {
        "finding": "b.data ->> 'finding'",
        "figures": "jsonb_each(t.figures)",
        "figure": "CAST(f.value AS double precision)",
        "tags": "SELECT DISTINCT n.run_id, t.value FROM runs n, jsonb_array_elements_text(n.tags) t(value)",
    },
}


def seconds(dialect: str, start: str, end: str) -> str:
    if dialect == "sqlite":
        return f"((julianday({end}) - julianday({start})) * 86400.0)"
    return f"CAST(EXTRACT(EPOCH FROM ({end} - {start})) AS double precision)"


def views(dialect: str) -> dict[str, str]:
    words = DIALECTS[dialect]
    return {
        # One row per figure of a reading; the table stores a reading in one row, which takes several times less space.
        "node_figures": f"""
SELECT t.run_id, t.attempt, t.restart, t.node, t.time, t.seconds, f.key, {words["figure"]} AS value
FROM node_telemetry t, {words["figures"]} f""",
        # Anomalies among the nodes, with start and end; without an end, one lasted as long as its restart.
        "node_imbalance": f"""
SELECT b.run_id, b.attempt, b.restart, b.message AS finding, b.time AS began_at,
       (SELECT MIN(e.time) FROM events e
         WHERE e.run_id = b.run_id AND e.source = b.source AND e.position > b.position
           AND e.kind = 'telemetry' AND e.message = 'no longer: ' || b.message) AS ended_at
FROM events b
WHERE b.kind = 'telemetry' AND {words["finding"]} = 'begins'""",
        # Breakdown of the time of the steps that count; ``share`` is relative to whole steps.
        "run_step_time": f"""
SELECT run_id, key, num_steps, total_s, mean_s,
       total_s / NULLIF(MAX(CASE WHEN key = 'time/step_s' THEN total_s END) OVER (PARTITION BY run_id), 0) AS share
FROM (
    SELECT m.run_id, k.name AS key, COUNT(*) AS num_steps, SUM(m.value) AS total_s, AVG(m.value) AS mean_s
    FROM metrics m JOIN metric_keys k ON k.key_id = m.key_id
    WHERE k.name LIKE 'time/%' AND m.value IS NOT NULL AND NOT {SUPERSEDED}
    GROUP BY m.run_id, k.name) t""",
        # From an incident to the end of the first step of a later restart, and to that of the first new step.
        "run_recoveries": f"""
SELECT run_id, incident_id, attempt, restart, failure_kind, detected_after_s, seen_at,
       first_step_at, {seconds(dialect, "seen_at", "first_step_at")} AS recovery_s,
       new_step_at, {seconds(dialect, "seen_at", "new_step_at")} AS caught_up_s
FROM (
    SELECT i.run_id, i.incident_id, i.attempt, i.restart, i.failure_kind, i.detected_after_s, i.seen_at,
           (SELECT MIN(m.time) FROM metrics m WHERE {STEPS} AND {LATER}) AS first_step_at,
           (SELECT MIN(m.time) FROM metrics m WHERE {STEPS} AND {LATER} AND m.step > COALESCE(
               (SELECT MAX(m.step) FROM metrics m WHERE {STEPS} AND NOT {LATER}), 0)) AS new_step_at
    FROM incidents i) t""",
        # run_goodput, with the cached values for ended runs: a row that does not belong to the newest batch does not
        # count.
        "all_goodput": f"""
SELECT n.run_id, n.name, n.state, n.created_at, {GOODPUT}
FROM runs n JOIN kept_goodput k ON k.run_id = n.run_id AND k.ingest_stamp = n.ingest_stamp
UNION ALL
SELECT n.run_id, n.name, n.state, n.created_at, {GOODPUT}
FROM runs n JOIN run_goodput g ON g.run_id = n.run_id
WHERE NOT EXISTS (SELECT 1 FROM kept_goodput k WHERE k.run_id = n.run_id AND k.ingest_stamp = n.ingest_stamp)""",
    }


def lost_time_views(dialect: str) -> dict[str, str]:
    """``run_lost_time`` and ``run_goodput`` with the same answers, from a view with one row per incident, which
    databases can restrict to one run."""
    functions = FIRST["TIME_FUNCTIONS"][dialect]
    lost = FIRST["run_lost_time"](*functions)
    tail = lost[lost.index("\nseen AS (") + len("\nseen AS (") : lost.index("\nSELECT run_id, failure_kind, COUNT(*)")]
    tail = tail.replace("SELECT s.run_id, s.failure_kind,", "SELECT s.run_id, s.incident_id, s.failure_kind,")
    tail = tail.replace("SELECT run_id, failure_kind, repeated_s,", "SELECT run_id, incident_id, failure_kind, repeated_s,")
    return {
        "incident_lost_time": f"""{ORDERED}{tail}
SELECT run_id, incident_id, failure_kind, downtime_s, repeated_s, downtime_s + repeated_s AS lost_s FROM measured""",
        "run_lost_time": """
SELECT run_id, failure_kind, COUNT(*) AS num_incidents, SUM(downtime_s) AS downtime_s, SUM(repeated_s) AS repeated_s,
       SUM(lost_s) AS lost_s
FROM incident_lost_time
GROUP BY run_id, failure_kind""",
        "run_goodput": FIRST["run_goodput"](*functions)
        .replace("CREATE VIEW run_goodput AS", "")
        .replace("FROM run_lost_time l", "FROM incident_lost_time l"),
    }


def first_lost_time_views(dialect: str) -> dict[str, str]:
    """The same views as in the first schema."""
    functions = FIRST["TIME_FUNCTIONS"][dialect]
    return {
        name: FIRST[name](*functions).replace(f"CREATE VIEW {name} AS", "") for name in ("run_lost_time", "run_goodput")
    }


def replace_views(dialect: str, questions: dict[str, str]) -> None:
    for name, question in questions.items():
        if dialect == "sqlite":
            op.execute(f"DROP VIEW IF EXISTS {name}")
        # PostgreSQL keeps the views that depend on it.
        create = "CREATE VIEW" if dialect == "sqlite" else "CREATE OR REPLACE VIEW"
        op.execute(sa.text(f"{create} {name} AS {question}".replace(":", "\\:")))


def upgrade() -> None:
    dialect = op.get_context().dialect.name
    op.create_index("ix_runs_owner_created_at", "runs", ["owner", "created_at"])
    op.create_table(
        "run_tags",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("tag", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name="fk_run_tags_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "tag", name="pk_run_tags"),
    )
    op.create_index("ix_run_tags_tag", "run_tags", ["tag"])
    op.create_table(
        "node_telemetry",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("restart", sa.Integer(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("time", TIME, nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("figures", JSON, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name="fk_node_telemetry_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "attempt", "restart", "node", "position", name="pk_node_telemetry"),
    )
    op.create_index("ix_node_telemetry_node_time", "node_telemetry", ["node", "time"])
    op.create_table(
        "kept_goodput",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("ingest_stamp", sa.BigInteger(), nullable=False),
        sa.Column("wall_s", sa.Double(), nullable=False),
        sa.Column("queue_s", sa.Double(), nullable=False),
        sa.Column("productive_s", sa.Double(), nullable=False),
        sa.Column("repeated_s", sa.Double(), nullable=False),
        sa.Column("lost_s", sa.Double(), nullable=False),
        sa.Column("ettr", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name="fk_kept_goodput_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", name="pk_kept_goodput"),
    )
    if dialect == "sqlite":
        make_metrics_again("")
    else:
        for name in ("fk_metrics_key_id", "fk_metrics_run_id"):
            op.drop_constraint(name, "metrics", type_="foreignkey")
    for statement in FOLLOW[dialect]:
        op.execute(statement)
    replace_views(dialect, lost_time_views(dialect))
    for name, question in views(dialect).items():
        op.execute(sa.text(f"CREATE VIEW {name} AS {question}".replace(":", "\\:")))
    op.execute(sa.text(f"INSERT INTO run_tags (run_id, tag) {DIALECTS[dialect]['tags']}".replace(":", "\\:")))
    op.execute(
        f"INSERT INTO kept_goodput (run_id, ingest_stamp, {GOODPUT}) SELECT n.run_id, n.ingest_stamp, {GOODPUT} "
        f"FROM runs n JOIN run_goodput g ON g.run_id = n.run_id WHERE n.state IN {ENDED}"
    )


FOLLOW = {
    "sqlite": [
        "CREATE TRIGGER metrics_follow_runs AFTER DELETE ON runs "
        "BEGIN DELETE FROM metrics WHERE run_id = OLD.run_id; END"
    ],
    "postgresql": [
        "CREATE FUNCTION metrics_follow_runs() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN DELETE FROM metrics WHERE run_id = OLD.run_id; RETURN NULL; END $$",
        "CREATE TRIGGER metrics_follow_runs AFTER DELETE ON runs "
        "FOR EACH ROW EXECUTE FUNCTION metrics_follow_runs()",
    ],
}
UNFOLLOW = {
    "sqlite": ["DROP TRIGGER metrics_follow_runs"],
    "postgresql": ["DROP TRIGGER metrics_follow_runs ON runs", "DROP FUNCTION metrics_follow_runs()"],
}


def make_metrics_again(references: str) -> None:
    """Recreate the table, with or without the references, and the views that read it, unchanged."""
    master = "SELECT name, sql FROM sqlite_master WHERE type = 'view'"
    made = op.get_bind().exec_driver_sql(master).all()
    for name, _ in made:
        op.execute(f"DROP VIEW {name}")
    op.execute("ALTER TABLE metrics RENAME TO old_metrics")
    op.execute(
        "CREATE TABLE metrics (run_id TEXT NOT NULL, key_id INTEGER NOT NULL, step INTEGER NOT NULL, "
        "attempt INTEGER NOT NULL, restart INTEGER NOT NULL, value DOUBLE, non_finite TEXT, time DATETIME NOT NULL, "
        "CONSTRAINT ck_metrics_value_or_non_finite CHECK ((value IS NULL) <> (non_finite IS NULL)), "
        f"{references}"
        "CONSTRAINT pk_metrics PRIMARY KEY (run_id, key_id, step, attempt, restart)) WITHOUT ROWID"
    )
    columns = "run_id, key_id, step, attempt, restart, value, non_finite, time"
    op.execute(f"INSERT INTO metrics ({columns}) SELECT {columns} FROM old_metrics ORDER BY 1, 2, 3, 4, 5")
    op.execute("DROP TABLE old_metrics")
    for _, sql in made:
        op.execute(sa.text(sql.replace(":", "\\:")))


def downgrade() -> None:
    dialect = op.get_context().dialect.name
    for name in reversed(views(dialect)):
        op.execute(f"DROP VIEW {name}")
    for statement in UNFOLLOW[dialect]:
        op.execute(statement)
    if dialect == "sqlite":
        make_metrics_again(
            "CONSTRAINT fk_metrics_key_id FOREIGN KEY (key_id) REFERENCES metric_keys (key_id), "
            "CONSTRAINT fk_metrics_run_id FOREIGN KEY (run_id) REFERENCES runs (run_id) ON DELETE CASCADE, "
        )
    else:
        op.create_foreign_key("fk_metrics_key_id", "metrics", "metric_keys", ["key_id"], ["key_id"])
        op.create_foreign_key("fk_metrics_run_id", "metrics", "runs", ["run_id"], ["run_id"], ondelete="CASCADE")
    replace_views(dialect, first_lost_time_views(dialect))
    op.execute("DROP VIEW incident_lost_time")
    for table in ("kept_goodput", "node_telemetry", "run_tags"):
        op.drop_table(table)
    op.drop_index("ix_runs_owner_created_at", "runs")
