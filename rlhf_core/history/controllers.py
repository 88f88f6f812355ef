"""Who drove a run: its controllers, and the Prefect flow runs that they were."""

from sqlalchemy import select

from rlhf_core.history.store import HistoryStore
from rlhf_core.history.write import CONTROLLERS


def run_of_flow_run(store: HistoryStore, flow_run_id: str) -> str | None:
    """The run that a Prefect flow run drove last; None when it drove none."""
    question = (
        select(CONTROLLERS.c.run_id)
        .where(CONTROLLERS.c.flow_run_id == flow_run_id, CONTROLLERS.c.flow_run_id != "")
        .order_by(CONTROLLERS.c.started_at.desc())
        .limit(1)
    )
    with store.reading() as connection:
        found = connection.execute(question).scalar()
    return None if found is None else str(found)


def flow_runs_of(store: HistoryStore, run_id: str) -> list[str]:
    """The Prefect flow runs that drove a run, the newest last. A run driven without Prefect has none."""
    question = (
        select(CONTROLLERS.c.flow_run_id)
        .where(CONTROLLERS.c.run_id == run_id, CONTROLLERS.c.flow_run_id != "")
        .order_by(CONTROLLERS.c.position)
    )
    with store.reading() as connection:
        # One that was tried again drove it more than once.
        return list(dict.fromkeys(connection.execute(question).scalars()))
