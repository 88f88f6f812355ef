"""What the incidents of all runs speak against nodes: the history's strikes, weighed by the ledger."""

from datetime import datetime

from rlhf_core.diagnosis.ledger import REMEMBERED, Standing, Strike, standings
from rlhf_core.history import queries
from rlhf_core.history.store import HistoryStore
from rlhf_core.schemas.failures import FailureKind


def node_standings(store: HistoryStore, now: datetime) -> list[Standing]:
    """What is known against each node, the worst first.

    Raises:
        DatabaseUnavailable: the history does not answer.
    """
    strikes = queries.node_strikes(store, now - REMEMBERED)
    return standings([Strike(node, FailureKind(kind), time) for node, kind, time in strikes], now)
