"""Restarts with their last step that counts, and goodput, lost time and recoveries that use it.

Revision: 0018, after 0017. The views keep their columns and what they answer.
"""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

LAST_VALID_STEPS = """
UPDATE restarts SET last_valid_step = (
    SELECT MIN(s.step) FROM (
        SELECT restarts.last_step AS step
        UNION ALL
        SELECT l.first_step - 1 FROM restarts l
         WHERE l.run_id = restarts.run_id AND (l.attempt, l.restart) > (restarts.attempt, restarts.restart)) s)
WHERE last_step IS NOT NULL"""


def upgrade() -> None:
    op.add_column("restarts", sa.Column("last_valid_step", sa.Integer(), nullable=True))
    op.execute(LAST_VALID_STEPS)
