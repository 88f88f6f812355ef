"""Goodput, lost time and recoveries of external trainers, which may log only some steps, or no step times.

Revision: 0014, after 0013. The cached totals of runs of external trainers are removed, and computed again at the end of
the upgrade.
"""

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

IS_EXTERNAL = {
    "sqlite": "json_extract(spec, '$.trainer.kind') = 'command'",
    "postgresql": "spec -> 'trainer' ->> 'kind' = 'command'",
}


def upgrade() -> None:
    external = IS_EXTERNAL[op.get_context().dialect.name]
    op.execute(f"DELETE FROM goodput_cache WHERE run_id IN (SELECT run_id FROM runs WHERE {external})")
