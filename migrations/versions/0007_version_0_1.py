"""The schema of version 0.1: runs, their parts, and their metrics.

Revision: 0007, the first; those before version 0.1 are gone.

``metrics`` has no foreign keys: checking them was half of the cost of every row on PostgreSQL. The transaction that
writes a row has claimed the row of its run and has written the names; no name is ever removed; and a trigger removes the
metrics of a removed run.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0007"
down_revision = None
branch_labels = None
depends_on = None

TIME = sa.DateTime(timezone=True)
JSON = sa.JSON().with_variant(JSONB(), "postgresql")

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
        sa.Column("shape", sa.Text(), nullable=False, server_default=sa.text("''")),
        sa.Column("trial_of", sa.Text(), nullable=False, server_default=sa.text("''")),
        sa.Column("tags", JSON, nullable=False, server_default=sa.text("'[]'")),
        sa.Column("owner_account", sa.Text(), nullable=False, server_default=sa.text("''")),
        sa.PrimaryKeyConstraint("run_id", name="pk_runs"),
    )
    op.create_index("ix_runs_created_at", "runs", ["created_at"])
    op.create_index("ix_runs_name_created_at", "runs", ["name", "created_at"])
    op.create_index("ix_runs_owner_created_at", "runs", ["owner", "created_at"])
    op.create_index("ix_runs_shape_created_at", "runs", ["shape", "created_at"])
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
        sa.Column("attempt", sa.Integer(), nullable=False, server_default=sa.text("0")),
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
        sa.Column("collective", sa.Text(), nullable=False, server_default=sa.text("''")),
        sa.Column("collective_sequence", sa.BigInteger(), nullable=True),
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
        sa.Column("longest_gaps_s", JSON, nullable=False, server_default=sa.text("'{}'")),
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
    op.create_table(
        "node_speeds",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("matmul_tflops", sa.Double(), nullable=False),
        sa.Column("core_share", sa.Double(), nullable=False),
        sa.Column("bandwidth_gb_s", sa.Double(), nullable=False),
        sa.Column("latency_ms", sa.Double(), nullable=False),
        sa.Column("measured_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name="fk_node_speeds_run_id_runs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "attempt", "node", name="pk_node_speeds"),
    )
    op.create_index("ix_node_speeds_node_measured_at", "node_speeds", ["node", "measured_at"])
    op.create_table(
        "controllers",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("controller", sa.Text(), nullable=False),
        sa.Column("flow_run_id", sa.Text(), nullable=False),
        sa.Column("flow_run_url", sa.Text(), nullable=False),
        sa.Column("started_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name="fk_controllers_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "position", name="pk_controllers"),
    )
    op.create_index("ix_controllers_flow_run_id", "controllers", ["flow_run_id"])
    op.create_table(
        "promotions",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("checkpoint_step", sa.Integer(), nullable=False),
        sa.Column("decided_by", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("asked_at", TIME, nullable=False),
        sa.Column("moved_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name="fk_promotions_run_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", name="pk_promotions"),
    )
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
    for statement in FOLLOW[op.get_context().dialect.name]:
        op.execute(statement)
