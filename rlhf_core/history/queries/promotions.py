"""Promotions as the history has them: of one run, and those that a controller has something to do about."""

from datetime import datetime
from typing import Any

from sqlalchemy import select

from rlhf_core.history.store import HistoryStore
from rlhf_core.history.writers import PROMOTIONS
from rlhf_core.schemas.attempts import PromotionState

OPEN = (PromotionState.WAITING.value, PromotionState.APPROVED.value)
"""States in which a controller waits for the answer, or writes the model."""


def promotion_of(store: HistoryStore, run_id: str) -> dict[str, Any]:
    """Where the promotion of a run stands; empty where nobody was asked and nothing was promoted."""
    columns = [column for column in PROMOTIONS.c if column.name != "run_id"]
    with store.reading() as connection:
        row = connection.execute(select(*columns).where(PROMOTIONS.c.run_id == run_id)).one_or_none()
    if row is None:
        return {}
    return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in row._mapping.items()}


def open_promotions(store: HistoryStore) -> list[str]:
    """Runs whose promotion waits for an answer or for its model to be written, the longest waiting first."""
    question = (
        select(PROMOTIONS.c.run_id)
        .where(PROMOTIONS.c.state.in_(OPEN))
        .order_by(PROMOTIONS.c.asked_at, PROMOTIONS.c.run_id)
    )
    with store.reading() as connection:
        return list(connection.execute(question).scalars())
